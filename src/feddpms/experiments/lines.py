"""Finished cells: one JSON object a line, in a file for each experiment."""

import json
import math
import shlex
import statistics
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from feddpms import config, records
from feddpms.algorithms import FedDPMS
from feddpms.errors import RunFolderError
from feddpms.experiments.presets import WHOLE, Cell
from feddpms.report.compare import flat
from feddpms.report.load import LAST, RunFolder


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a cell came to.

    Attributes:
        data: name of the data set.
        fraction: part of its training data, in (0, 1].
        beta: Dirichlet concentration.
        clients: number of clients.
        rounds: rounds of communication.
        local_epochs: passes over a client's examples in a round.
        method: its name.
        seed: the run's.
        epsilon: target of the release, per record; None where nothing is released,
            or nothing that an epsilon covers.
        delta: of the same.
        final_accuracy: of the last round, in [0, 1]; None if the run diverged.
        last5_accuracy: mean of the last five rounds; None if the run diverged.
        ablation: what is changed in the method, in words; None for the method.
        command: repeats the run; DIR is where the data lie.
        minutes: of all rounds.
        versions: of python, feddpms and torch.
        accuracies: after each round.
        validation: part of the training examples that was held out, and scored in place of the
            test set; 0 for the test set.
    """

    data: str
    fraction: float
    beta: float
    clients: int
    rounds: int
    local_epochs: int
    method: str
    seed: int
    epsilon: float | None
    delta: float | None
    final_accuracy: float | None
    last5_accuracy: float | None
    ablation: str | None
    command: str
    minutes: float
    versions: dict[str, str]
    accuracies: tuple[float, ...]
    validation: float = 0.0


def line(cell: Cell, folder: RunFolder) -> Line:
    """The line of a finished cell.

    Raises:
        RunFolderError: the run is not finished.
    """
    if not folder.finished and folder.diverged is None:
        raise RunFolderError(f"expected a finished run, got {folder.path}: {folder.status}")
    run, sound = config.parse(cell.values), folder.finished
    examples = folder.run.train_examples + bool(run.data.validation) * folder.run.test_examples
    accuracies = tuple(round(r.test_accuracy, 6) for r in folder.rounds)
    releases = isinstance(run.method, FedDPMS) and run.privacy.release != "paper"
    return Line(
        data=run.data.name,
        fraction=round(examples / WHOLE[run.data.name], 6),
        beta=run.partition.beta,
        clients=run.partition.clients,
        rounds=run.rounds,
        local_epochs=run.local.epochs,
        method=folder.run.method,
        seed=run.seed,
        epsilon=run.privacy.target_epsilon if releases else None,
        delta=run.privacy.target_delta if releases else None,
        final_accuracy=accuracies[-1] if sound else None,
        last5_accuracy=round(statistics.fmean(accuracies[-LAST:]), 6) if sound else None,
        ablation=cell.ablation,
        command=command(cell),
        minutes=round(sum(r.seconds for r in folder.rounds) / 60, 2),
        versions={
            "python": python_version(),
            **{name: version(name) for name in ("feddpms", "torch")},
        },
        accuracies=tuple(a for a in accuracies if math.isfinite(a)),
        validation=run.data.validation,
    )


def command(cell: Cell) -> str:
    """The command that repeats a cell."""
    values = flat(cell.values)
    method = config.method_name(config.build_method(cell.values["method"], "method"))
    options = {
        "--method": method,
        "--data": values.pop("data.name"),
        "--fraction": f"{values.pop('data.fraction'):g}",
        "--beta": f"{values.pop('partition.beta'):g}",
        "--clients": values.pop("partition.clients"),
        "--rounds": values.pop("rounds"),
        "--local-epochs": values.pop("local.epochs"),
        "--seed": values.pop("seed"),
    }
    if values.pop("data.dir", ""):
        options["--data-dir"] = "DIR"
    words = [f"{name} {value}" for name, value in options.items()]
    sets = {k: v for k, v in values.items() if k.rpartition(".")[2] != "name"}
    words += [f"--set {shlex.quote(f'{k}={_toml(v)}')}" for k, v in sorted(sets.items())]
    return " ".join(["feddpms run", *words])


def _toml(value: Any) -> str:
    """A value as `--set` takes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(path: Path) -> list[Line]:
    """All lines of a file; none if there is no file.

    Raises:
        RunFolderError: a line is not one of a cell; it is named.
    """
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            values = json.loads(text)
            found.append(Line(**{**values, "accuracies": tuple(values["accuracies"])}))
        except (ValueError, TypeError, KeyError) as error:
            names = ", ".join(f.name for f in fields(Line))
            raise RunFolderError(
                f"{path}, line {number}: expected a JSON object with {names}, got {text[:40]!r} "
                f"({error}); mend or delete the line"
            ) from None
    return found


def write(path: Path, found: list[Line]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write_file(path, "".join(json.dumps(asdict(one)) + "\n" for one in found).encode())
