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
    "feddpms": ("method.vae.weight", (0.0005, 0.005, 0.05, 0.5)),
}
"""by method, which setting is chosen, and of which values"""
TUNED: dict[str, dict[str, float]] = {}
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
    """What the finished cells choose, by data set and method, in the form of `TUNED`.

    A value with which a run diverged is not chosen; a method whose grid is not finished has none.
    """
    found: dict[str, dict[str, float]] = {}
    for data in dict.fromkeys(one.data for one in lines):
        for method, (_, values) in GRIDS.items():
            own = {v: _scores(lines, data, method, v) for v in values}
            sound = {
                v: statistics.fmean(a) for v, a in own.items() if a and not any(map(math.isnan, a))
            }
            if sound and all(own.values()):
                found.setdefault(data, {})[method] = max(sound, key=lambda v: sound[v])
    return found


def _scores(lines: Sequence["Line"], data: str, method: str, value: float) -> list[float]:
    """Mean accuracy of the last five rounds by seed; NaN for a run that diverged."""
    key = (data, method, words(method, value))
    found = [one.last5_accuracy for one in lines if (one.data, one.method, one.ablation) == key]
    return [math.nan if accuracy is None else accuracy for accuracy in found]
