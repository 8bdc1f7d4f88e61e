"""What a client's events add up to.

Gaussian releases compose exactly by mu^2 = sum of 1 / noise_multiplier^2 (Dong, Roth, Su 2022,
corollary 2; Balle and Wang 2018, theorem 8). With Poisson-sampled Gaussians among them, privacy
loss distributions are composed by dp-accounting, rounded so that epsilon never comes out too low.
"""

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import dp_accounting
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant

from feddpms.errors import PrivacyError
from feddpms.types import Event, Neighbours

Sampled = tuple[tuple[float, float, int], ...]
"""(noise multiplier, sampling rate, times) of each kind of sampled Gaussian"""


def epsilon(events: Iterable[Event], delta: float) -> float:
    """Total epsilon of one client's events, per record, under the neighbours that they name.

    Args:
        events: all events of one client.
        delta: in (0, 1).

    Returns:
        Epsilon; infinity if any event was in the clear or had no noise; 0 if there was none.

    Raises:
        PrivacyError: the events name different neighbours, so that no total is defined.
    """
    events = list(events)
    if any(e.mechanism == "none" or not e.noise_multiplier for e in events):
        return math.inf
    relations = {e.neighbours for e in events}
    if len(relations) > 1:
        raise PrivacyError(
            "expected events under one neighbouring relation, got "
            f"{', '.join(sorted(map(str, relations)))}"
        )
    mu2, sampled = 0.0, Counter()
    for e in events:
        nm = float(e.noise_multiplier or 0)
        if e.sample_rate == 1:
            mu2 += e.times / nm**2
        else:
            sampled[nm, e.sample_rate] += e.times
    if not sampled:
        return get_epsilon_gaussian(1 / math.sqrt(mu2), delta) if mu2 else 0.0
    kinds = tuple((nm, rate, times) for (nm, rate), times in sorted(sampled.items()))
    return composed(mu2, kinds, relations.pop() or "add_remove", delta)


@lru_cache(maxsize=4096)
def composed(
    mu2: float, sampled: Sampled, neighbours: Neighbours, delta: float, interval: float = 1e-4
) -> float:
    """Epsilon of a Gaussian with mu^2 and of sampled Gaussians together, by PLD.

    Args:
        mu2: sum of 1 / noise_multiplier^2 of what is not sampled.
        sampled: the sampled ones.
        neighbours: relation under which all sensitivities hold.
        delta: in (0, 1).
        interval: grid of the privacy loss; smaller is tighter and slower.
    """
    replace = neighbours == "replace_one"
    # dp-accounting wants noise over the norm of one record, and doubles the sensitivity itself when
    # records are replaced; ours is over the whole sensitivity, so it is doubled back.
    factor = 2 if replace else 1
    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_ONE
        if replace
        else dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval=interval,
    )
    if mu2:
        accountant.compose(dp_accounting.GaussianDpEvent(factor / math.sqrt(mu2)))
    for nm, rate, times in sampled:
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(factor * nm))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, times))
    return float(accountant.get_epsilon(delta))
