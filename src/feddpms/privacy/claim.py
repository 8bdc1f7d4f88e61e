"""From a ledger to a claim that can be read aloud, and to a table that can be checked."""

import math
from collections.abc import Iterable

from feddpms.privacy.accountant import epsilon
from feddpms.privacy.ledger import Ledger
from feddpms.privacy.mechanism import UPDATES
from feddpms.types import Event

NEIGHBOURS = {
    "add_remove": "one record added or removed",
    "replace_one": "one record replaced by any other",
}


def claim(ledger: Ledger, delta: float) -> str:
    """What a ledger allows to be said, in words.

    Args:
        ledger: the events of all clients.
        delta: in (0, 1).

    Returns:
        A few sentences: unit, neighbours, delta, what is covered (at the client that spent most)
        and what is not, and what it rests on. A total over everything that was sent is named only
        if nothing was in the clear.
    """
    clear = sorted({e.channel for e in ledger.events() if e.mechanism == "none"})
    noisy = _dearest(ledger, delta, {e.channel for e in ledger.events()} - set(clear))
    parts = []
    if noisy:
        parts.append(_covered(noisy, delta, everything=not clear))
    if clear:
        parts.append(
            f"Not covered, sent in the clear: {', '.join(clear)}; "
            "so there is no finite total epsilon for the run."
        )
    if noisy:
        parts.append(f"It rests on: {'; '.join(_assumptions(noisy, bool(clear)))}.")
    if any(e.simulated for e in noisy):
        parts.append("Simulated: the noise came from the run's seed, not from a secure source.")
    return " ".join(parts) or "Nothing that was computed from a client's records left it."


def table(ledger: Ledger, delta: float) -> list[tuple[str, ...]]:
    """One row for each channel, at the client that spent most on it.

    Returns:
        A header, then channel, mechanism, noise multiplier, times, sampling rate, epsilon.
    """
    rows = [("channel", "mechanism", "noise multiplier", "times", "rate", f"epsilon at {delta:g}")]
    for channel in sorted({e.channel for e in ledger.events()}):
        events = _dearest(ledger, delta, {channel})
        if events[0].mechanism == "none":
            rows.append((channel, "in the clear", "-", "-", "-", "infinite"))
            continue
        multipliers = {f"{e.noise_multiplier:.5g}" for e in events}
        rates = {f"{e.sample_rate:.4g}" for e in events}
        times = str(sum(e.times for e in events))
        cost = f"{epsilon(events, delta):.4g}"
        rows.append((channel, "Gaussian", ", ".join(multipliers), times, ", ".join(rates), cost))
    return rows


def _dearest(ledger: Ledger, delta: float, channels: set[str]) -> list[Event]:
    """The events on these channels of the client that spent most on them."""
    spent = [[e for e in ledger.events(c) if e.channel in channels] for c in ledger.clients()]
    return max(filter(None, spent), key=lambda events: epsilon(events, delta), default=[])


def _covered(noisy: list[Event], delta: float, everything: bool) -> str:
    """The sentence on what is covered."""
    total = epsilon(noisy, delta)
    channels = " and ".join(sorted({e.channel for e in noisy}))
    what = "everything a client sent in the whole run" if everything else channels
    names = f" ({channels})" if everything else ""
    if math.isinf(total):
        return f"Not covered: {channels}{names} left without noise."
    verb = "is" if everything or len({e.channel for e in noisy}) == 1 else "are"
    given = "" if _updates(noisy) else ", for any fixed broadcast model"
    return (
        f"Covered: {what}{names} {verb} together ({total:.4g}, {delta:g})-differentially private "
        f"for each record of that client (unit: one record; neighbours: "
        f"{NEIGHBOURS[noisy[0].neighbours or 'add_remove']}){given}."
    )


def _assumptions(noisy: list[Event], clear: bool) -> Iterable[str]:
    """What the claim rests on."""
    yield "a person has one record at one client"
    yield "clips and other settings were not chosen by looking at the records"
    if _updates(noisy):
        yield "batches, latent and gradient noise stay secret; gradient noise is floating-point"
    if clear:
        yield "nothing else that was sent is held against it"


def _updates(noisy: list[Event]) -> bool:
    """Whether training was private."""
    return any(e.channel == UPDATES for e in noisy)
