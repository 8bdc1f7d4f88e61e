"""The paper's tables and figures, and what is asked beyond them, as runs to be made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddpms.config import Values, merge, method_values
from feddpms.experiments.tuning import GRIDS, HELD_OUT, setting, tuned, words

DATA = ("fmnist", "cifar10", "cifar100")
WHOLE = {"fmnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
"""training examples of the whole data set"""
METHODS = ("fedavg", "fedprox", "fedmix", "moon", "feddpms")
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5)
PRELIMINARY = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""parts of all rounds"""
LAMBDAS = (0.0005, 0.005, 0.05, 0.5)
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 1000.0)
"""the last one is as good as no noise"""
QUIET_COUNTS = 50.0
"""noise multiplier of the histogram at epsilon 0.1, which the default's 10 would overspend"""


@dataclass(frozen=True)
class Scale:
    """How large the runs are.

    Attributes:
        fraction: part of the training data, in (0, 1].
        rounds: rounds of communication.
        epochs: local epochs in a round.
        width: factor on the network's channels.
    """

    fraction: float
    rounds: int
    epochs: int
    width: float


SCALES = {
    "paper": Scale(1.0, 50, 5, 1.0),
    "laptop": Scale(0.1, 25, 3, 0.5),
    "trial": Scale(0.01, 3, 1, 0.25),
}


@dataclass(frozen=True)
class Cell:
    """A run to be made.

    Attributes:
        values: its settings, as `config.parse` takes them, without where the data lie.
        ablation: what is left out of or changed in the method, in words; None for the method.
    """

    values: Values
    ablation: str | None = None

    @property
    def data(self) -> str:
        """Name of the data set."""
        return self.values["data"]["name"]

    @property
    def beta(self) -> float:
        """Dirichlet concentration."""
        return self.values["partition"]["beta"]


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Attributes:
        description: what it shows, in one line.
        cells: the runs of one seed.
    """

    description: str
    cells: Callable[[Scale, int], list[Cell]]


def cell(
    scale: Scale,
    seed: int,
    data: str,
    method: str,
    beta: float = 0.5,
    clients: int = 10,
    fraction: float = 0.0,
    ablation: str | None = None,
    changes: Values | None = None,
) -> Cell:
    """A run of a scale, with the settings that were chosen for the method on this data set.

    Args:
        scale: how large it is.
        seed: the run's.
        data: data set.
        method: its name, such as `feddpms+moon`.
        beta: Dirichlet concentration.
        clients: how many share the data.
        fraction: part of the training data; 0 for the scale's.
        ablation: what is changed, in words.
        changes: of the settings, laid over them.
    """
    values = {
        "seed": seed,
        "rounds": scale.rounds,
        "method": method_values(method),
        "data": {"name": data, "fraction": fraction or scale.fraction},
        "partition": {"beta": beta, "clients": clients},
        "net": {"width": scale.width},
        "local": {"epochs": scale.epochs},
    }
    return Cell(merge(merge(values, tuned(data, method)), changes or {}), ablation)


def _table1(scale: Scale, seed: int) -> list[Cell]:
    """Five methods on three data sets."""
    return [cell(scale, seed, data, method) for data in DATA for method in METHODS]


def _figure2(scale: Scale, seed: int) -> list[Cell]:
    """The same for each beta."""
    return [cell(scale, seed, d, m, beta) for d in DATA for beta in BETAS for m in METHODS]


def _table2(scale: Scale, seed: int) -> list[Cell]:
    """Ten to fifty clients, who have as much each."""
    return [
        cell(scale, seed, "cifar100", method, clients=n, fraction=n / 100)
        for n in (10, 20, 30, 40, 50)
        for method in METHODS
    ]


def _figure3(scale: Scale, seed: int) -> list[Cell]:
    """Curves of all methods, and of the paper's phases with three numbers of preliminary rounds."""
    return _table1(scale, seed) + _preliminary_of(scale, seed, (0.3, 0.4, 0.5))


def _preliminary(scale: Scale, seed: int) -> list[Cell]:
    """How long the auto-encoder is trained before anything is released."""
    return _preliminary_of(scale, seed, PRELIMINARY)


