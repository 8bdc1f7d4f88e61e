"""The command `feddpms`. Each verb reads its options, calls one function, and prints."""

import sys
import textwrap
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from feddpms import cli_experiment, cli_privacy
from feddpms.cli_privacy import columns
from feddpms.errors import ConfigError, FeddpmsError
from feddpms.terminal import ShownProgress, absolute, count, free, numbers_or_names

if TYPE_CHECKING:
    from feddpms.runs import Result

app = typer.Typer(
    name="feddpms",
    help="Train one classifier across data owners that must not pool their data.\n\n"
    "Start with: feddpms compare --methods fedavg,feddpms --rounds 20",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RIVALS = "local,fedavg,fedprox,moon,fedmix,feddpms"
"""what `compare` compares by default"""
DIVERGED = 3
"""the status of a command whose one run diverged"""
STOPPED = 130
"""the status of a command stopped by the keyboard, which typer returns"""

MethodOption = Annotated[
    str | None, typer.Option("--method", help="See `feddpms methods`; a+b is a around b.")
]
DataOption = Annotated[
    str | None, typer.Option("--data", help="See `feddpms datasets`; hf:NAME for the hub.")
]
DirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder or file that holds the data set.")
]
FractionOption = Annotated[
    float | None, typer.Option(help="Part of the training data, in (0, 1]; the test set is whole.")
]
ClientsOption = Annotated[int | None, typer.Option(help="Number of clients.")]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="dirichlet, dirichlet_client, iid, shards, labels, quantity, or file.",
    ),
]
BetaOption = Annotated[
    float | None, typer.Option(help="Dirichlet concentration, > 0; smaller is more unequal.")
]
CohortOption = Annotated[
    float | None, typer.Option(help="Part of the clients that take part in a round, in (0, 1].")
]
RoundsOption = Annotated[int | None, typer.Option(help="Rounds of communication.")]
EpochsOption = Annotated[
    int | None, typer.Option(help="Passes over its data a client makes in a round.")
]
SeedOption = Annotated[int | None, typer.Option(help="Decides everything that is random.")]
WorkersOption = Annotated[
    str, typer.Option(help="Processes: auto, or a number; the result is the same for any.")
]
PresetOption = Annotated[
    str | None, typer.Option(help="paper: feddpms as the paper has it; all else wins over it.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Any setting, such as local.epochs=1; see `feddpms settings`; repeatable.",
    ),
]
ConfigArgument = Annotated[
    Path | None,
    typer.Argument(help="TOML file with settings; options win over it.", metavar="[CONFIG.toml]"),
]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Options of the command itself."""
    if version:
        import feddpms

        typer.echo(f"feddpms {feddpms.__version__}")
        raise typer.Exit


@app.command()
def run(
    config_file: ConfigArgument = None,
    method: MethodOption = None,
    data: DataOption = None,
    data_dir: DirOption = None,
    fraction: FractionOption = None,
    clients: ClientsOption = None,
    partition: KindOption = None,
    beta: BetaOption = None,
    cohort: CohortOption = None,
    rounds: RoundsOption = None,
    local_epochs: EpochsOption = None,
    seed: SeedOption = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the run; default runs/NAME.")
    ] = None,
    workers: WorkersOption = "auto",
    preset: PresetOption = None,
    set_: SetOption = None,
) -> None:
    """Run one method once.

    CONFIG.toml holds settings (see `feddpms settings`); options win over it, --set over both.
    `feddpms run DIR/run.toml` repeats a run to the same bytes. Ends with 3 if the run diverged.
    """
    from feddpms import config, runs

    given = _given(data, data_dir, fraction, clients, partition, beta, cohort, rounds, local_epochs)
    values = _values(config_file, {**given, "method": method, "seed": seed}, set_)
    if preset:
        values, (table,) = config.with_preset(preset, values, [values.get("method", {})])
        values["method"] = table
    settings = config.parse(values)
    name = f"{settings.data.name}-{config.method_name(settings.method)}-seed{settings.seed}"
    folder = out or free(Path("runs"), name)
    with ShownProgress() as start:
        result = runs.run(settings, folder, start(settings), count(workers))
    typer.echo(_table([folder]))
    typer.echo(f"\nPrivacy. {result.claim}")
    typer.echo(f"\nPage: {folder / 'report.html'}")
    _end([result])


@app.command()
def compare(
    config_file: ConfigArgument = None,
    methods: Annotated[
        str,
        typer.Option(
            help=f"Names, with commas between; default {RIVALS}.",
            show_default=False,
        ),
    ] = RIVALS,
    seeds: Annotated[
        str,
        typer.Option(
            help="Numbers, with commas between; one run for each method and seed; default 0.",
            show_default=False,
        ),
    ] = "0",
    data: DataOption = None,
    data_dir: DirOption = None,
    fraction: FractionOption = None,
    clients: ClientsOption = None,
    partition: KindOption = None,
    beta: BetaOption = None,
    cohort: CohortOption = None,
    rounds: RoundsOption = None,
    local_epochs: EpochsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the runs; default runs/NAME.")
    ] = None,
    workers: WorkersOption = "auto",
    preset: PresetOption = None,
    set_: SetOption = None,
) -> None:
    """Run several methods under equal conditions: same data, split, network, weights and steps.

    CONFIG.toml holds settings that all share; its method and seed are not used.
    A setting of one method is set by its name: --set fedprox.mu=0.1.
    """
    from feddpms import config, runs

    given = _given(data, data_dir, fraction, clients, partition, beta, cohort, rounds, local_epochs)
    names = numbers_or_names("--methods", methods, str)
    shared, own = _by_method(names, set_ or [])
    values = _values(config_file, given, shared)
    cells = [config.override(config.method_values(n), own[n]) for n in names]
    if preset:
        values, cells = config.with_preset(preset, values, cells)
    settings = config.parse(values)
    folder = out or free(Path("runs"), f"{settings.data.name}-compare")
    with ShownProgress() as start:
        numbers = numbers_or_names("--seeds", seeds, int)
        runs.compare(settings, cells, numbers, folder, start, count(workers))
    typer.echo(_table([folder]))
    typer.echo(f"\nPage: {folder / 'report.html'}")


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, or of a comparison.", metavar="DIR")
    ],
    workers: WorkersOption = "auto",
) -> None:
    """Go on with a run or a comparison that was stopped; it ends in the same bytes."""
    from feddpms import runs

    with ShownProgress() as start:
        done = runs.resume(folder, start, count(workers))
    typer.echo(_table([folder]))
    typer.echo(f"\nFinished now: {len(done)}. Page: {folder / 'report.html'}")
    if (folder / "run.toml").exists():
        _end(done)


@app.command()
def methods() -> None:
    """List the methods."""
    from feddpms.algorithms import METHODS

    head = ("method", "family", "source", "sends beyond a model", "client keeps", "server keeps")
    abouts = {name: cls.about for name, cls in METHODS.items()}
    rows = [
        (name, a.family, a.paper, a.extra, a.client_state, a.server_state)
        for name, a in abouts.items()
    ]
    typer.echo(columns([head, *rows]))
    typer.echo("\nfamily `data` wraps a training method: feddpms+moon is FedDPMS around MOON.")


@app.command()
def settings(
    method: Annotated[
        str, typer.Argument(help="A method, such as feddpms+moon.", show_default=False)
    ] = "feddpms",
) -> None:
    """Print every setting with its default and meaning, as a TOML file to start from."""
    from feddpms import config

    typer.echo(config.template(config.parse({"method": method})), nl=False)


@app.command()
def datasets(data_dir: DirOption = None) -> None:
    """List the data sets, and whether each was found."""
    from feddpms.data import available

    for name, what, found, where in available(str(data_dir or "")):
        typer.echo(f"{name:9s} {'found' if found else '-':6s} {what}")
        typer.echo(textwrap.indent(textwrap.fill(where, 82, break_on_hyphens=False), 17 * " "))


@app.command()
def partition(
    config_file: ConfigArgument = None,
    data: DataOption = None,
    data_dir: DirOption = None,
    fraction: FractionOption = None,
    clients: ClientsOption = None,
    partition: KindOption = None,
    beta: BetaOption = None,
    seed: SeedOption = None,
    out: Annotated[Path | None, typer.Option(help="Picture to write, .svg or .png.")] = None,
    set_: SetOption = None,
) -> None:
    """Show who holds what: examples of each class at each client, as text and as a picture."""
    from feddpms import config, sheets

    given = _given(data, data_dir, fraction, clients, partition, beta)
    chosen = config.parse(_values(config_file, {**given, "seed": seed}, set_))
    words, picture = sheets.show_partition(chosen, out or free(Path(), "partition", ".svg"))
    typer.echo(words)
    typer.echo(f"\nPicture: {picture}")


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders that hold some.", metavar="DIR...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page to write; default report.html in the first folder.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
) -> None:
    """Compare finished runs: a table, and one page that needs no network.

    DIR is a run folder, or a folder that holds some at any depth.
    """
    from feddpms.report import page
    from feddpms.report.load import find

    target = out or folders[0] / "report.html"
    if target.suffix != ".html":
        raise ConfigError(f"--out: expected a name that ends in .html, got {target}; rename it")
    page.write(find(folders), target)
    typer.echo(_table(folders, markdown))
    typer.echo(f"\nPage: {target}")


app.command()(cli_experiment.experiment)
app.command()(cli_privacy.ledger)
app.command()(cli_privacy.calibrate)
app.add_typer(cli_privacy.audit, name="audit")


def main() -> None:
    """Run the command; a user's mistake is one line and exit 2."""
    try:
        status = app(standalone_mode=False)
    except FeddpmsError as error:
        _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        typer.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        _fail(f"{error.format_message()} See feddpms --help.")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    else:
        if status == STOPPED:
            typer.echo("feddpms: stopped", err=True)
        if status:
            sys.exit(status)


