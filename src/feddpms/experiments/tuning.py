"""Settings chosen by one rule for all methods, by training examples that are held out.

The learning rate that is best for fedavg is every method's. With it, each of the others takes the
best of as many values of one setting, the one that weighs what the method adds. Best is the highest
mean accuracy of the last five rounds, over the seeds; of equal ones the first.
"""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from feddpms.config import Values, merge, override

if TYPE_CHECKING:
    from feddpms.experiments.lines import Line

HELD_OUT = 0.2
"""part of the training examples that settings are chosen by, and nobody trains on"""
FIRST = "fedavg"
"""whose setting is every method's"""
GRIDS = {
    FIRST: ("local.lr", (0.0003, 0.001, 0.003, 0.01)),
    "fedprox": ("method.mu", (0.001, 0.01, 0.1, 1.0)),
    "fedmix": ("method.lam", (0.01, 0.05, 0.1, 0.2)),
    "moon": ("method.mu", (0.1, 1.0, 5.0, 10.0)),
    "feddpms": ("method.calibration.steps", (25, 50, 100, 200)),
}
"""by method, which setting is chosen, and of which values"""
TUNED: dict[str, dict[str, float]] = {
    "fmnist": {"fedavg": 0.01, "fedprox": 0.01, "fedmix": 0.01, "moon": 5.0, "feddpms": 100},
    "cifar10": {"fedavg": 0.003, "fedprox": 1.0, "fedmix": 0.05, "moon": 1.0, "feddpms": 25},
    "cifar100": {"fedavg": 0.003, "fedprox": 0.001, "fedmix": 0.01, "moon": 5.0},
}
"""by data set and method, the value that was chosen; what is absent keeps its default"""


def tuned(data: str, method: str) -> Values:
    """The chosen settings of a method, as changes of a run's values."""
    chosen = TUNED.get(data, {})
    names = [name for name in dict.fromkeys((FIRST, method)) if name in chosen]
    changes: Values = {}
    for name in names:
        changes = merge(changes, setting(name, chosen[name]))
    return changes


def setting(method: str, value: float) -> Values:
    """A value of a method's grid, as a change of a run's values."""
    return override({}, [f"{GRIDS[method][0]}={value!r}"])


def words(method: str, value: float) -> str:
    """What a run with a value of the grid is called."""
    return f"{GRIDS[method][0].rpartition('.')[2]} {value:g}"


def winners(lines: Sequence["Line"]) -> dict[str, dict[str, float]]:
    """What the finished cells of one scale choose, by data set and method, as `TUNED` has it.

    A value with which a run diverged is not chosen. A method has none until every value was tried
    with the same seeds.
    """
    found: dict[str, dict[str, float]] = {}
    for data in dict.fromkeys(one.data for one in lines):
        for method, (_, values) in GRIDS.items():
            own = {v: _scores(lines, data, method, v) for v in values}
            alike = all(scores.keys() == own[values[0]].keys() for scores in own.values())
            sound = {v: statistics.fmean(a.values()) for v, a in own.items() if _finite(a)}
            if alike and sound:
                found.setdefault(data, {})[method] = max(sound, key=lambda v: sound[v])
    return found


def _scores(lines: Sequence["Line"], data: str, method: str, value: float) -> dict[int, float]:
    """Mean accuracy of the last five rounds by seed; NaN for a run that diverged."""
    key = (data, method, words(method, value))
    found = [one for one in lines if (one.data, one.method, one.ablation) == key]
    return {
        one.seed: math.nan if one.last5_accuracy is None else one.last5_accuracy for one in found
    }


def _finite(scores: dict[int, float]) -> bool:
    """Whether there are scores, and all of them sound."""
    return bool(scores) and all(map(math.isfinite, scores.values()))
