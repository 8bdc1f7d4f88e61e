"""What the clients keep between rounds: a cohort's worth in memory, the others in files."""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from feddpms.engine.checkpoint import dumps, loads
from feddpms.errors import RunFolderError
from feddpms.records import write_file
from feddpms.types import Memory

SUFFIX = ".safetensors"


class Shelf(Mapping[int, Memory]):
    """The memories of clients that keep something, by client.

    A file holds what one client kept after one round and is never changed: a newer one stands
    beside it until `tidy`, so that a run that is stopped finds what its last checkpoint names.

    Args:
        folder: where files are, made when it is needed; None for a temporary one.
        known: the dataclasses that a memory may hold.
        room: memories that are held in memory; None for all.
    """

    def __init__(
        self, folder: Path | None = None, known: Iterable[type] = (), room: int | None = None
    ):
        self.room = room
        self._folder, self._known = folder, frozenset(known)
        self._near: dict[int, Memory] = {}  # the least recently used first
        self._since: dict[int, int] = {}  # round of what is near and not in a file
        self._files: dict[int, int] = {}  # round of each client's file
        self._digests: dict[int, bytes] = {}
        self._old: list[Path] = []

    def __getitem__(self, client: int) -> Memory:
        if client in self._near:
            memory = self._near.pop(client)
        else:
            path = self._path(client, self._files[client])
            memory = loads(path.read_bytes(), self._known, str(path))
        self._near[client] = memory  # now the last to go
        self._make_room()
        return memory

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._near.keys() | self._files.keys()))

    def __len__(self) -> int:
        return len(self._near.keys() | self._files.keys())

    def put(self, client: int, memory: Memory, round: int) -> None:
        """Keep what a client remembers after a round; nothing is kept of an empty memory."""
        self._near.pop(client, None)
        if empty(memory):
            self._since.pop(client, None)
            self._digests.pop(client, None)
            if client in self._files:
                self._old.append(self._path(client, self._files.pop(client)))
            return
        self._near[client] = memory
        self._since[client] = round
        self._make_room()

    def save(self) -> dict[int, int]:
        """Write what is in no file yet; returns the round of each client's file."""
        for client in list(self._since):
            self._write(client)
        return dict(sorted(self._files.items()))

    def restore(self, files: Mapping[int, int]) -> None:
        """Go back to what `save` returned; other files are removed.

        Raises:
            RunFolderError: a file is missing; a damaged one is noticed when it is read.
        """
        self._near, self._since, self._digests, self._files = {}, {}, {}, dict(files)
        named = {self._path(c, r) for c, r in files.items()}
        there = set(self._folder.glob(f"*{SUFFIX}")) if self._folder else set()
        for path in sorted(named - there):
            raise RunFolderError(
                f"expected {path}, which the checkpoint names, got no file; restore it, or start "
                "the run anew"
            )
        self._old = sorted(there - named)
        self.tidy()

    def tidy(self) -> None:
        """Remove files that newer ones have replaced."""
        for path in self._old:
            with suppress(FileNotFoundError):
                path.unlink()
        self._old = []

    def _make_room(self) -> None:
        """Hold no more in memory than there is room for."""
        while self.room is not None and len(self._near) > self.room:
            client = next(iter(self._near))
            if client in self._since:
                self._write(client)
            del self._near[client]

    def _write(self, client: int) -> None:
        """Write a memory that is near, unless its file already says the same."""
        round = self._since.pop(client)
        data = dumps(self._near[client], self._known)
        digest = hashlib.sha256(data).digest()
        if self._digests.get(client) == digest:
            return
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
        if self._files.get(client, round) != round:
            self._old.append(self._path(client, self._files[client]))
        self._files[client], self._digests[client] = round, digest

    def _path(self, client: int, round: int) -> Path:
        """Where a client's memory of a round is."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="feddpms-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{client}-{round}{SUFFIX}"


def empty(memory: Memory) -> bool:
    """Whether a memory holds nothing, at any depth."""
    inner = memory.inner is None or empty(memory.inner)
    return not memory.trees and memory.synthetic is None and inner
