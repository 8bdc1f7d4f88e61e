"""Where the time goes, for the log of a run. It decides nothing."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Spent = Counter[str]
"""Seconds by part."""


class Clock:
    """Seconds spent in each part; time in a part within another counts for the inner one alone."""

    def __init__(self):
        self._spent: Any = Spent()
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Let what is done inside count for a part."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def taken(self) -> Spent:
        """What was spent since this was last asked."""
        spent, self._spent = self._spent, Spent()
        return spent

    def _turn(self) -> None:
        """Book the time since the last turn."""
        now = time.perf_counter()
        if self._open:
            self._spent[self._open[-1]] += now - self._since
        self._since = now


clock = Clock()
"""of this process"""