def _preliminary_of(scale: Scale, seed: int, parts: Sequence[float]) -> list[Cell]:
    """FedDPMS that goes on after these parts of all rounds."""
    counts = [max(1, round(part * scale.rounds)) for part in parts]
    changes = {f"{n} preliminary rounds": _decoding(preliminary_rounds=n) for n in counts}
    return _changed(scale, seed, changes)


def _lambda(scale: Scale, seed: int) -> list[Cell]:
    """How much the auto-encoder's loss weighs."""
    changes = {f"lambda {w:g}": _decoding(vae={"weight": w}) for w in LAMBDAS}
    return _changed(scale, seed, changes)


def _privacy(scale: Scale, seed: int) -> list[Cell]:
    """What the release's noise costs, and the paper's release, which no epsilon covers."""
    changes = {f"epsilon {e:g}": {"privacy": _budget(e)} for e in EPSILONS}
    changes["the paper's release"] = {"privacy": {"release": "paper"}}
    cells = [cell(scale, seed, data, "fedavg", 0.1) for data in DATA]
    return cells + _changed(scale, seed, changes, 0.1)


def _budget(epsilon: float) -> Values:
    """Settings of a release at this epsilon."""
    quiet = {"count_noise_multiplier": QUIET_COUNTS} if epsilon < 0.5 else {}
    return {"target_epsilon": epsilon, **quiet}


def _decoding(**more: Any) -> Values:
    """The paper's phases: clients go on, on decoded images; nothing is calibrated."""
    return {"method": {"secondary": "train", "calibration": {"steps": 0}, **more}}


def _changed(
    scale: Scale, seed: int, changes: Mapping[str, Values], beta: float = 0.5
) -> list[Cell]:
    """FedDPMS on every data set with each change of its settings, by what it is called."""
    return [
        cell(scale, seed, data, "feddpms", beta, ablation=words, changes=change)
        for data in DATA
        for words, change in changes.items()
    ]


def _tuning(scale: Scale, seed: int) -> list[Cell]:
    """Every value of each method's grid, scored on training examples that are held out."""
    held_out: Values = {"data": {"validation": HELD_OUT}}
    return [
        cell(
            scale,
            seed,
            data,
            method,
            ablation=words(method, value),
            changes=merge(held_out, setting(method, value)),
        )
        for data in DATA
        for method, (_, values) in GRIDS.items()
        for value in values
    ]


def _ablation(scale: Scale, seed: int) -> list[Cell]:
    """Where the gain comes from: no synthetic data, images with and without a filter, real ones."""
    changes = {
        "no calibration": {"method": {"calibration": {"steps": 0}}},
        "images": _decoding(),
        "filtered images": _decoding(synthesis={"filter": "global"}),
        "images and calibration": {"method": {"secondary": "train"}},
    }
    cells = []
    for data in DATA:
        for beta in (0.1, 0.5):
            cells += [cell(scale, seed, data, m, beta) for m in ("fedavg", "feddpms", "sharing")]
            cells += [
                cell(scale, seed, data, "feddpms", beta, ablation=words, changes=change)
                for words, change in changes.items()
            ]
    return cells


EXPERIMENTS = {
    "table1": Experiment("five methods on three data sets, beta 0.5 (paper, table 1)", _table1),
    "figure2": Experiment("the same for beta 0.1 to 0.5 (paper, figure 2)", _figure2),
    "table2": Experiment("10 to 50 clients on CIFAR-100 (paper, table 2)", _table2),
    "figure3": Experiment("curves; 30, 40, 50 % preliminary rounds (paper, figure 3)", _figure3),
    "tuning": Experiment("each method's setting, on held-out training examples", _tuning),
    "preliminary": Experiment("decoded images after 10 to 60 % preliminary rounds", _preliminary),
    "lambda": Experiment("decoded images with the auto-encoder's weight 0.0005 to 0.5", _lambda),
    "privacy": Experiment("FedDPMS with epsilon 0.1 to 16, and next to no noise", _privacy),
    "ablation": Experiment("FedDPMS without its parts, and with real examples", _ablation),
}
"""Every experiment by the name that the command takes."""
