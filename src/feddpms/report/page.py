"""One self-contained page from run folders: no script, no font and no picture from outside.

`page.html` is the template; everything that comes from a file is escaped by it. The same folders
give the same page.
"""

import base64
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from feddpms import records
from feddpms.errors import RunFolderError
from feddpms.report import compare, epsilon, lacking, plots
from feddpms.report.compare import Group, Row
from feddpms.report.load import RunFolder
from feddpms.report.plots import Curve

KEYS = ("channel", "mechanism", "neighbours", "simulated")
"""What tells the lines of a ledger summary apart."""


@dataclass(frozen=True)
class Figure:
    """A picture of the page.

    Attributes:
        title: its heading.
        picture: an `svg` or `img` element.
        caption: what it shows, in words.
    """

    title: str
    picture: Markup
    caption: str


@dataclass(frozen=True)
class Table:
    """A table that stands before what the runs tell.

    Attributes:
        title: its heading.
        head: names of the columns.
        rows: cells, as many as there are columns in each.
        caption: how to read it, in words.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    caption: str


def page(
    folders: Iterable[RunFolder], title: str | None = None, tables: Sequence[Table] = ()
) -> str:
    """The page's HTML.

    Args:
        folders: the runs, of one method or many.
        title: heading of the page; as a default, what was run.
        tables: of more than these runs; they come first.

    Raises:
        RunFolderError: there is no run, or two finished runs of a row have the same seed.
    """
    folders = list(folders)
    groups = compare.compare(folders)
    place = FileSystemLoader(Path(__file__).parent)
    world = Environment(
        loader=place,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    world.filters |= {"size": compare.size, "duration": compare.duration, "count": compare.count}
    values = [_group(group, f"g{i}") for i, group in enumerate(groups, 1)]
    versions = ", ".join(sorted({folder.run.version for folder in folders}))
    template = world.get_template("page.html")
    title = _title(groups) if title is None else title
    return template.render(
        title=title, tables=tables, groups=values, versions=versions, runs=len(folders)
    )


def write(
    folders: Iterable[RunFolder],
    path: str | os.PathLike[str],
    title: str | None = None,
    tables: Sequence[Table] = (),
) -> None:
    """Write the page to a file, whole or not at all.

    Args:
        folders: the runs.
        path: the file; one that is there is replaced.
        title: as for `page`.
        tables: as for `page`.

    Raises:
        RunFolderError: as `page`, or the file cannot be written.
    """
    text = page(folders, title, tables)
    if Path(path).is_dir():
        raise RunFolderError(f"cannot write a report at {path}: it is a folder; name a file")
    try:
        records.write_file(Path(path), text.encode())
    except OSError as error:
        raise RunFolderError(f"cannot write a report at {path}: {error}") from None


def _title(groups: Sequence[Group]) -> str:
    """What was run, in a few words."""
    data = sorted({folder.run.data for group in groups for folder in group.folders})
    labels = dict.fromkeys(row.label for group in groups for row in group.rows)
    what = next(iter(labels)) if len(labels) == 1 else f"{len(labels)} methods"
    return compare.clean(f"{what} on {' and '.join(data)}")


def _group(group: Group, name: str) -> dict[str, Any]:
    """What the template shows of one group."""
    results, *rows = compare.quality_cells(group)
    costs, *cost_rows = compare.cost_cells(group)
    return {
        "id": name,
        "caption": compare.clean(group.caption),
        "sentence": _sentence(group),
        "notes": _notes(group),
        "results": (results, rows),
        "left_out": compare.left_out_lines(group),
        "figures": _figures(group, name),
        "per_class": _per_class_table(group),
        "lacking": (lacking.HEAD, lacking.table(group.rows)),
        "sheets": [s for i, row in enumerate(group.rows) for s in _sheets(row, f"{name}-{i}")],
        "privacy": [_privacy(row) for row in group.rows],
        "costs": (costs, cost_rows),
        "bytes": _bytes(group, f"{name}-bytes"),
        "phases": [line for row in group.rows for line in _phases(row)],
        "times": [line for row in group.rows for line in _times(row)],
        "settings": _settings(group),
    }


def _sentence(group: Group) -> str:
    """What was run."""
    run = group.folders[0].run
    seeds = sorted({folder.run.seed for folder in group.folders})
    methods = [row.label for row in group.rows]
    return compare.clean(
        f"{_many(len(methods), 'method')} ({', '.join(methods)}), "
        f"{_many(len(seeds), 'seed')} ({', '.join(map(str, seeds))}): {run.data} with "
        f"{_many(len(run.classes), 'class', 'classes')}, {run.train_examples:,} training examples "
        f"split over {_many(run.clients, 'client')} ({run.partition}), {run.rounds} rounds, "
        f"tested on {run.test_examples:,} examples."
    )


def _many(n: int, one: str, more: str = "") -> str:
    """`1 seed`, `2 seeds`."""
    return f"{n} {one if n == 1 else more or one + 's'}"


def _notes(group: Group) -> list[str]:
    """How to read the table."""
    n = max(len(row.runs) for row in group.rows)
    notes = [
        "Accuracy and loss are those of the last round on the test set, never of the best round; "
        "“last five” is the mean over the last five rounds of each run."
    ]
    if n > 1:
        notes.append("Numbers are mean ± sample standard deviation over seeds.")
    elif n == 1:
        notes.append("One seed: the spread over seeds is unknown, so no ranking follows.")
    if n and len(group.rows) > 1:
        paired = f"Differences to {group.reference} are in percentage points, paired by seed on "
        interval = "; the interval is a 95 % Student t interval of their mean" if n > 1 else ""
        notes.append(f"{paired}the same partition{interval}.")
    names = {row.method.split("+")[0] for row in group.rows}
    if "local" in names:
        notes.append("local has no global model: its numbers are means over the clients' models.")
    if "central" in names:
        notes.append("central trains on all clients' data in one place, which the others never do.")
    return [compare.clean(note) for note in notes]


def _figures(group: Group, name: str) -> list[Figure]:
    """Curves, accuracy by class, and the partition."""
    figures: list[Figure] = []
    if curves := [curve for i, row in enumerate(group.rows) for curve in _curves(row, i, False)]:
        seeds = any(len(row.runs) > 1 for row in group.rows)
        band = "Line: mean over seeds; band: lowest to highest seed. " if seeds else ""
        if any(c.faint for c in curves):
            band += "Thin dashed lines: unfinished or diverged runs of methods with no other run. "
        caption = f"{band}A dotted line marks a change of phase."
        if not any(len(set(c.phases)) > 1 for c in curves):
            caption = band.strip()
        picture = Markup(plots.accuracy_svg(curves, f"{name}-accuracy"))
        figures.append(Figure("Accuracy over rounds", picture, caption))
        losses = [curve for i, row in enumerate(group.rows) for curve in _curves(row, i, True)]
        picture = Markup(plots.loss_svg(losses, f"{name}-loss"))
        figures.append(Figure("Loss over rounds", picture, f"Mean cross entropy. {caption}"))
    if counted := [row for row in group.rows if row.runs]:
        values = np.stack([_per_class(row) for row in counted])
        labels = [row.label for row in counted]
        classes = group.folders[0].run.classes
        picture = Markup(plots.per_class_svg(labels, values, classes, f"{name}-per-class"))
        caption = "In percent, last round, mean over seeds. “-”: no test example of that class."
        figures.append(Figure("Accuracy by class", picture, caption))
    return figures + _epsilon(group, f"{name}-epsilon") + _partition(group, f"{name}-partition")


def _epsilon(group: Group, name: str) -> list[Figure]:
    """Accuracy against epsilon, where runs of a method differ in nothing else."""
    lines = epsilon.lines(group)
    if not lines:
        return []
    deltas = ", ".join(dict.fromkeys(f"{line.delta:g}" for line in lines if line.delta))
    neighbours = sorted({str(f.settings["privacy"]["adjacency"]) for f in group.folders})
    caption = (
        f"Last round, mean over seeds; bars: lowest to highest seed. Epsilon at delta {deltas} is "
        "the target of each client's noisy channels together, for each of its records (neighbours: "
        f"{', '.join(neighbours)}). What is in the clear is not covered; where that is anything, "
        "such as model updates without private training, there is no finite epsilon for the run. "
        "What each run covers is below, under Privacy."
    )
    if any(line.name.endswith("the paper's release") for line in lines):
        caption += " The paper's release has no epsilon that covers it."
    picture = Markup(plots.epsilon_svg(lines, name))
    return [Figure("Accuracy against epsilon", picture, compare.clean(caption))]


def _partition(group: Group, name: str) -> list[Figure]:
    """The split of the first seed that is known."""
    known = [folder for folder in group.folders if folder.partition]
    if not known:
        return []
    first = min(known, key=lambda folder: folder.run.seed)
    assert first.partition is not None
    caption = f"Examples of each class at each client ({first.run.partition}), seed "
    caption += (
        f"{first.run.seed}, in per cent of the largest number, to the nearest quarter. Known "
    )
    caption += "only because this is a simulation; `feddpms partition` prints the numbers."
    if len({folder.partition for folder in known}) > 1:
        caption += " Other seeds have partitions of their own."
    picture = plots.partition_svg(first.partition.levels, first.run.classes, name)
    return [Figure("Who holds what", Markup(picture), compare.clean(caption))]


def _curves(row: Row, colour: int, loss: bool) -> list[Curve]:
    """The line of a method; of a method without a finished run, one line for each run."""

    def values(folders: Sequence[RunFolder]) -> np.ndarray:
        return np.array(
            [[r.test_loss if loss else r.test_accuracy for r in f.rounds] for f in folders]
        )

    if row.runs:
        phases = tuple(r.phase for r in row.runs[0].rounds)
        return [Curve(row.label, values(row.runs), phases, colour)]
    return [
        Curve(
            f"{row.label}, seed {folder.run.seed}",
            values([folder]),
            tuple(r.phase for r in folder.rounds),
            colour,
            faint=True,
        )
        for folder in row.left_out
        if folder.rounds
    ]


def _per_class(row: Row) -> np.ndarray:
    """Final accuracy by class, mean over seeds [classes]."""
    return np.array([run.rounds[-1].per_class_accuracy for run in row.runs]).mean(0)


def _per_class_table(group: Group) -> tuple[list[str], list[list[str]]]:
    """The numbers behind the picture of accuracy by class."""
    counted = [row for row in group.rows if row.runs]
    values = [_per_class(row) for row in counted]
    head = ["class", *(row.label for row in counted)]
    lines = [
        [name, *("-" if np.isnan(v[k]) else f"{100 * v[k]:.1f}" for v in values)]
        for k, name in enumerate(group.folders[0].run.classes)
    ]
    return head, lines if counted else []


def _sheets(row: Row, name: str) -> list[Figure]:
    """Real and synthetic images of a row's first run that has any."""
    for folder in row.folders:
        if "synthetic" in folder.images and (folder.images["synthetic_count"] > 0).any():
            png = base64.b64encode(plots.sheet(folder.images, folder.run.classes)).decode()
            alt = "Rows of images, one row a class: real ones left, synthetic ones right"
            picture = Markup('<img id="{}" alt="{}" src="data:image/png;base64,{}">')
            decoded = row.method.split("+")[0] == "feddpms"
            source = "decoded from noisy class means" if decoded else "what clients were given"
            caption = "Real images are from the public test set; synthetic ones are "
            caption += f"{source}. Seed {folder.run.seed}."
            if "reconstructed" in folder.images:
                caption += " Reconstructed: what the final decoder makes of the real ones' codes."
            if len(folder.run.classes) > plots.SHEET_CLASSES:
                caption += " Only the first classes that have synthetic images are shown."
            return [Figure(row.label, picture.format(name, alt, png), caption)]
    return []


