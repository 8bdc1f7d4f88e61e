"""How accurate a model is on the classes that clients lack, and what a filter kept.

Who lacks what is read from the coarse partition that a run folder tells of, so no count is shown.
"""

from collections.abc import Sequence

import numpy as np

from feddpms.report import compare
from feddpms.report.compare import Row
from feddpms.report.load import RunFolder

HEAD = ["method", "classes they lack, %", "classes they have, %", "synthetic images kept, %"]
SCARCE = 0.5
"""a client lacks a class of which it has less than this part of its mean over the classes"""


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each method with a global model whose partition is known, as `HEAD` has it.

    Accuracy is that of the final model by class, in the mean over all pairs of a client and a class
    that it lacks, or has; then mean and sample deviation over seeds.
    """
    return [_line(row) for row in rows if row.method != "local" and _known(row)]


def _known(row: Row) -> list[RunFolder]:
    """The finished runs that tell who holds what."""
    return [run for run in row.runs if run.partition]


def _line(row: Row) -> list[str]:
    """The cells of a method."""
    pairs = [accuracies(run) for run in _known(row)]
    return [row.label, *(_percent(values) for values in zip(*pairs, strict=True)), _kept(row)]


def accuracies(run: RunFolder) -> tuple[float, float]:
    """Mean accuracy over pairs of a client and a class that it lacks, and over the other pairs.

    NaN where there is no such pair, or no test example of its class.
    """
    assert run.partition is not None
    levels = np.array(run.partition.levels, float)
    lacks = levels < SCARCE * levels.mean(1, keepdims=True)
    by_class = np.broadcast_to(run.rounds[-1].per_class_accuracy, levels.shape)
    tested = np.isfinite(by_class)
    return _mean(by_class[lacks & tested]), _mean(by_class[~lacks & tested])


def _mean(values: np.ndarray) -> float:
    """The mean; NaN of nothing."""
    return float(values.mean()) if len(values) else float("nan")


def _percent(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, of those that have a value."""
    known = [value for value in values if np.isfinite(value)]
    return compare.percent(compare.spread(known)) if known else "-"


def _kept(row: Row) -> str:
    """What part of the images that were decoded passed the filter, over all runs."""
    numbers = [r.numbers for run in row.runs for r in run.rounds]
    tried, kept = (sum(n.get(f"synthetic_{k}", 0) for n in numbers) for k in ("tried", "kept"))
    return f"{100 * kept / tried:.1f}" if tried else "-"
