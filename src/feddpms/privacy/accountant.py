"""From the ledger's events to a claim that can be read aloud."""

import math
from collections.abc import Iterable

from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from feddpms.privacy.ledger import Ledger
from feddpms.types import Event


def epsilon(events: Iterable[Event], delta: float) -> float:
    """Total epsilon of one client's events, per record under add/remove.

    Args:
        events: all events of one client.
        delta: in (0, 1).

    Returns:
        Epsilon; infinity if any event was in the clear or had no noise; 0 if there was none.
    """
    events = list(events)
    if any(e.mechanism == "none" or not e.noise_multiplier for e in events):
        return math.inf
    mu2 = sum(1 / e.noise_multiplier**2 for e in events if e.noise_multiplier)
    return get_epsilon_gaussian(1 / math.sqrt(mu2), delta) if mu2 else 0.0


def claim(ledger: Ledger, delta: float) -> str:
    """What a run's ledger allows to be said, in words.

    Args:
        ledger: the events of all clients.
        delta: in (0, 1).

    Returns:
        A few sentences: unit, neighbours, delta, what is covered (at the client that spent most)
        and what is not. A total over all channels is named only if none is in the clear.
    """
    clear = sorted({e.channel for e in ledger.events() if e.mechanism == "none"})
    spent = [[e for e in ledger.events(c) if e.mechanism != "none"] for c in ledger.clients()]
    noisy = max(spent, key=lambda events: epsilon(events, delta), default=[])
    parts = []
    if noisy:
        channels = " and ".join(sorted({e.channel for e in noisy}))
        parts.append(
            f"Covered: {channels}, released once by each client, are together "
            f"({epsilon(noisy, delta):.4g}, {delta:g})-differentially private for each record of "
            "that client (neighbours: one record added or removed), for any fixed broadcast model."
        )
    if clear:
        parts.append(
            f"Not covered, sent in the clear: {', '.join(clear)}; "
            "so there is no finite total epsilon for the run."
        )
    if any(e.simulated for e in noisy):
        parts.append("Simulated: the noise came from the run's seed, not from a secure source.")
    return " ".join(parts) or "Nothing that was computed from a client's records left it."
