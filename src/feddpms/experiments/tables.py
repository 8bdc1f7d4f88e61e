"""Tables of finished cells, in Markdown and for a page, and their place in a document."""

import re
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from feddpms import records
from feddpms.errors import RunFolderError
from feddpms.experiments.lines import Line
from feddpms.experiments.paper import GAINS, SOURCE
from feddpms.report.compare import (
    REFERENCE,
    interval,
    markdown_rows,
    paired,
    percent,
    points,
    spread,
)
from feddpms.report.page import Table

CAPTION = (
    "Accuracy of the last round, never of the best one; mean ± sample standard deviation over "
    "seeds. Differences are paired by seed, in percentage points, with Student's interval. The "
    f"paper's column: {SOURCE}."
)
Key = tuple[str, float, float, int, int, int, float]


def table(name: str, lines: Sequence[Line]) -> str:
    """The tables in Markdown; arguments as for `tables`."""
    return "\n".join(
        "\n".join([f"**{one.title}**", "", *markdown_rows([one.head, *one.rows]), ""])
        for one in tables(name, lines)
    )


def tables(name: str, lines: Sequence[Line]) -> list[Table]:
    """One table for each data set, beta, number of clients and size of a run.

    Args:
        name: the experiment's; the paper's numbers of that name stand beside ours.
        lines: its finished cells.
    """
    groups: dict[Key, list[Line]] = {}
    for one in lines:
        size = (one.clients, one.rounds, one.local_epochs, one.validation)
        key = (one.data, one.beta, one.fraction, *size)
        groups.setdefault(key, []).append(one)
    return [_group(name, key, groups[key]) for key in sorted(groups)]


def _group(name: str, key: Key, lines: Sequence[Line]) -> Table:
    """The rows of what may be compared."""
    data, beta, fraction, clients, rounds, epochs, validation = key
    scored = f", {100 * validation:g} % of it held out and scored" if validation else ""
    title = (
        f"{data}, {100 * fraction:g} % of the training data{scored}, beta {beta:g}, "
        f"{clients} clients, {rounds} rounds of {epochs} epochs"
    )
    rows: dict[str, list[Line]] = {}
    for one in lines:
        label = f"{one.method}, {one.ablation}" if one.ablation else one.method
        rows.setdefault(label, []).append(one)
    base = _finals(rows.get(REFERENCE, []))
    head = ["method", "seeds", "final acc. %", "last five %", f"vs {REFERENCE}", "95 % interval"]
    cells: list[list[str]] = []
    for label in sorted(rows, key=lambda label: (label != REFERENCE, _in_order(label))):
        published = GAINS.get(name, {}).get((data, clients)) if label == "feddpms" else None
        theirs = "-" if published is None else f"+{published:g}"
        cells.append([*_row(label, rows[label], base), theirs])
    return Table(title, [*head, "relative, %", "paper, relative, %"], cells, CAPTION)


def _in_order(label: str) -> list[tuple[str, float]]:
    """What labels are sorted by: words by their letters, numbers by their size."""
    parts = re.split(r"(\d+(?:\.\d+)?)", label)
    return [(w, float(n or 0)) for w, n in zip_longest(parts[::2], parts[1::2], fillvalue="")]


def _row(label: str, lines: Sequence[Line], base: dict[int, float]) -> list[str]:
    """A method over its seeds, and its paired difference to the reference."""
    finals = _finals(lines)
    seeds = str(len(finals)) if len(finals) == len(lines) else f"{len(finals)} of {len(lines)}"
    if not finals:
        return [label, seeds, "diverged", "-", "-", "-", "-"]
    last_five = [one.last5_accuracy for one in lines if one.last5_accuracy is not None]
    row = [label, seeds, percent(spread(finals.values())), percent(spread(last_five))]
    if label == REFERENCE:
        return [*row, "reference", "", ""]
    common = sorted(finals.keys() & base.keys())
    if not common:
        return [*row, "-", "-", "-"]
    d = paired([finals[seed] - base[seed] for seed in common])
    relative = 100 * d.mean / statistics.fmean(base[seed] for seed in common)
    return [*row, points(d), interval(d), f"{relative:+.1f}"]


def _finals(lines: Sequence[Line]) -> dict[int, float]:
    """Final accuracy by seed, of the runs that did not diverge."""
    return {one.seed: one.final_accuracy for one in lines if one.final_accuracy is not None}


def insert(document: Path, name: str, text: str) -> None:
    """Put a table between the marks `<!-- NAME -->` and `<!-- end NAME -->` of a document.

    Raises:
        RunFolderError: no such document, or a mark is missing.
    """
    first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
    old = document.read_text() if document.is_file() else ""
    before, begin, rest = old.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise RunFolderError(
            f"expected the lines {first} and {last} in {document}, got none; write them where the "
            "table belongs"
        )
    whole = f"{before}{first}\n{text}{last}{after}"
    records.write_file(document, whole.encode())
