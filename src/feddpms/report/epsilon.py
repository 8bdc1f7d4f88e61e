"""Accuracy against epsilon: the runs of a method that differ in nothing but their release."""

from collections.abc import Iterator
from dataclasses import dataclass

from feddpms.report.compare import Group, Row, flat

VARIED = ("privacy.target_epsilon", "privacy.count_noise_multiplier", "privacy.release")
"""settings in which the points of a line may differ"""
OTHERS = ("seed", "data.dir", "method.name")


@dataclass(frozen=True)
class Line:
    """One line of the picture.

    Attributes:
        name: the method, with its release if that is not the sound one.
        points: by target epsilon, final accuracy of each seed; one point, of epsilon None, is a
            level without an epsilon.
        delta: of the release; None for a level.
    """

    name: str
    points: dict[float | None, list[float]]
    delta: float | None = None


def lines(group: Group) -> list[Line]:
    """Lines of methods with two values of epsilon or more, and levels to compare them with.

    Levels are those of the reference and of the paper's release. Empty where no method has several
    values of epsilon, or where it differs in something else as well.
    """
    methods = dict.fromkeys(row.method for row in group.rows)
    found = [line for method in methods for line in _lines(group, method)]
    if not any(len(line.points) > 1 for line in found):
        return []
    levels = [Line(row.label, {None: _finals(row)}) for row in group.rows if _is_level(row, group)]
    return [*found, *levels]


def _is_level(row: Row, group: Group) -> bool:
    """Whether a row is the only one of the reference's method."""
    return bool(row.runs) and row.label == row.method == group.reference


def _lines(group: Group, method: str) -> Iterator[Line]:
    """The line of a method, and the level of the paper's release."""
    rows = [row for row in group.rows if row.method == method and row.runs]
    if len(rows) < 2 or len({_rest(row) for row in rows}) > 1:
        return
    sound = [row for row in rows if _setting(row, "privacy.release") != "paper"]
    points = {_setting(row, "privacy.target_epsilon"): _finals(row) for row in sound}
    if len(points) == len(sound) > 1:
        yield Line(method, dict(sorted(points.items())), _setting(sound[0], "privacy.target_delta"))
    for row in rows:
        if row not in sound:
            yield Line(f"{method}, the paper's release", {None: _finals(row)})


def _setting(row: Row, name: str):
    """A setting that all runs of a row share."""
    return flat(row.runs[0].settings).get(name)


def _rest(row: Row) -> str:
    """The settings that the points of a line share."""
    every = flat(row.runs[0].settings)
    return repr(sorted((k, v) for k, v in every.items() if k not in (*VARIED, *OTHERS)))


def _finals(row: Row) -> list[float]:
    """Final accuracy of each finished run."""
    return [run.rounds[-1].test_accuracy for run in row.runs]
