"""The append-only list of privacy events, one JSON object a line in `ledger.jsonl`.

A channel of a client is written down once. A noisy channel is released once for the life of the
run: the same event again is the stored release sent again, a different one is refused. What is in
the clear has an infinite epsilon the first time; saying so again adds nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TextIO

from feddpms.errors import PrivacyError
from feddpms.types import Event


class Ledger:
    """Events by client and channel, written through to a file."""

    def __init__(self, file: TextIO | None = None):
        self._file = file
        self._events: dict[tuple[int, str], Event] = {}

    def record(self, round: int, client: int, events: Iterable[Event]) -> None:
        """Write down what a client's reply carried.

        Args:
            round: 1..rounds.
            client: the client's number.
            events: the reply's events.

        Raises:
            PrivacyError: the client released a noisy channel a second time, differently.
        """
        for event in events:
            key = (client, event.channel)
            if key not in self._events:
                self._events[key] = event
                if self._file:
                    line = {"round": round, "client": client, **asdict(event)}
                    self._file.write(json.dumps(line) + "\n")
                    self._file.flush()
            elif self._events[key] != event:
                raise PrivacyError(
                    f'client {client} released "{event.channel}" again in round {round} with other '
                    "parameters; one release for the life of the run is what was paid for"
                )

    def events(self, client: int | None = None) -> list[Event]:
        """The events of one client, or of all, in the order they were written."""
        return [e for (c, _), e in self._events.items() if client is None or c == client]

    def clients(self) -> list[int]:
        """The clients that have sent anything."""
        return sorted({client for client, _ in self._events})
