"""The run's log: one JSON object a line in `records.jsonl`. Reports read nothing else.

The first line is a RunRecord, the second a PartitionRecord, then one RoundRecord a round, and
a PrivacyRecord when the run is finished. Only the fields `seconds` and `timing` depend on the
machine; everything else is the same for the same settings.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TextIO

from feddpms.errors import RunFolderError


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What was run.

    Attributes:
        version: of feddpms.
        method: its name, such as "feddpms+moon".
        data: name of the data set.
        seed: the run's seed.
        clients: number of clients.
        rounds: number of rounds planned.
        classes: name of each class.
        parameters: number of trained values in the model that makes the predictions.
        train_examples: examples over all clients.
        test_examples: examples in the test set.
        partition: the split in words, such as "dirichlet beta=0.5".
    """

    type: ClassVar[str] = "run"
    version: str
    method: str
    data: str
    seed: int
    clients: int
    rounds: int
    classes: tuple[str, ...]
    parameters: int
    train_examples: int
    test_examples: int
    partition: str


@dataclass(frozen=True, kw_only=True)
class PartitionRecord:
    """How the simulator split the data, coarsely: no log holds a client's counts.

    Attributes:
        levels: examples of each class at each client [clients][classes], in per cent of the
            largest of these numbers, to the nearest quarter.
    """

    type: ClassVar[str] = "partition"
    levels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round.

    Attributes:
        round: 1..rounds.
        phase: the kind of its training messages: "train", "vae", "classify"; "share" if nobody got
            as far; "rest" if nobody was asked.
        test_accuracy: in [0, 1], of the global model; for `local`, mean over the clients' models.
            NaN if the loss is not finite: such a model predicts nothing.
        test_loss: mean cross entropy on the test set, in nats.
        per_class_accuracy: in [0, 1] for each class; NaN for a class with no test example.
        train_loss: mean of the clients' training losses, by number of steps.
        numbers: further sums over the replies, such as local steps or accepted synthetic images,
            and what the server's state says of itself.
        seconds: wall time of the round with its evaluation.
        timing: seconds of it by part (train, synthesis, evaluate, exchange), and
            `images_per_second` of training, each step taken as a full batch.
        bytes_up: bytes sent by all clients together.
        bytes_down: bytes sent to all clients together.
        bytes_client: bytes of the trees that a client keeps from this round on, the most of any
            that answered. Synthetic examples do not count, since their number tells of its data.
        bytes_server: bytes that the server keeps from this round on, the global model included.
        diverged: why the run ends with this round, if it ends in vain, such as "test loss not
            finite"; the numbers are then of the last model that could be used.
    """

    type: ClassVar[str] = "round"
    round: int
    phase: str
    test_accuracy: float
    test_loss: float
    per_class_accuracy: tuple[float, ...]
    train_loss: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: float
    timing: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int
    bytes_down: int
    bytes_client: int = 0
    bytes_server: int = 0
    diverged: str = ""


@dataclass(frozen=True, kw_only=True)
class PrivacyRecord:
    """What the ledger of a finished run allows to be said.

    Attributes:
        claim: in words, with unit, neighbours, delta, and what is not covered.
    """

    type: ClassVar[str] = "privacy"
    claim: str


Record = RunRecord | PartitionRecord | RoundRecord | PrivacyRecord
KINDS: dict[str, type[Record]] = {
    k.type: k for k in (RunRecord, PartitionRecord, RoundRecord, PrivacyRecord)
}


def write(record: Record, file: TextIO) -> None:
    """Append one record as one line and flush it."""
    file.write(json.dumps({"type": record.type, **_plain(asdict(record))}) + "\n")
    file.flush()


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside its place, synced, then renamed."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def read(path: Path) -> list[Record]:
    """All records of a file, in order, without a last line that a killed run left half written.

    Raises:
        RunFolderError: the file is missing, or a line is not a record; the line is named.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"cannot read records at {path}: {error}") from None
    found, lines = [], text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            found.append(_parse(line, f"{path}, line {number}"))
        except RunFolderError:
            if number < len(lines) or text.endswith("\n"):
                raise
    return found


def _parse(line: str, where: str) -> Record:
    """One line as a record."""
    try:
        values = json.loads(line)
        kind = KINDS[values.pop("type")]
        known = {f.name for f in fields(kind)}
        return kind(**{k: _revive(v) for k, v in values.items() if k in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunFolderError(f"expected a record of a run, got something else: {where}") from None


def _plain(value: Any) -> Any:
    """The value with NaN as None, since JSON has no NaN."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _revive(value: Any) -> Any:
    """The value as it was before `_plain`, lists as tuples."""
    if isinstance(value, list):
        return tuple(_revive(v) for v in value)
    if isinstance(value, dict):
        return {k: _revive(v) for k, v in value.items()}
    return math.nan if value is None else value
