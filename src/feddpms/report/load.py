"""Run folders as values.

A run folder holds `run.toml` (resolved settings), `records.jsonl` (see `feddpms.records`),
`ledger.jsonl` (one privacy event a line) and, for methods that make synthetic images,
`images.safetensors`. A run that was interrupted loads like any other and says so in its `status`.
"""

import json
import math
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feddpms import records
from feddpms.errors import RunFolderError
from feddpms.records import PartitionRecord, PrivacyRecord, RoundRecord, RunRecord

LAST = 5
"""How many rounds the mean over the last rounds takes in."""


@dataclass(frozen=True)
class RunFolder:
    """One run as its folder tells it.

    Attributes:
        path: the folder.
        run: what was run.
        partition: who holds what, coarsely; None where it is not known.
        rounds: the finished rounds, in order.
        claim: what may be said of privacy, in words; None for a run that did not come to its end.
        settings: `run.toml`, parsed.
        ledger: the privacy events, in order; each has at least `channel` and `mechanism`.
        images: uint8 `real`, `synthetic` and, where a decoder was trained, `reconstructed`
            [classes, n, channels, height, width], and int64 `synthetic_count` [classes]; empty for
            a run without images.
    """

    path: Path
    run: RunRecord
    partition: PartitionRecord | None
    rounds: tuple[RoundRecord, ...]
    claim: str | None
    settings: dict[str, Any]
    ledger: list[dict[str, Any]]
    images: dict[str, np.ndarray]

    @property
    def last(self) -> tuple[RoundRecord, ...]:
        """The last five rounds, or fewer if the run has fewer."""
        return self.rounds[-LAST:]

    @property
    def diverged(self) -> int | None:
        """The first round from which the run is worth nothing; None for a sound run.

        That is the round that says so. Records of before rounds did: a round of the last phase
        whose test loss or accuracy is not finite, or the last round if its training loss is not.
        Earlier phases may have nothing to test, and a round in which no client had an example to
        train on has no training loss; with private training, no round has one.
        """
        sent = any(math.isfinite(r.train_loss) for r in self.rounds)
        for r in self.rounds:
            tested = r.phase == self.rounds[-1].phase
            values = (r.test_accuracy, r.test_loss) if tested else ()
            if sent and r is self.rounds[-1] and r.numbers.get("steps", 1) > 0:
                values = (*values, r.train_loss)
            if r.diverged or not all(map(math.isfinite, values)):
                return r.round
        return None

    @property
    def status(self) -> str:
        """`finished`, `unfinished (12 of 30 rounds)` or `diverged (loss not finite in round 7)`."""
        if self.diverged is not None:
            reason = self.rounds[self.diverged - 1].diverged or "loss not finite"
            return f"diverged ({reason} in round {self.diverged})"
        if len(self.rounds) < self.run.rounds:
            return f"unfinished ({len(self.rounds)} of {self.run.rounds} rounds)"
        return "finished"

    @property
    def short_status(self) -> str:
        """`finished`, `unfinished` or `diverged (round 7)`."""
        word = self.status.split(" (")[0]
        return word if self.diverged is None else f"{word} (round {self.diverged})"

    @property
    def finished(self) -> bool:
        """Whether the run has all its rounds and its losses are finite: it counts in the means."""
        return self.status == "finished"


