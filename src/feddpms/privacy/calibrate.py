"""From a target (epsilon, delta) to noise multipliers, by the analytic Gaussian mechanism.

Balle and Wang (2018), theorem 8: a Gaussian release with mu = l2_sensitivity / std is exactly
(epsilon, delta)-private for delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).
Gaussian releases on the same records compose by mu_total^2 = sum of mu^2.
"""

import math
from dataclasses import dataclass

from dp_accounting.gaussian_mechanism import get_sigma_gaussian

from feddpms.errors import ConfigError
from feddpms.privacy.mechanism import Privacy


@dataclass(frozen=True)
class Multipliers:
    """Noise multipliers of one client's release.

    Attributes:
        total: of the two parts together, as if they were one Gaussian release.
        latent: of the class sums (standard deviation over the clip radius).
        counts: of the histogram (standard deviation in records).
    """

    total: float
    latent: float
    counts: float


def calibrate(privacy: Privacy) -> Multipliers:
    """The noise multipliers that spend exactly the target.

    Guarantee: class sums with `latent` and a histogram with `counts`, both drawn once, are together
    (target_epsilon, target_delta)-differentially private per record under add/remove.

    Raises:
        ConfigError: the histogram alone would already spend more than the target.
    """
    total = get_sigma_gaussian(privacy.target_epsilon, privacy.target_delta)
    counts = privacy.count_noise_multiplier
    left = 1 / total**2 - 1 / counts**2
    if left <= 0:
        raise ConfigError(
            f"privacy.count_noise_multiplier must be above {total:.4g} for epsilon "
            f"{privacy.target_epsilon:g} at delta {privacy.target_delta:g}, got {counts:g}; "
            "raise it, or allow a larger privacy.target_epsilon"
        )
    return Multipliers(total=total, latent=1 / math.sqrt(left), counts=counts)
