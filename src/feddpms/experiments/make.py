"""Make the cells of an experiment, those that are not made yet, and keep a line of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from feddpms import config, runs
from feddpms.config import merge
from feddpms.data import Data, training_rows
from feddpms.errors import ConfigError
from feddpms.experiments.lines import Line, command, line, read, write
from feddpms.experiments.presets import EXPERIMENTS, WHOLE, Cell, Scale
from feddpms.experiments.tables import tables
from feddpms.report import page
from feddpms.report.load import RunFolder, find, load
from feddpms.runs import OnRound


def cells(
    name: str, scale: Scale, seeds: Sequence[int], chosen: Mapping[str, Sequence[str | float]]
) -> list[Cell]:
    """The cells of an experiment, all of a seed before those of the next.

    Args:
        name: the experiment's.
        scale: how large its runs are.
        seeds: one run of each kind for each.
        chosen: values of `data`, `method` or `beta` to keep; what is not named is kept.

    Raises:
        ConfigError: nothing is left.
    """
    every = [one for seed in seeds for one in EXPERIMENTS[name].cells(scale, seed)]
    found = [one for one in every if all(_value(one, k) in v for k, v in chosen.items())]
    if not found:
        has = {k: sorted({_value(one, k) for one in every}, key=str) for k in chosen}
        raise ConfigError(
            f"experiment {name}: expected some of {has}, got {dict(chosen)}; name what it has"
        )
    return found


def _value(one: Cell, key: str) -> str | float:
    """What a cell is chosen by."""
    if key == "method":
        return config.method_name(config.build_method(one.values["method"], "method"))
    return one.data if key == "data" else one.beta


def make(
    todo: Sequence[Cell],
    results: Path,
    out: Path,
    dirs: Mapping[str, str],
    on_start: Callable[[config.Run], OnRound | None] = lambda run: None,
    workers: int | None = 1,
) -> list[Line]:
    """Make what has no line yet, in order; a line is kept as soon as its run is finished.

    A run that was stopped goes on from its last round. A cell that another experiment in the same
    folder has made is not made again.

    Args:
        todo: the cells.
        results: file of the lines.
        out: folder for the runs, and a page of all.
        dirs: by data set, where it lies.
        on_start: as for `runs.compare`.
        workers: as for `runs.run`.

    Returns:
        The lines of the cells, in their order.

    Raises:
        FeddpmsError: a data set is not found, or a setting does not fit; cells made before stay.
    """
    placed = _placed(todo, dirs)
    for one in placed:
        config.parse(one.values)  # complains before anything is made
    own, elsewhere = {made.command: made for made in read(results)}, _elsewhere(results)
    for one in placed:
        key = command(one)
        if key not in own:
            made = elsewhere.get(key) or line(one, _made(one, out, on_start, workers))
            own[key] = replace(made, ablation=one.ablation)
            write(results, list(own.values()))
    made = [own[command(one)] for one in placed]
    if any(out.glob("*/run.toml")):
        ours = tables(results.stem, made)
        page.write(find([out]), out / "report.html", tables=ours)
    return made


def missing(todo: Sequence[Cell], results: Path, dirs: Mapping[str, str]) -> list[Cell]:
    """The cells that have no line in this folder yet.

    Args:
        todo: the cells.
        results: file of the lines.
        dirs: by data set, where it lies.
    """
    made = {one.command for one in read(results)} | set(_elsewhere(results))
    return [
        one
        for one, placed in zip(todo, _placed(todo, dirs), strict=True)
        if command(placed) not in made
    ]


def _placed(todo: Sequence[Cell], dirs: Mapping[str, str]) -> list[Cell]:
    """Cells with the place of their data, and with the part of what lies there.

    Raises:
        FeddpmsError: a data set is not found, or less of it than is asked for.
    """
    rows = {d: training_rows(Data(name=d, dir=dirs.get(d, ""))) for d in {c.data for c in todo}}
    found = []
    for one in todo:
        where, asked = dirs.get(one.data, ""), one.values["data"]["fraction"] * WHOLE[one.data]
        if asked > rows[one.data]:
            raise ConfigError(
                f"expected {asked:,.0f} training examples of {one.data}, got {rows[one.data]:,} in "
                f"{where}; take a smaller --scale, or the whole data set"
            )
        change = {"data": {"dir": where, "fraction": asked / rows[one.data]}}
        found.append(replace(one, values=merge(one.values, change)))
    return found


def _elsewhere(results: Path) -> dict[str, Line]:
    """What other experiments have made, by command."""
    others = [path for path in sorted(results.parent.glob("*.jsonl")) if path != results]
    return {made.command: made for path in others for made in read(path)}


def _made(
    one: Cell,
    out: Path,
    on_start: Callable[[config.Run], OnRound | None],
    workers: int | None,
) -> RunFolder:
    """Run a cell, or go on with it; its finished folder."""
    settings = config.parse(one.values)
    name = config.method_name(settings.method)
    short = sha256(command(one).encode()).hexdigest()[:8]
    folder = out / f"{one.data}-{name}-seed{settings.seed}-{short}"
    if (folder / "run.toml").exists():
        runs.resume(folder, on_start, workers)
    else:
        runs.run(settings, folder, on_start(settings), workers)
    return load(folder)
