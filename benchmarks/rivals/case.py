"""What every side is given, how it is optimised and evaluated, and what every side reports."""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

EVALUATED = 500
"""test images in a batch"""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        clients: number of clients.
        examples: images of each client.
        cohort: clients of a round.
        batch_size: images in a step.
        epochs: passes over a client's images in a round.
        rounds: rounds to run; the first is not counted.
        tested: test images.
        lr: learning rate of SGD.
        momentum: of SGD.
    """

    clients: int
    examples: int
    cohort: int
    batch_size: int
    epochs: int
    rounds: int
    tested: int = 1000
    lr: float = 0.01
    momentum: float = 0.9

    @property
    def steps(self) -> int:
        """Optimiser steps of a round, over its cohort; a last batch that is not full counts."""
        return self.cohort * self.epochs * -(-self.examples // self.batch_size)


@dataclass(frozen=True)
class Case:
    """Settings, and the bytes that all sides share.

    Attributes:
        settings: what is run.
        x: images [clients, examples, 1, 28, 28] in [0, 1].
        y: labels [clients, examples].
        test_x: test images.
        test_y: their labels.
        weights: the initial model.
    """

    settings: Settings
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    weights: dict[str, Tensor]


def load(path: Path | str) -> Case:
    """Read a case into memory."""
    with np.load(path) as file:
        held = {name: file[name] for name in file.files}
    settings = Settings(**json.loads(str(held.pop("settings"))))
    x, test_x = (torch.from_numpy(held.pop(k)).float() / 255 for k in ("x", "test_x"))
    y, test_y = (torch.from_numpy(held.pop(k)) for k in ("y", "test_y"))
    weights = {name: torch.from_numpy(value) for name, value in held.items()}
    return Case(settings, x, y, test_x, test_y, weights)


class Sgd(torch.optim.SGD):
    """Torch's SGD with its fused step, as feddpms uses it; counts the steps of all instances."""

    taken = 0

    def __init__(self, params: Any, lr: float, momentum: float):
        super().__init__(params, lr, momentum=momentum, fused=True)
        self.register_step_post_hook(_count)


def _count(optimizer: Any, arguments: Any, keywords: Any) -> None:
    """One more step."""
    Sgd.taken += 1


def accuracy(net: nn.Module, case: Case) -> float:
    """Share of right answers on the test set."""
    net.eval()
    right = 0
    with torch.no_grad():
        batches = zip(case.test_x.split(EVALUATED), case.test_y.split(EVALUATED), strict=True)
        for x, y in batches:
            right += int((net(x).argmax(1) == y).sum())
    return right / len(case.test_y)


@dataclass
class Rounds:
    """When rounds ended, how many steps were taken in each, and what came of it."""

    ends: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    accuracy: float = 0.0

    def begin(self) -> None:
        """The first round begins."""
        self.ends = [time.perf_counter()]

    def end(self, steps: int, accuracy: float) -> None:
        """A round has ended, its evaluation included."""
        self.ends.append(time.perf_counter())
        self.steps.append(steps)
        self.accuracy = accuracy

    def write(self, path: Path, parameters: int) -> None:
        """Write what the harness reads."""
        seconds = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        found = {"seconds": seconds, "steps": self.steps, "accuracy": self.accuracy}
        path.write_text(json.dumps({**found, "parameters": parameters}))


def arguments() -> argparse.Namespace:
    """What the harness passes to a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=Path, required=True, help="file with the case")
    parser.add_argument("--out", type=Path, required=True, help="file to write the result to")
    parser.add_argument("--processes", type=int, required=True, help="processes to use")
    parser.add_argument("--threads", type=int, required=True, help="torch's threads in each")
    return parser.parse_args()
