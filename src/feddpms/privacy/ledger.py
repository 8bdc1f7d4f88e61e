"""The append-only list of privacy events, one JSON object a line in `ledger.jsonl`.

A client's own ledger says `reserved` before anything is drawn, and `stored` when what was drawn is
safe on disk; a server's says `received`. Each line is on disk before the call returns. Reserved and
received lines count; they are never taken back, so epsilon never falls.

A noisy channel is released once for the life of a run, and model updates once a round: the same
event again is the stored release sent again, a different one is refused. What is in the clear has
an infinite epsilon the first time; saying so again adds nothing.
"""

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import TypeAdapter, ValidationError

from feddpms.errors import PrivacyError
from feddpms.privacy.mechanism import UPDATES
from feddpms.types import Event, Neighbours, settings

State = Literal["reserved", "stored", "received"]


@dataclass(frozen=True)
class Entry:
    """One line.

    Attributes:
        state: `reserved` before a draw, `stored` after it, `received` by the server.
        round: 1..rounds.
        client: the client's number.
        event: what it paid for; of a reserved entry without a digest.
    """

    state: State
    round: int
    client: int
    event: Event


class Ledger:
    """Entries, written through to a file if there is one.

    Args:
        path: file to append to; made if missing, locked against other processes. None for memory.

    Raises:
        PrivacyError: the file is in use, or holds a line that is no entry.
    """

    def __init__(self, path: Path | None = None):
        self._file = _open(path) if path else None
        self.entries: list[Entry] = []
        self._places: dict[tuple[State, int, str], list[Entry]] = {}
        try:
            self._note(read(path) if path else [])
        except PrivacyError:
            self.close()
            raise

    def record(self, round: int, client: int, events: Iterable[Event]) -> None:
        """Write down what a client's reply carried.

        Args:
            round: 1..rounds.
            client: the client's number.
            events: the reply's events.

        Raises:
            PrivacyError: the client released a channel a second time, differently.
        """
        new: list[Entry] = []
        for event in events:
            before = self.earlier("received", client, round, event.channel)
            before += [e.event for e in new if e.event.channel == event.channel]
            if any(e != event for e in before):
                raise PrivacyError(
                    f'client {client} released "{event.channel}" again in round {round} with other '
                    "parameters; one release was what was paid for"
                )
            if not before:
                new.append(Entry("received", round, client, event))
        self.append(*new)

    def append(self, *entries: Entry) -> None:
        """Write entries down; they are on disk when this returns."""
        if self._file and entries:
            self._file.write("".join(_line(e) for e in entries))
            self._file.flush()
            os.fsync(self._file.fileno())
        self._note(entries)

    def earlier(self, state: State, client: int, round: int, channel: str) -> list[Event]:
        """A client's events on a channel in one state; of model updates, those of this round."""
        entries = self._places.get((state, client, channel), [])
        return [e.event for e in entries if channel != UPDATES or e.round == round]

    def events(self, client: int | None = None) -> list[Event]:
        """The events that count, of one client or of all, in the order they were written."""
        counted = [e for e in self.entries if e.state != "stored"]
        return [e.event for e in counted if client is None or e.client == client]

    def clients(self) -> list[int]:
        """The clients that have sent or reserved anything."""
        return sorted({e.client for e in self.entries})

    def close(self) -> None:
        """Close and unlock the file."""
        if self._file:
            self._file.close()

    def _note(self, entries: Iterable[Entry]) -> None:
        """Keep entries, also by state, client and channel."""
        for entry in entries:
            self.entries.append(entry)
            place = (entry.state, entry.client, entry.event.channel)
            self._places.setdefault(place, []).append(entry)


def of_folder(folder: Path) -> Ledger:
    """The ledger of a run or of a client, in memory.

    A client's own ledger, which a run with secure noise keeps in `clients/`, knows what was
    reserved and never arrived; it stands in for what the run's ledger says of that client.

    Raises:
        PrivacyError: there is none, or one cannot be read.
    """
    own = [e for file in sorted(folder.glob("clients/*/ledger.jsonl")) for e in read(file)]
    known = {e.client for e in own}
    found = Ledger()
    found.append(*own, *(e for e in read(folder / "ledger.jsonl") if e.client not in known))
    return found


def read(path: Path) -> list[Entry]:
    """The entries of a ledger's file, without a last line that a killed process left half written.

    Raises:
        PrivacyError: the file cannot be read, or a line is no entry; the line is named.
    """
    try:
        lines = path.read_text().split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise PrivacyError(
            f"expected a ledger at {path}: {error}; give a folder of a run or of a client"
        ) from None
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(_LINES.validate_json(line, strict=True).entry())
        except ValidationError as error:
            first = error.errors()[0]
            what = ".".join(map(str, first["loc"])) or "the line"
            raise PrivacyError(
                f"expected an entry of a ledger at {path}, line {number}, got something else "
                f"({what}: {first['msg']}); restore the file, or what was spent is unknown"
            ) from None
    return entries


@settings
class _Line:
    """A line as it is read, with the ranges that make its cost well defined."""

    state: State
    round: Annotated[int, Ge(0)]
    client: Annotated[int, Ge(0)]
    channel: Annotated[str, MinLen(1)]
    mechanism: Literal["gaussian", "none"]
    noise_multiplier: Annotated[float, Gt(0)] | None
    l2_sensitivity: Annotated[float, Gt(0)] | None
    neighbours: Neighbours | None
    times: Annotated[int, Ge(1)]
    sample_rate: Annotated[float, Gt(0), Le(1)]
    simulated: bool
    digest: str

    def __post_init__(self) -> None:
        needed = (self.noise_multiplier, self.l2_sensitivity, self.neighbours)
        if self.mechanism == "gaussian" and None in needed:
            raise ValueError("a Gaussian event needs its noise, sensitivity and neighbours")

    def entry(self) -> Entry:
        """The entry."""
        event = Event(**{f.name: getattr(self, f.name) for f in fields(Event)})
        return Entry(self.state, self.round, self.client, event)


_LINES = TypeAdapter(_Line)


def _line(entry: Entry) -> str:
    """An entry as one line."""
    head = {"state": entry.state, "round": entry.round, "client": entry.client}
    return json.dumps({**head, **asdict(entry.event)}) + "\n"


def _open(path: Path):
    """The file, open to append and locked, cut after its last whole line.

    A last line without its end was never acknowledged, so nothing was drawn for it.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise PrivacyError(f"{path} is in use by another process; stop it first") from None
    with path.open("rb+") as bytes_:
        whole = bytes_.read().rfind(b"\n") + 1
        bytes_.truncate(whole)
    return file
