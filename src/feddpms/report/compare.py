"""Tables: methods side by side, over seeds.

Accuracy is always that of the last round (or the mean of the last five), never of the best one: a
best round is chosen with the test set. Spread is the sample standard deviation over seeds. Runs
that differ in data, partition, clients or rounds stand in separate groups; runs of a method that
differ in any other setting than the seed stand in separate rows. A run that is unfinished or
diverged is named, and is in no mean.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from feddpms.errors import RunFolderError
from feddpms.records import RoundRecord, RunRecord
from feddpms.report.load import RunFolder

REFERENCE = "fedavg"
WIDTH = 100
"""Columns of a terminal that the text table fits in."""

FREE = ("seed", "data.dir")
"""Settings that may differ between the runs of one row: the seed, and where the data lie."""


@dataclass(frozen=True)
class Spread:
    """A mean over seeds.

    Attributes:
        mean: over the runs.
        sd: sample standard deviation; None for one run.
        n: number of runs.
    """

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Difference(Spread):
    """A method's final accuracy less that of the reference, by seed.

    Attributes:
        low: lower end of the 95 % t interval of the mean; None for one seed.
        high: its upper end.
    """

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Row:
    """One method over its seeds. Without a finished run, every mean is None.

    Attributes:
        label: the method, with the settings that tell it from the same method's other rows.
        method: its name.
        runs: the finished runs, by seed; only these are in the means.
        left_out: unfinished and diverged runs; `status` says which.
        accuracy: test accuracy of the last round, in [0, 1].
        last_five: mean test accuracy of a run's last five rounds.
        loss: test loss of the last round, in nats.
        difference: to the reference, over common seeds; None for the reference itself.
        bytes_up: sent by all clients, mean of a round.
        bytes_down: sent to all clients, mean of a round.
        bytes_total: both directions, all rounds.
        bytes_client: what a client keeps after any round, at the most; no synthetic examples.
        bytes_server: what the server keeps after any round, at the most.
        seconds: all rounds.
        steps: local steps of all clients, all rounds; None where clients do not tell them.
    """

    label: str
    method: str
    runs: tuple[RunFolder, ...]
    left_out: tuple[RunFolder, ...]
    accuracy: Spread | None = None
    last_five: Spread | None = None
    loss: Spread | None = None
    difference: Difference | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    bytes_total: float | None = None
    bytes_client: float | None = None
    bytes_server: float | None = None
    seconds: float | None = None
    steps: float | None = None

    @property
    def folders(self) -> tuple[RunFolder, ...]:
        """All runs: the finished ones, then the others."""
        return self.runs + self.left_out


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: same data, partition, clients and rounds.

    Attributes:
        caption: what they have in common, in words.
        rows: the reference first, then in the order of the runs.
        reference: label of the row that differences are taken to.
    """

    caption: str
    rows: tuple[Row, ...]
    reference: str

    @property
    def folders(self) -> tuple[RunFolder, ...]:
        """All runs of the group."""
        return tuple(folder for row in self.rows for folder in row.folders)


def compare(folders: Iterable[RunFolder]) -> list[Group]:
    """The runs as groups of rows.

    Raises:
        RunFolderError: there is no run, or two finished runs of a row have the same seed.
    """
    together: dict[tuple[Any, ...], list[RunFolder]] = {}
    for folder in folders:
        r = folder.run
        key = (r.data, r.partition, r.clients, r.rounds)
        key = (*key, r.train_examples, r.test_examples, r.classes)
        together.setdefault(key, []).append(folder)
    if not together:
        raise RunFolderError("expected runs to compare, got none; name at least one run folder")
    captions = [_caption(runs[0].run) for runs in together.values()]
    if len(set(captions)) < len(captions):
        captions = [_caption(runs[0].run, long=True) for runs in together.values()]
    return [_group(c, runs) for c, runs in zip(captions, together.values(), strict=True)]


