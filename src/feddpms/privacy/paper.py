"""What the paper's release costs, by the sensitivity of the vector that it releases.

The paper adds noise to each coordinate of a mean of m latent codes and draws many such noisy means.
Codes lie in [0, 1]^l, so one record, its label kept, moves the vector by up to sqrt(l) / m; N draws
of one mean are one release with noise smaller by sqrt(N).
"""

import math
from dataclasses import dataclass

from feddpms.privacy.accountant import epsilon
from feddpms.privacy.mechanism import MEANS, FixedMeans
from feddpms.types import Event

CLAIM = (0.5, 0.01)
"""(epsilon, delta) that the paper states for sigma above 3.9"""
DELTAS = (1e-2, 1e-5)


@dataclass(frozen=True)
class Cost:
    """One row: a way to read the paper's noise, and what it costs.

    Attributes:
        reading: "sigma / m" (the paper's formula) or "absolute" (a plain standard deviation).
        noise: sigma, or the standard deviation of each coordinate.
        latent: latent length l.
        draws: noisy means drawn of a class.
        noise_multiplier: of all draws together, against the sensitivity of the vector.
        epsilons: epsilon at each of DELTAS.
    """

    reading: str
    noise: float
    latent: int
    draws: int
    noise_multiplier: float
    epsilons: tuple[float, ...]


def cost(reading: str, noise: float, latent: int, draws: int, size: int = 100) -> Cost:
    """What one class's noisy means cost, for one record replaced by another of its class.

    Args:
        reading: "sigma / m" or "absolute".
        noise: sigma, or standard deviation of each coordinate; above 0.
        latent: latent length l.
        draws: noisy means drawn, kept or not.
        size: m, records in the mean.
    """
    statistic = FixedMeans(size, latent)
    std = noise / size if reading == "sigma / m" else noise
    one = std / statistic.l2_sensitivity
    event = Event(MEANS, "gaussian", one, statistic.l2_sensitivity, "add_remove", draws)
    epsilons = tuple(epsilon([event], delta) for delta in DELTAS)
    return Cost(reading, noise, latent, draws, one / math.sqrt(draws), epsilons)


def costs() -> list[Cost]:
    """The paper's own sigma, then both readings for its latent lengths and numbers of draws."""
    own = [cost("sigma / m", 3.9, latent, 1) for latent in (1, 32, 64, 128, 256)]
    rest = [
        cost(reading, noise, latent, draws)
        for reading in ("sigma / m", "absolute")
        for latent in (32, 128)
        for noise in (1.0, 4.0)
        for draws in (1, 50, 200)
    ]
    return [*own, *rest]
