"""A run folder while it is written: its log, its ledger, and after each round a checkpoint.

A run that was stopped goes on from its last checkpoint: what its log and ledger hold beyond that is
cut off, and comes again with the same bytes.
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from feddpms import records
from feddpms.algorithms import Method
from feddpms.engine import Progress, Shelf
from feddpms.engine.checkpoint import dumps, known_types, loads
from feddpms.errors import RunFolderError
from feddpms.privacy import Kept, Ledger
from feddpms.records import Record, RoundRecord

LOG, LEDGER, CHECKPOINT = "records.jsonl", "ledger.jsonl", "checkpoint.safetensors"
MEMORIES = "memories"


class Writing:
    """The files of a run that is going on.

    Args:
        folder: holds `run.toml`.
        method: what is run; it says what a checkpoint may hold.
        first: records of a run that begins.

    Raises:
        RunFolderError: the checkpoint is damaged or of another version, or the run began with other
            data.
    """

    def __init__(self, folder: Path, method: Method, first: Iterable[Record]):
        self._folder = folder
        self._known = {*known_types(method), Progress, Kept}
        first = list(first)
        self.memories = Shelf(folder / MEMORIES, known_types(method))
        self.progress = self._restore()
        if self.progress and records.read(folder / LOG)[: len(first)] != first:
            raise RunFolderError(
                f"expected the data and the split that {folder} began with, got others; restore "
                "them, or start the run anew"
            )
        self._log = (folder / LOG).open("a" if self.progress else "w")
        if not self.progress:
            with suppress(FileNotFoundError):
                (folder / LEDGER).unlink()
            for record in first:
                records.write(record, self._log)
        self.ledger = Ledger(folder / LEDGER)

    def rounds(self) -> tuple[RoundRecord, ...]:
        """The rounds that are done."""
        return tuple(r for r in records.read(self._folder / LOG) if isinstance(r, RoundRecord))

    def note(self, record: RoundRecord, progress: Progress) -> None:
        """Write a round's record, then a checkpoint from which the next round can begin."""
        records.write(record, self._log)
        os.fsync(self._log.fileno())
        sizes = tuple((self._folder / name).stat().st_size for name in (LOG, LEDGER))
        value = {
            "log": sizes[0],
            "ledger": sizes[1],
            "memories": self.memories.save(),
            "progress": progress,
        }
        records.write_file(self._folder / CHECKPOINT, dumps(value, self._known))

    def finish(self, record: Record) -> None:
        """Write the last record; no checkpoint is needed any more."""
        records.write(record, self._log)
        os.fsync(self._log.fileno())

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        self.ledger.close()

    def _restore(self) -> Progress | None:
        """What the last checkpoint holds, with log and ledger cut to where they were then."""
        file = self._folder / CHECKPOINT
        if not file.exists():
            return None
        value: dict[str, Any] = loads(file.read_bytes(), self._known, str(file))
        for name in ("log", "ledger"):
            path = self._folder / {"log": LOG, "ledger": LEDGER}[name]
            if not path.exists() or path.stat().st_size < value[name]:
                raise RunFolderError(
                    f"expected {path} as long as at the last checkpoint ({value[name]} bytes), got "
                    "less; restore it, or start the run anew"
                )
            os.truncate(path, value[name])
        self.memories.restore(value["memories"])
        return value["progress"]


def forget_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a finished run, and then what it names."""
    with suppress(FileNotFoundError):
        (folder / CHECKPOINT).unlink()
    shutil.rmtree(folder / MEMORIES, ignore_errors=True)