def _privacy(row: Row) -> dict[str, Any]:
    """Claim and ledger of a method, runs with the same text or the same events together."""
    claims: dict[str | None, list[str]] = {}
    ledgers: dict[str, list[str]] = {}
    for folder in row.folders:
        seed = str(folder.run.seed)
        claims.setdefault(folder.claim, []).append(seed)
        ledgers.setdefault(json.dumps(_ledger(folder)), []).append(seed)
    return {
        "label": row.label,
        "claims": [(text, ", ".join(seeds)) for text, seeds in claims.items()],
        "ledgers": [(json.loads(lines), ", ".join(seeds)) for lines, seeds in ledgers.items()],
        "several": len(row.folders) > 1,
    }


def _ledger(folder: RunFolder) -> list[list[str]]:
    """The ledger by channel, with the range of what differs between its events."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for event in folder.ledger:
        key = json.dumps([event.get(k) for k in KEYS], default=str)
        lines.setdefault(key, []).append(event)
    table: list[list[str]] = []
    for events in lines.values():
        channel, mechanism, neighbours, simulated = (events[0].get(k) for k in KEYS)
        clear = mechanism == "none"
        table.append(
            [
                str(channel),
                "none: in the clear" if clear else str(mechanism),
                str(len({str(event.get("client")) for event in events})),
                *(_range(events, k) for k in ("noise_multiplier", "l2_sensitivity")),
                "-" if clear else _draws(events),
                "-" if clear else _range(events, "sample_rate"),
                "-" if neighbours is None else str(neighbours),
                "-" if clear or simulated is None else "yes" if simulated else "no",
            ]
        )
    return table


def _draws(events: Sequence[dict[str, Any]]) -> str:
    """How often a client drew noise, at the most."""
    draws: dict[str, int] = {}
    for event in events:
        client, times = str(event.get("client")), event.get("times", 1)
        draws[client] = draws.get(client, 0) + (times if isinstance(times, int) else 1)
    return str(max(draws.values()))


def _range(events: Sequence[dict[str, Any]], key: str) -> str:
    """The value of all events, or from the least to the greatest."""
    found = {str(event[key]): event[key] for event in events if event.get(key) is not None}
    numbers = [x for x in found.values() if isinstance(x, int | float)]
    if len(numbers) < len(found):
        return ", ".join(sorted(found))
    ends = [f"{x:.4g}" for x in (min(numbers), max(numbers))] if numbers else ["-"]
    return " to ".join(dict.fromkeys(ends))


def _bytes(group: Group, name: str) -> Markup | None:
    """The picture of bytes by method."""
    rows = [row for row in group.rows if row.runs]
    if not rows:
        return None
    n = rows[0].runs[0].run.rounds
    up = [n * (row.bytes_up or 0) for row in rows]
    down = [n * (row.bytes_down or 0) for row in rows]
    return Markup(plots.bytes_svg([row.label for row in rows], up, down, name))


def _phases(row: Row) -> list[list[str]]:
    """Where time and bytes went, by phase, mean over the runs."""
    lines: list[list[str]] = []
    for phase in dict.fromkeys(r.phase for run in row.runs for r in run.rounds):
        runs = [[r for r in run.rounds if r.phase == phase] for run in row.runs]
        mean = statistics.fmean
        lines.append(
            [
                row.label,
                phase,
                compare.count(mean(len(rounds) for rounds in runs)),
                compare.size(mean(sum(r.bytes_up for r in rounds) for rounds in runs)),
                compare.size(mean(sum(r.bytes_down for r in rounds) for rounds in runs)),
                compare.duration(mean(sum(r.seconds for r in rounds) for rounds in runs)),
            ]
        )
    return lines


def _times(row: Row) -> list[list[str]]:
    """What took the time, by phase, over the runs; of runs that did not say, nothing."""
    lines: list[list[str]] = []
    rounds = [r for run in row.runs for r in run.rounds if r.timing]
    for phase in dict.fromkeys(r.phase for r in rounds):
        timings = [r.timing for r in rounds if r.phase == phase]
        spent = {part: sum(t.get(part, 0.0) for t in timings) for part in compare.PARTS}
        images = sum(t.get("images_per_second", 0.0) * t.get("train", 0.0) for t in timings)
        speed = images / spent["train"] if spent["train"] else None
        whole = sum(spent.values()) or 1.0
        shares = [f"{seconds / whole:.0%}" for seconds in spent.values()]
        lines.append([row.label, phase, *shares, compare.count(speed)])
    return lines


def _settings(group: Group) -> dict[str, list[list[str]]]:
    """The settings that all runs share, and those that they do not."""
    runs = [
        (row.label, compare.flat(folder.settings)) for row in group.rows for folder in row.folders
    ]
    values: dict[str, dict[str, list[str]]] = {}
    for label, settings in runs:
        for key, value in settings.items():
            if key == "seed":
                continue  # the sentence on top names the seeds
            text = json.dumps(value, default=str, ensure_ascii=False)
            values.setdefault(key, {}).setdefault(text, []).append(label)
    shared: list[list[str]] = []
    own: list[list[str]] = []
    for key, texts in values.items():
        for text, labels in texts.items():
            if len(labels) == len(runs):
                shared.append([key, text])
            else:
                own.append([key, text, ", ".join(dict.fromkeys(labels))])
    return {"shared": shared, "own": own}