def _caption(run: RunRecord, long: bool = False) -> str:
    """What the runs of a group have in common; the long form tells more groups apart."""
    text = f"{run.data}, {run.partition}, {run.clients} clients, {run.rounds} rounds"
    sizes = f"{run.train_examples:,} training and {run.test_examples:,} test examples"
    return f"{text} ({sizes}, {len(run.classes)} classes)" if long else text


def _group(caption: str, folders: list[RunFolder]) -> Group:
    """The rows of runs that may be compared."""
    rows = [_row(label, runs) for label, runs in _variants(folders)]
    rows.sort(key=lambda row: row.method != REFERENCE)
    reference = rows[0]
    others = (replace(row, difference=_difference(row, reference)) for row in rows[1:])
    return Group(caption, (reference, *others), reference.label)


def _variants(folders: list[RunFolder]) -> list[tuple[str, list[RunFolder]]]:
    """The runs of each row, with its label: a method, and its settings where they differ."""
    variants: dict[str, dict[str, list[RunFolder]]] = {}
    for folder in folders:
        own = {k: v for k, v in flat(folder.settings).items() if k not in FREE}
        key = json.dumps(own, sort_keys=True, default=str)
        variants.setdefault(folder.run.method, {}).setdefault(key, []).append(folder)
    rows: list[tuple[str, list[RunFolder]]] = []
    for method, ways in variants.items():
        settings = [json.loads(key) for key in ways]
        for tells, runs in zip(_tell(settings), ways.values(), strict=True):
            rows.append((f"{method} ({tells})" if tells else method, runs))
    return rows


def _tell(settings: list[dict[str, Any]]) -> list[str]:
    """What tells each of several settings from the others, but for values that most of them have.

    A setting is called by its last name, unless two of them share that.
    """
    names = sorted({k for s in settings for k in s if any(s[k] != o.get(k) for o in settings)})
    last = [name.rpartition(".")[2] for name in names]
    tells: list[list[str]] = [[] for _ in settings]
    for name, short in zip(names, last, strict=True):
        called = short if last.count(short) == 1 else name
        values = [f"{called}={own.get(name, 'unset')}" for own in settings]
        for told, value in zip(tells, values, strict=True):
            if 2 * values.count(value) <= len(values):
                told.append(value)
    return [", ".join(told) for told in tells]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, in their order."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out


def _row(label: str, folders: list[RunFolder]) -> Row:
    """One row without its difference."""
    folders = sorted(folders, key=lambda folder: folder.run.seed)
    runs = tuple(folder for folder in folders if folder.finished)
    row = Row(label, folders[0].run.method, runs, tuple(f for f in folders if not f.finished))
    for one, two in itertools.pairwise(runs):
        if one.run.seed == two.run.seed:
            raise RunFolderError(
                f"expected one run a seed, got two of {label} with seed {one.run.seed}: "
                f"{one.path} and {two.path}; leave one out"
            )
    if not runs:
        return row
    steps = [run_steps(run) for run in runs]
    return replace(
        row,
        accuracy=spread(run.rounds[-1].test_accuracy for run in runs),
        last_five=spread(statistics.fmean(r.test_accuracy for r in run.last) for run in runs),
        loss=spread(run.rounds[-1].test_loss for run in runs),
        bytes_up=_mean(runs, lambda r: r.bytes_up) / runs[0].run.rounds,
        bytes_down=_mean(runs, lambda r: r.bytes_down) / runs[0].run.rounds,
        bytes_total=_mean(runs, lambda r: r.bytes_up + r.bytes_down),
        bytes_client=max(r.bytes_client for run in runs for r in run.rounds),
        bytes_server=max(r.bytes_server for run in runs for r in run.rounds),
        seconds=_mean(runs, lambda r: r.seconds),
        steps=statistics.fmean(s for s in steps if s is not None) if None not in steps else None,
    )


