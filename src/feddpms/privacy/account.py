"""A client's own account: reserve, draw, store, and only then send.

Whatever is computed from a client's records passes `release` (noisy, paid for) or `in_the_clear`.
A crash at any point leaves either the stored release, which is sent again, or a reservation without
one: what a secure source drew is lost then, counts as spent, and is not drawn again. A seeded
source would draw the same bytes, so a simulation draws again.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load, save

from feddpms.errors import PrivacyError
from feddpms.privacy.accountant import epsilon
from feddpms.privacy.ledger import Entry, Ledger
from feddpms.privacy.mechanism import UPDATES
from feddpms.privacy.settings import Privacy
from feddpms.records import write_file
from feddpms.types import Event, Tree


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
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self._privacy, self._client, self._folder = privacy, client, folder
        self._kept: dict[str, bytes] = {}
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
            PrivacyError: it would cost more than the budget, or it was reserved and lost.
        """
        stored = self._load(event.channel, round)
        if stored is None:
            self._reserve(round, event)
            tree = {k: v.contiguous() for k, v in draw().items()}
            stored = save(tree, {"round": str(round)})
            self._store(event.channel, stored)
        paid = replace(event, digest=hashlib.sha256(stored).hexdigest())
        self._note_stored(round, paid)
        return dict(sorted(load(stored).items())), (paid, *self._voided(round))

    def in_the_clear(self, round: int, *channels: str) -> tuple[Event, ...]:
        """The events of values that leave without any protection.

        Raises:
            PrivacyError: there is a budget, which nothing in the clear can keep.
        """
        events = tuple(Event(channel, "none") for channel in channels)
        if self._privacy.max_epsilon:
            raise PrivacyError(
                f"client {self._client} has a budget (privacy.max_epsilon "
                f"{self._privacy.max_epsilon:g}), and {', '.join(channels)} would leave in the "
                "clear, which no epsilon covers; nothing was sent: turn on private training and "
                "noisy weights, or lift the budget"
            )
        known = {e.channel for e in self.ledger.events()}
        new = [e for e in events if e.channel not in known]
        self.ledger.append(*(Entry("reserved", round, self._client, e) for e in new))
        return events

    def close(self) -> None:
        """Close and unlock the folder."""
        self.ledger.close()

    def _voided(self, round: int) -> tuple[Event, ...]:
        """The event that voids finite claims if the settings were chosen on private records."""
        if self._privacy.tuned_on == "public":
            return ()
        return self.in_the_clear(round, "settings tuned on private records")

    def _reserve(self, round: int, event: Event) -> None:
        """Write down what will be drawn, if the budget allows it."""
        again = any(
            e.event == event and (event.channel != UPDATES or e.round == round)
            for e in self.ledger.entries
            if e.state == "reserved"
        )
        if again and event.simulated:
            return
        if again:
            raise PrivacyError(
                f'client {self._client} reserved "{event.channel}" and lost what it drew; it '
                "counts as spent and is not drawn again, so this client sends none"
            )
        privacy = self._privacy
        if privacy.max_epsilon:
            total = epsilon([*self.ledger.events(), event], privacy.target_delta)
            if total > privacy.max_epsilon:
                raise PrivacyError(
                    f'client {self._client}: "{event.channel}" in round {round} would bring '
                    f"epsilon per record to {total:.4g} at delta {privacy.target_delta:g}, above "
                    f"the budget (privacy.max_epsilon {privacy.max_epsilon:g}); nothing was drawn "
                    "or sent"
                )
        self.ledger.append(Entry("reserved", round, self._client, event))

    def _note_stored(self, round: int, paid: Event) -> None:
        """Write down the digest of what is stored, once; refuse bytes that are not those."""
        before = [
            e.event.digest
            for e in self.ledger.entries
            if e.state == "stored"
            and e.event.channel == paid.channel
            and (paid.channel != UPDATES or e.round == round)
        ]
        if not before:
            self.ledger.append(Entry("stored", round, self._client, paid))
        elif before[-1] != paid.digest:
            raise PrivacyError(
                f'client {self._client}: the stored "{paid.channel}" is not what its ledger says; '
                "restore the folder's files, or start a client with a new budget"
            )

    def _path(self, channel: str) -> Path | None:
        """Where a channel's latest release is stored."""
        return self._folder / f"{channel.replace(' ', '-')}.safetensors" if self._folder else None

    def _store(self, channel: str, release: bytes) -> None:
        """Keep the bytes; those of model updates in a simulation can be drawn again."""
        path = self._path(channel)
        if path:
            write_file(path, release)
            _sync(path.parent)
        elif channel != UPDATES:
            self._kept[channel] = release

    def _load(self, channel: str, round: int) -> bytes | None:
        """The stored bytes of a channel, of this round if it is released every round."""
        path = self._path(channel)
        if path is None:
            return self._kept.get(channel)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            of = int((file.metadata() or {}).get("round", "0"))
        return path.read_bytes() if channel != UPDATES or of == round else None


def _sync(folder: Path) -> None:
    """Make a rename in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
