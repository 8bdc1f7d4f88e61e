"""From a ledger to a claim that can be read aloud, and to a table that can be checked."""

import math
from collections.abc import Iterable

from feddpms.privacy.accountant import epsilon
from feddpms.privacy.ledger import Ledger
from feddpms.privacy.mechanism import PAPER, TUNED, UPDATES
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
        if nothing was in the clear, and none at all if settings were tuned on private records.
    """
    channels = {e.channel for e in ledger.events()}
    clear = {e.channel for e in ledger.events() if e.mechanism == "none"}
    paper = _dearest(ledger, delta, channels & {PAPER})
    noisy = _dearest(ledger, delta, channels - clear - {PAPER})
    parts = []
    if TUNED in clear:
        parts.append(
            "No claim: clips or other settings were chosen by looking at private records, so no "
            f"finite epsilon holds for {_list(channels - {TUNED})}."
        )
    else:
        if noisy:
            parts.append(_covered(noisy, delta, everything=not clear and not paper))
        if paper:
            parts.append(_paper(paper, delta))
        if clear:
            parts.append(
                f"Not covered, sent in the clear: {_list(clear)}; "
                "so there is no finite total epsilon for the run."
            )
        if noisy:
            parts.append(f"It rests on: {'; '.join(_assumptions(noisy, bool(clear)))}.")
    if any(e.simulated for e in noisy + paper):
        parts.append("Simulated: the noise came from the run's seed, not from a secure source.")
    return " ".join(parts) or "The ledger is empty: it knows of nothing that left a client."


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
        cost = _number(epsilon(events, delta)) + (" of its noise alone" * (channel == PAPER))
        rows.append((channel, "Gaussian", ", ".join(multipliers), times, ", ".join(rates), cost))
    return rows


def _dearest(ledger: Ledger, delta: float, channels: set[str]) -> list[Event]:
    """The events on these channels of the client that spent most on them."""
    spent = [[e for e in ledger.events(c) if e.channel in channels] for c in ledger.clients()]
    return max(filter(None, spent), key=lambda events: epsilon(events, delta), default=[])


def _covered(noisy: list[Event], delta: float, everything: bool) -> str:
    """The sentence on what is covered."""
    total, names = epsilon(noisy, delta), {e.channel for e in noisy}
    if math.isinf(total):
        return f"Not covered: no finite epsilon for {_list(names)} at delta {delta:g}."
    what = f"everything a client sent in the whole run ({_list(names)})"
    verb = "is" if everything else "are together" if len(names) > 1 else "are"
    given = "" if _updates(noisy) else ", for any fixed broadcast model"
    return (
        f"Covered: {what if everything else _list(names)} {verb} ({_number(total)}, {delta:g})-"
        "differentially private for each record of that client (unit: one record; neighbours: "
        f"{NEIGHBOURS[noisy[0].neighbours or 'add_remove']}){given}."
    )


def _paper(events: list[Event], delta: float) -> str:
    """The sentence on the paper's release."""
    return (
        "Not covered: latent means as in the paper, encoded and chosen by models that the client "
        "trained on the same records; were those fixed, the noise of all draws would give "
        f"epsilon {_number(epsilon(events, delta))} at delta {delta:g} per record."
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


def _list(names: Iterable[str]) -> str:
    """Names with commas between."""
    return ", ".join(sorted(names))


def _number(value: float) -> str:
    """An epsilon."""
    return "infinite" if math.isinf(value) else f"{value:.4g}"
