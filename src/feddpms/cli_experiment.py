"""The verb `experiment`: the paper's tables and figures, measured cell by cell."""

from pathlib import Path
from typing import Annotated

import typer

from feddpms.errors import ConfigError, unknown
from feddpms.terminal import ShownProgress, absolute, count, numbers_or_names


def experiment(
    name: Annotated[
        str, typer.Argument(help="Which; without a name, all are listed.", show_default=False)
    ] = "",
    scale: Annotated[
        str, typer.Option(help="laptop (a tenth of the data), paper, or trial.")
    ] = "laptop",
    seeds: Annotated[str, typer.Option(help="Numbers, with commas between.")] = "0,1,2",
    data: Annotated[str, typer.Option(help="Only these data sets.")] = "",
    methods: Annotated[str, typer.Option(help="Only these methods.")] = "",
    beta: Annotated[str, typer.Option(help="Only these concentrations.")] = "",
    data_dir: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Where a data set lies; repeatable."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the finished cells, NAME.jsonl.")] = Path(
        "benchmarks/results"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; default runs/experiment-NAME.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Only say what is to be made, and how long it takes.")
    ] = False,
    tables: Annotated[
        Path | None,
        typer.Option(help="Only put the table of the finished cells into this document."),
    ] = None,
    workers: Annotated[str, typer.Option(help="Processes: auto, or a number.")] = "auto",
) -> None:
    """Measure a table or figure of the paper, one run after another.

    Each finished run is one line of RESULTS/NAME.jsonl, and is not made again; a run that was
    stopped goes on from its last round.
    """
    from feddpms.experiments import EXPERIMENTS, SCALES, cells, insert, make, read, table

    if not name:
        for one, what in EXPERIMENTS.items():
            typer.echo(f"{one:12s} {what.description}")
        return
    if name not in EXPERIMENTS:
        raise ConfigError(unknown("experiment", name, EXPERIMENTS))
    if scale not in SCALES:
        raise ConfigError(unknown("scale", scale, SCALES))
    kept = results / f"{name}.jsonl"
    if tables:
        insert(tables, name, table(name, read(kept)))
        typer.echo(f"Table {name} in {tables}")
        return
    chosen = {
        "data": numbers_or_names("--data", data, str) if data else None,
        "method": numbers_or_names("--methods", methods, str) if methods else None,
        "beta": numbers_or_names("--beta", beta, float) if beta else None,
    }
    numbers = numbers_or_names("--seeds", seeds, int)
    todo = cells(name, SCALES[scale], numbers, {k: v for k, v in chosen.items() if v})
    dirs = _dirs(data_dir or [])
    if list_:
        _say(todo, kept, dirs, count(workers))
        return
    with ShownProgress() as start:
        folder = out or Path("runs") / f"experiment-{name}"
        made = make(todo, kept, folder, dirs, start, count(workers))
    typer.echo(table(name, made))
    typer.echo(f"Lines: {kept}. Page: {folder / 'report.html'}")


def _say(todo: list, kept: Path, dirs: dict[str, str], workers: int | None) -> None:
    """What is to be made, and how long it takes."""
    from feddpms.experiments import missing, predicted

    left = missing(todo, kept, dirs)
    minutes = predicted(left, workers)
    for one, time in zip(left, minutes, strict=True):
        method = one.values["method"]["name"]
        words = f"{one.data} beta {one.beta:g} {method} seed {one.values['seed']}"
        typer.echo(f"{time:7.1f} min  {words}{', ' + one.ablation if one.ablation else ''}")
    typer.echo(
        f"{len(todo) - len(left)} of {len(todo)} cells are finished; the others take about "
        f"{sum(minutes):.0f} minutes here"
    )


def _dirs(given: list[str]) -> dict[str, str]:
    """Where data sets lie, by name."""
    found = {}
    for pair in given:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--data-dir: expected NAME=DIR, such as cifar10=data, got {pair}")
        found[name] = absolute(path)
    return found