def _fail(line: str) -> None:
    """Print one line on standard error and exit with 2."""
    typer.echo("feddpms: " + " ".join(line.split()), err=True)
    sys.exit(2)


def _end(results: "list[Result]") -> None:
    """Say of a run that diverged why, and end with a status of its own."""
    for result in results:
        if result.diverged:
            remedy = "lower local.lr, or the method's own rate or weight"
            typer.echo(f"feddpms: diverged: {result.diverged}; {remedy}", err=True)
            raise typer.Exit(DIVERGED)


def _given(
    data: str | None,
    data_dir: Path | None,
    fraction: float | None,
    clients: int | None,
    partition: str | None,
    beta: float | None,
    cohort: float | None = None,
    rounds: int | None = None,
    local_epochs: int | None = None,
) -> dict[str, Any]:
    """The options as nested settings; None where an option was not given."""
    return {
        "rounds": rounds,
        "data": {
            "name": data,
            "dir": None if data_dir is None else str(data_dir),
            "fraction": fraction,
        },
        "partition": {"kind": partition, "clients": clients, "beta": beta},
        "engine": {"cohort": cohort},
        "local": {"epochs": local_epochs},
    }


def _values(
    file: Path | None, given: dict[str, Any], assignments: list[str] | None
) -> dict[str, Any]:
    """Settings from a file, then options, then --set."""
    from feddpms import config

    values = config.load(file) if file else {}
    values = config.override(config.merge(values, _without_none(given)), assignments or [])
    for table, name in (("data", "dir"), ("partition", "path")):
        found = values.get(table)
        if isinstance(found, dict) and isinstance(found.get(name), str) and found[name]:
            values[table] = {**found, name: absolute(found[name])}
    return values


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    """The values that were given."""
    nested = {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {k: v for k, v in nested.items() if v is not None and v != {}}


def _by_method(names: list[str], assignments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Assignments for all methods, and those of each method by its name."""
    from feddpms import config
    from feddpms.algorithms import METHODS

    # `local` is a method and a table of settings; the method has no setting of its own.
    tables = set(config.dump(config.Run())) - {"method", "seed"}
    shared, own = [], {name: [] for name in names}
    for assignment in assignments:
        head = assignment.partition("=")[0].strip().partition(".")[0]
        if head in tables:
            shared.append(assignment)
        elif head in own:
            own[head].append(assignment.partition(".")[2])
        elif head in METHODS or head in ("method", "seed"):
            raise ConfigError(
                f"--set {assignment}: expected a method of --methods {','.join(names)}, or a "
                f'setting that all share, got "{head}"; use --methods, --seeds, or the method\'s '
                "name as it stands there"
            )
        else:
            shared.append(assignment)
    return shared, own


def _table(folders: list[Path], markdown: bool = False) -> str:
    """The table of the runs in these folders."""
    from feddpms.report.compare import compare as group
    from feddpms.report.compare import markdown_table, text_table
    from feddpms.report.load import find

    return (markdown_table if markdown else text_table)(group(find(folders)))