def run_steps(folder: RunFolder) -> float | None:
    """Local steps of a run, all clients and rounds together; None where no client told them."""
    return sum(r.numbers.get("steps", 0) for r in folder.rounds) or None


def _mean(runs: Sequence[RunFolder], value: Callable[[RoundRecord], float]) -> float:
    """Mean over runs of a value summed over rounds."""
    return statistics.fmean(sum(value(r) for r in run.rounds) for run in runs)


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample standard deviation."""
    values = list(values)
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), sd, len(values))


def _difference(row: Row, reference: Row) -> Difference | None:
    """Paired difference over seeds for which both methods saw the same partition."""
    base = {(f.run.seed, f.partition): f.rounds[-1].test_accuracy for f in reference.runs}
    gains = [
        f.rounds[-1].test_accuracy - base[f.run.seed, f.partition]
        for f in row.runs
        if (f.run.seed, f.partition) in base
    ]
    return paired(gains) if gains else None


def paired(gains: Sequence[float]) -> Difference:
    """Mean difference, with a 95 % t interval where there are several."""
    s = spread(gains)
    if s.sd is None:
        return Difference(s.mean, None, s.n, None, None)
    from scipy.stats import t  # a second to import, and only several seeds need it

    half = float(t.ppf(0.975, s.n - 1)) * s.sd / math.sqrt(s.n)
    return Difference(s.mean, s.sd, s.n, s.mean - half, s.mean + half)


PARTS = ("train", "synthesis", "evaluate", "exchange")
"""of a round's time; what no other part accounts for is `exchange`"""

# How numbers are written: the same in the terminal, in Markdown and on the page.


def percent(s: Spread | None) -> str:
    """`61.2 ± 0.8`, from shares in [0, 1]; `61.2 ± -` for one run and `-` for none."""
    return _plus_minus(s, 100, 1)


def nats(s: Spread | None) -> str:
    """`1.234 ± 0.012`."""
    return _plus_minus(s, 1, 3)


def _plus_minus(s: Spread | None, factor: float, digits: int) -> str:
    """Mean and spread."""
    if s is None:
        return "-"
    sd = "-" if s.sd is None else f"{factor * s.sd:.{digits}f}"
    return f"{factor * s.mean:.{digits}f} ± {sd}"


def points(d: Difference | None) -> str:
    """`+1.2 ± 0.8`, in percentage points."""
    if d is None:
        return "-"
    sd = "-" if d.sd is None else f"{100 * d.sd:.1f}"
    return f"{100 * d.mean:+.1f} ± {sd}"


def interval(d: Difference | None) -> str:
    """`-0.8 to +3.2`, in percentage points; `-` where one seed leaves it unknown."""
    if d is None or d.low is None or d.high is None:
        return "-"
    return f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"


def size(n: float | None) -> str:
    """Bytes in decimal units: `1.2 MB`."""
    if n is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} TB"


def duration(seconds: float | None) -> str:
    """`12 s`, `3.4 min` or `2.1 h`; `-` where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def count(n: float | None) -> str:
    """A whole number with thousands marked."""
    return "-" if n is None else f"{n:,.0f}"


def clean(text: str) -> str:
    """Text from a file without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


# Tables.

Cells = list[list[str]]


def quality_cells(group: Group) -> Cells:
    """Heading and rows of the table of results."""
    head = ["method", "seeds", "final acc. %", "last five %", "final loss"]
    table = [[*head, f"vs {group.reference}", "95 % interval"]]
    for row in group.rows:
        status = percent(row.accuracy) if row.runs else row.left_out[0].short_status
        seeds = f"{len(row.runs)} of {len(row.folders)}" if row.left_out else str(len(row.runs))
        first = [row.label, seeds, status]
        difference = [points(row.difference), interval(row.difference)]
        if row.label == group.reference and row.runs:
            difference = ["reference", ""]
        table.append([*first, percent(row.last_five), nats(row.loss), *difference])
    return table


