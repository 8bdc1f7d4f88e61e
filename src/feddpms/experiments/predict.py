"""How long cells take on this machine: a step is timed, and counted as often as it is taken."""

import time
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from feddpms import config
from feddpms.config import Run
from feddpms.engine import cores
from feddpms.experiments.presets import WHOLE, Cell
from feddpms.models import NetSettings, build, trunk
from feddpms.rng import Rng

SHAPES = {"fmnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
COST = {"fedprox": 1.05, "moon": 1.9, "fedmix": 2.8, "feddpms, images": 1.5, "sharing": 1.3}
"""of a method's run, in time, against fedavg's (benchmarks/method_cost.py)"""
STEPS, BATCH = 8, 64
SCORED = 10_000 / 3
"""test images of a round, each a third of the work of training on one"""


def predicted(cells: Sequence[Cell], workers: int | None = None) -> list[float]:
    """Minutes that cells take, roughly.

    Args:
        cells: each with the fraction of the whole data set that it takes.
        workers: processes; None for one on each core.
    """
    several = workers or cores()
    return [_minutes(config.parse(one.values), several) for one in cells]


def _minutes(run: Run, workers: int) -> float:
    """Of one run."""
    images = run.data.fraction * WHOLE[run.data.name] * run.local.epochs + SCORED
    name, decodes = (
        type(run.method).__name__.lower(),
        getattr(run.method, "secondary", "") == "train",
    )
    cost = COST.get(f"{name}, images" if decodes else name, 1.0)
    return run.rounds * images * cost * _seconds(run.data.name, run.net) / workers / 60


@cache
def _seconds(data: str, net: NetSettings) -> float:
    """Of one training image, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build(SHAPES[data], 10, net, Rng(0)).train()
        x, y = torch.rand(BATCH, *SHAPES[data]), torch.arange(BATCH) % 10
        trained = list(trunk(dict(model.named_parameters())).values())
        optimizer = torch.optim.Adam(trained)
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - begin)
        return sorted(times)[STEPS // 2] / BATCH
    finally:
        torch.set_num_threads(threads)