def find(paths: Iterable[str | os.PathLike[str]]) -> list[RunFolder]:
    """All runs at or below the paths, in the order of the paths, then by name; each once.

    Args:
        paths: run folders, or folders that contain run folders at any depth.

    Raises:
        RunFolderError: a path does not exist or holds no run, or a run folder is broken.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = sorted(file.parent.resolve() for file in path.rglob("records.jsonl"))
        if not inside:
            what = "a folder without records.jsonl" if path.is_dir() else "no such folder"
            raise RunFolderError(
                f"expected a run folder at {path}, got {what}; name a run's folder"
            )
        found.update(dict.fromkeys(inside))
    if not found:
        raise RunFolderError("expected a run folder, got none; name at least one")
    return [load(path) for path in found]


def load(path: str | os.PathLike[str]) -> RunFolder:
    """The run in one folder.

    Raises:
        RunFolderError: a file is missing or broken, or the files do not fit each other.
    """
    path = Path(path)
    file = path / "records.jsonl"
    if not file.is_file():
        raise RunFolderError(f"expected a run folder with records.jsonl, got {path}")
    lines = records.read(file)
    last = lines[-1] if lines else None
    claim = last.claim if isinstance(last, PrivacyRecord) else None
    run, partition, rounds = _sort(lines if claim is None else lines[:-1], file)
    return RunFolder(
        path=path,
        run=run,
        partition=partition,
        rounds=rounds,
        claim=claim,
        settings=_settings(path / "run.toml"),
        ledger=_ledger(path / "ledger.jsonl"),
        images=_images(path / "images.safetensors", len(run.classes)),
    )


def _sort(
    lines: list[records.Record], file: Path
) -> tuple[RunRecord, PartitionRecord | None, tuple[RoundRecord, ...]]:
    """The records by kind, once their order and sizes are known to be right."""
    if not lines or not isinstance(run := lines[0], RunRecord):
        raise RunFolderError(f"expected a run record in the first line of {file}, got none")
    partition = lines[1] if len(lines) > 1 and isinstance(lines[1], PartitionRecord) else None
    rest = lines[1 if partition is None else 2 :]
    rounds = tuple(r for r in rest if isinstance(r, RoundRecord))
    if len(rounds) != len(rest):
        raise RunFolderError(f"expected only round records after the first lines of {file}")
    if [r.round for r in rounds] != list(range(1, len(rounds) + 1)):
        raise RunFolderError(f"expected rounds 1, 2, 3, ... in {file}, got another order")
    try:
        _check(run, partition, rounds)
    except (TypeError, ValueError) as error:
        raise RunFolderError(f"expected records that fit each other in {file}: {error}") from None
    return run, partition, rounds


def _check(
    run: RunRecord, partition: PartitionRecord | None, rounds: tuple[RoundRecord, ...]
) -> None:
    """Raise ValueError or TypeError where a value has the wrong kind or size."""
    whole = (run.seed, run.clients, run.rounds, run.parameters)
    if not all(isinstance(n, int) for n in (*whole, run.train_examples, run.test_examples)):
        raise ValueError("a count is not a whole number")
    words = (run.version, run.method, run.data, run.partition, *run.classes)
    if not isinstance(run.classes, tuple) or not all(isinstance(w, str) for w in words):
        raise ValueError("a name is not a text")
    if len(rounds) > run.rounds:
        raise ValueError(f"{len(rounds)} rounds where {run.rounds} were planned")
    if partition and any(len(row) != len(run.classes) for row in partition.levels):
        raise ValueError(f"a partition without {len(run.classes)} classes at each client")
    for r in rounds:
        if len(r.per_class_accuracy) != len(run.classes):
            raise ValueError(f"round {r.round} without {len(run.classes)} accuracies by class")
        values = (r.test_accuracy, r.test_loss, r.train_loss, r.seconds, r.bytes_up, r.bytes_down)
        if not all(isinstance(v, int | float) for v in (*values, *r.per_class_accuracy)):
            raise ValueError(f"a value of round {r.round} is not a number")
        if not isinstance(r.diverged, str):
            raise ValueError(f"why round {r.round} diverged is not a text")
        if not all(isinstance(v, int | float) for v in r.timing.values()):
            raise ValueError(f"a time of round {r.round} is not a number")


def _settings(file: Path) -> dict[str, Any]:
    """`run.toml`, parsed."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read settings at {file}: {error}") from None


def _ledger(file: Path) -> list[dict[str, Any]]:
    """The privacy events; none where the run stopped before its first one.

    A last line without its end was cut off when the run was stopped, and is left out.
    """
    if not file.exists():
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read the ledger at {file}: {error}") from None
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_event(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def _event(line: str, where: str) -> dict[str, Any]:
    """One line of the ledger."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not {"channel", "mechanism"} <= event.keys():
        raise RunFolderError(f"expected a privacy event, got something else: {where}")
    return event


def _images(file: Path, classes: int) -> dict[str, np.ndarray]:
    """The images of a run, checked; empty where the run has none."""
    if not file.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        images = load_file(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunFolderError(f"cannot read images at {file}: {error}") from None
    for name in ("real", "reconstructed", "synthetic"):
        if name in images and not _is_sheet(images[name], classes):
            raise RunFolderError(
                f"expected uint8 [{classes}, n, 1 or 3, height, width] as {name!r} in {file}, "
                f"got {images[name].dtype} {list(images[name].shape)}"
            )
    if "synthetic" in images and images.get("synthetic_count", np.empty(0)).shape != (classes,):
        raise RunFolderError(f"expected synthetic_count [{classes}] in {file}")
    return images


def _is_sheet(x: np.ndarray, classes: int) -> bool:
    """Whether the array can be drawn."""
    return x.dtype == np.uint8 and x.ndim == 5 and x.shape[0] == classes and x.shape[2] in (1, 3)