def cost_cells(group: Group) -> Cells:
    """Heading and rows of the table of costs, all means over seeds."""
    sent = ["up / round", "down / round", "bytes, all"]
    table = [["method", *sent, "client has", "server has", "time, all", "local steps"]]
    for row in group.rows:
        moved = [size(n) for n in (row.bytes_up, row.bytes_down, row.bytes_total)]
        kept = [size(n) for n in (row.bytes_client, row.bytes_server)]
        table.append([row.label, *moved, *kept, duration(row.seconds), count(row.steps)])
    return table


def left_out_lines(group: Group) -> list[str]:
    """One line for each run that is in no mean."""
    return [
        f"{row.label}, seed {folder.run.seed}: {folder.status}"
        for row in group.rows
        for folder in row.left_out
    ]


def text_table(groups: Iterable[Group]) -> str:
    """The comparison for a terminal, within 100 columns."""
    out: list[str] = []
    for group in groups:
        out += [*_wrap(group.caption), ""]
        out += [*_text(quality_cells(group)), "", *_text(cost_cells(group)), ""]
        if lines := left_out_lines(group):
            out += ["Left out of the means:", *(w for line in lines for w in _wrap(line, "  ")), ""]
        out += [*_wrap(NOTE), ""]
    return "\n".join(out)


NOTE = (
    "Accuracy is that of the last round, never the best; mean ± sample standard deviation over "
    "seeds. Differences are paired by seed, in percentage points."
)


def _wrap(text: str, indent: str = "") -> list[str]:
    """Lines of at most 100 columns."""
    import textwrap

    return textwrap.wrap(clean(text), WIDTH, initial_indent=indent, subsequent_indent=indent)


def _text(cells: Cells) -> list[str]:
    """Aligned columns; a name that is too long for its column has a line of its own."""
    cells = [[clean(c) for c in row] for row in cells]
    widths = [max(len(row[i]) for row in cells) for i in range(1, len(cells[0]))]
    room = WIDTH - sum(widths) - 2 * len(widths)
    if room < 12:  # the heading names the reference, which may be a long name
        cells[0] = [c if len(c) <= 12 else c[:11] + "…" for c in cells[0]]
        widths = [max(len(row[i]) for row in cells) for i in range(1, len(cells[0]))]
        room = WIDTH - sum(widths) - 2 * len(widths)
    first = min(max(len(row[0]) for row in cells), room)
    lines: list[str] = []
    for name, *values in cells:
        if len(name) > first:
            lines += [name if len(name) <= WIDTH else name[: WIDTH - 1] + "…"]
            name = ""
        right = [v.rjust(w) for v, w in zip(values, widths, strict=True)]
        lines.append("  ".join([name.ljust(first), *right]).rstrip())
    return [lines[0], "-" * max(map(len, lines[:1])), *lines[1:]]


def markdown_table(groups: Iterable[Group]) -> str:
    """The comparison as Markdown, for documents."""
    out: list[str] = []
    for group in groups:
        out += [f"**{_mark(group.caption)}**", ""]
        out += [*markdown_rows(quality_cells(group)), "", *markdown_rows(cost_cells(group)), ""]
        if lines := left_out_lines(group):
            out += ["Left out of the means:", "", *(f"- {_mark(line)}" for line in lines), ""]
        out += [NOTE, ""]
    return "\n".join(out)


def markdown_rows(cells: Cells) -> list[str]:
    """One table, numbers to the right."""
    lines = ["| " + " | ".join(map(_mark, row)) + " |" for row in cells]
    rule = "|---|" + "---:|" * (len(cells[0]) - 1)
    return [lines[0], rule, *lines[1:]]


def _mark(text: str) -> str:
    """Text that Markdown shows as it is."""
    for c in "\\|*_`[]<>":
        text = text.replace(c, "\\" + c)
    return clean(text)
