"""A client's own account: reserve, draw, store, and only then send.

Whatever is computed from a client's records passes `release` (noisy, paid for) or `in_the_clear`.
A crash at any point leaves either the stored release, which is sent again, or a reservation without
one: what a secure source drew is lost then, counts as spent, and is not drawn again. A seeded
source would draw the same bytes, so a simulation draws again.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load, save

from feddpms.errors import PrivacyError
from feddpms.privacy.accountant import epsilon
from feddpms.privacy.ledger import Entry, Ledger, State
from feddpms.privacy.mechanism import TUNED
from feddpms.privacy.settings import Privacy
from feddpms.privacy.store import Store
from feddpms.types import Event, Tree

ROUNDING = 1e-9
"""Part of a budget by which rounding may exceed it."""


@dataclass(frozen=True)
class Kept:
    """What an account in memory holds.

    Attributes:
        entries: of its ledger.
        releases: the bytes that are sent again, uint8, by channel.
    """

    entries: tuple[Entry, ...]
    releases: Tree


class Account:
    """What one client has released, and what it may still spend.

    Args:
        privacy: target and budget.
        client: the client's number.
        folder: where its ledger and what it released are kept, for the life of the client; None to
            keep them in memory, for simulations.

    Raises:
        PrivacyError: the folder is in use, or its ledger cannot be read.
    """

    def __init__(self, privacy: Privacy, client: int = 0, folder: Path | None = None):
        self._privacy, self._client, self._store = privacy, client, Store(folder)
        self.ledger = Ledger(folder / "ledger.jsonl" if folder else None)

    def release(
        self, round: int, event: Event, draw: Callable[[], Tree]
    ) -> tuple[Tree, tuple[Event, ...]]:
        """The stored release of a channel; drawn now if there is none.

        Args:
            round: 1..rounds; model updates are released once a round, other channels once.
            event: what the draw will cost, without a digest.
            draw: computes the noisy value; called at most once.

        Returns:
            What may be sent, and the events to send with it.

        Raises:
            PrivacyError: it would cost more than the budget; it was reserved and lost, or reserved
                with other parameters; or what is stored is not what the ledger says.
        """
        voided = self._voided(round)
        stored = self._store.get(event.channel, round)
        self._reserve(round, event, stored)
        if stored is None:
            tree = {k: v.contiguous() for k, v in draw().items()}
            stored = save(tree, {"round": str(round)})
            self._store.put(event.channel, stored)
        paid = replace(event, digest=hashlib.sha256(stored).hexdigest())
        self._note_stored(round, paid)
        return dict(sorted(load(stored).items())), (paid, *voided)

    def in_the_clear(self, round: int, *channels: str) -> tuple[Event, ...]:
        """The events of values that leave without any protection.

        Raises:
            PrivacyError: there is a budget, which nothing in the clear can keep.
        """
        simulated = self._privacy.noise == "seeded"
        events = tuple(Event(channel, "none", simulated=simulated) for channel in channels)
        if self._privacy.max_epsilon:
            raise PrivacyError(
                f"client {self._client} has a budget (privacy.max_epsilon "
                f"{self._privacy.max_epsilon:g}), and {', '.join(channels)} would leave in the "
                "clear, which no epsilon covers; it was not sent: turn on private training and "
                "noisy weights, or lift the budget"
            )
        known = {e.channel for e in self.ledger.events()}
        new = [e for e in events if e.channel not in known]
        self.ledger.append(*(Entry("reserved", round, self._client, e) for e in new))
        return events

    def kept(self) -> Kept:
        """What an account in memory holds, to be written down."""
        return Kept(tuple(self.ledger.entries), self._store.kept())

    @classmethod
    def restored(cls, privacy: Privacy, client: int, kept: Kept) -> "Account":
        """An account in memory as it was."""
        account = cls(privacy, client)
        account.ledger.append(*kept.entries)
        account._store.restore(kept.releases)
        return account

    def close(self) -> None:
        """Close and unlock the folder."""
        self.ledger.close()

    def _voided(self, round: int) -> tuple[Event, ...]:
        """The event that voids finite claims if the settings were chosen on private records."""
        if self._privacy.tuned_on == "public":
            return ()
        return self.in_the_clear(round, TUNED)

    def _before(self, state: State, round: int, channel: str) -> list[Event]:
        """Earlier entries of a channel; of model updates, those of this round."""
        return self.ledger.earlier(state, self._client, round, channel)

    def _reserve(self, round: int, event: Event, stored: bytes | None) -> None:
        """Write down what will be drawn, once, if the budget allows it; refuse to draw twice."""
        before = self._before("reserved", round, event.channel)
        if any(e != event for e in before):
            raise PrivacyError(
                f'client {self._client} reserved "{event.channel}" with other parameters than '
                "those of now; run it with the settings that it was reserved with"
            )
        if stored is not None and not before:
            raise PrivacyError(
                f'client {self._client} has a stored "{event.channel}" that its ledger does not '
                "know; restore the ledger, or what was spent is unknown"
            )
        if before and stored is None and not event.simulated:
            raise PrivacyError(
                f'client {self._client} reserved "{event.channel}" and lost what it drew; it '
                "counts as spent and is not drawn again, so this client sends none"
            )
        if not before:
            self._afford(round, event)
            self.ledger.append(Entry("reserved", round, self._client, event))

    def _afford(self, round: int, event: Event) -> None:
        """Refuse what would cost more than the budget."""
        budget, delta = self._privacy.max_epsilon, self._privacy.target_delta
        if not budget:
            return
        total = epsilon([*self.ledger.events(), event], delta)
        if total > budget * (1 + ROUNDING):
            raise PrivacyError(
                f'client {self._client}: "{event.channel}" in round {round} would bring epsilon '
                f"per record to {total:.4g} at delta {delta:g}, above the budget "
                f"(privacy.max_epsilon {budget:g}); it was not drawn"
            )

    def _note_stored(self, round: int, paid: Event) -> None:
        """Write down the digest of what is stored, once; refuse bytes that are not those."""
        before = self._before("stored", round, paid.channel)
        if not before:
            self.ledger.append(Entry("stored", round, self._client, paid))
        elif before[-1] != paid:
            raise PrivacyError(
                f'client {self._client}: the stored "{paid.channel}" is not what its ledger says; '
                "restore the folder's files, or start a client with a new budget"
            )
