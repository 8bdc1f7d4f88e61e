"""From a target (epsilon, delta) to noise multipliers, never the other way round.

Without private training the answer is exact: the analytic Gaussian mechanism (Balle and Wang 2018,
theorem 8), split by mu_total^2 = mu_latent^2 + mu_counts^2. With it, the latent means and the
histogram keep fixed multipliers and training takes what is left of the target.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from dp_accounting.gaussian_mechanism import get_sigma_gaussian

from feddpms.errors import ConfigError
from feddpms.privacy.accountant import composed
from feddpms.privacy.settings import Privacy
from feddpms.types import Neighbours

MOST_STEPS = 1_000_000
LEAST, MOST_NOISE = 0.2, 1e4
"""bounds of the noise multipliers of private training"""
COARSE, FINE = 1e-3, 1e-4
"""grids of the privacy loss: to search with, and to check and account with"""


@dataclass(frozen=True)
class Multipliers:
    """Noise multipliers of one client's channels.

    Attributes:
        total: of latent means and histogram together, as if they were one Gaussian release.
        latent: of the latent means.
        counts: of the histogram.
        training: of each step of private training; None without any step.
    """

    total: float
    latent: float
    counts: float
    training: float | None = None


@lru_cache(maxsize=256)
def calibrate(privacy: Privacy, steps: int = 0) -> Multipliers:
    """The noise multipliers that spend the target.

    Guarantee: latent means with `latent` and a histogram with `counts`, both drawn once, and
    `steps` steps of private training with `training`, if it is on, are together
    (target_epsilon, target_delta)-differentially private per record.

    Args:
        privacy: target and shape of the channels.
        steps: steps of private training a client takes in the whole run, at the most; 0 if only
            the releases are asked for.

    Raises:
        ConfigError: the histogram, or both releases, would already spend more than the target.
    """
    total = get_sigma_gaussian(privacy.target_epsilon, privacy.target_delta)
    counts = privacy.count_noise_multiplier
    if counts <= total:
        raise ConfigError(_spent("privacy.count_noise_multiplier", total, counts, privacy))
    if privacy.training.kind == "none":
        return Multipliers(total, 1 / math.sqrt(1 / total**2 - 1 / counts**2), counts)
    latent = privacy.training.release_noise_multiplier
    mu2 = 1 / latent**2 + 1 / counts**2
    if mu2 >= 1 / total**2:
        least = 1 / math.sqrt(1 / total**2 - 1 / counts**2)
        name = "privacy.training.release_noise_multiplier"
        raise ConfigError(_spent(name, least, latent, privacy))
    if not steps:
        return Multipliers(1 / math.sqrt(mu2), latent, counts)
    rate = privacy.training.sample_rate
    target = (privacy.target_epsilon, privacy.target_delta)
    training = training_multiplier(*target, rate, steps, mu2, privacy.adjacency)
    return Multipliers(1 / math.sqrt(mu2), latent, counts, training)


@lru_cache(maxsize=256)
def training_multiplier(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    mu2: float,
    neighbours: Neighbours,
) -> float:
    """The least noise multiplier of private training that keeps a run within its target.

    Args:
        target_epsilon: of the whole run.
        target_delta: of the same.
        sample_rate: Poisson sampling rate of a step, in (0, 1].
        steps: steps in the whole run, at least 1.
        mu2: sum of 1 / noise_multiplier^2 of the releases beside it.
        neighbours: relation under which it shall hold.

    Returns:
        The multiplier, to a relative precision of 1e-3, never too small; at least LEAST, below
        which it protects nobody and accounting takes minutes, so that run spends less.

    Raises:
        ConfigError: more than MOST_STEPS steps, or more noise than MOST_NOISE would be needed.
    """

    def spent(multiplier: float, interval: float) -> float:
        kinds = ((multiplier, sample_rate, steps),)
        return composed(mu2, kinds, neighbours, target_delta, interval)

    if steps > MOST_STEPS:
        raise ConfigError(
            f"private training: expected at most {MOST_STEPS:,} steps in a run, got {steps:,}; "
            "lower rounds, local epochs or privacy.training.expected_examples"
        )
    low, high = LEAST, 2 * LEAST
    while spent(high, COARSE) > target_epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise ConfigError(
                f"no noise multiplier below {MOST_NOISE:g} keeps {steps:,} steps within epsilon "
                f"{target_epsilon:g} at delta {target_delta:g}; allow more, or train less"
            )
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle, COARSE) > target_epsilon else (low, middle)
    while spent(high, FINE) > target_epsilon:  # a coarse grid errs upwards, so this rarely turns
        high *= 1.0005
    return high


def _spent(name: str, least: float, got: float, privacy: Privacy) -> str:
    """The complaint about a release that leaves nothing of the target."""
    return (
        f"{name} must be above {least:.4g} for epsilon {privacy.target_epsilon:g} at delta "
        f"{privacy.target_delta:g}, got {got:g}; raise it, or allow a larger privacy.target_epsilon"
    )
