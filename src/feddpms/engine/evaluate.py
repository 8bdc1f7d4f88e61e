"""How good a model is on the test set."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from feddpms.types import Shard


@dataclass(frozen=True)
class Score:
    """Accuracy and loss on a set of examples.

    Attributes:
        accuracy: share of right answers, in [0, 1].
        loss: mean cross entropy in nats.
        per_class: share of right answers for each class; NaN where there is no example.
    """

    accuracy: float
    loss: float
    per_class: tuple[float, ...]


def evaluate(net: Any, shard: Shard, classes: int, size: int = 500) -> Score:
    """Score a network in eval mode; every example counts once, whatever the batches."""
    net.eval()
    right = torch.zeros(classes, dtype=torch.int64)
    total = 0.0
    with torch.no_grad():
        for x, y in zip(shard.x.split(size), shard.y.split(size), strict=True):
            logits = net(x)
            total += float(F.cross_entropy(logits, y, reduction="sum"))
            right += torch.bincount(y[logits.argmax(1) == y], minlength=classes)
    count = torch.bincount(shard.y, minlength=classes)
    per_class = tuple(int(r) / int(n) if n else math.nan for r, n in zip(right, count, strict=True))
    return Score(int(right.sum()) / len(shard), total / len(shard), per_class)


def average(scores: list[Score]) -> Score:
    """Mean over several models' scores."""
    n = len(scores)
    per_class = zip(*(s.per_class for s in scores), strict=True)
    return Score(
        sum(s.accuracy for s in scores) / n,
        sum(s.loss for s in scores) / n,
        tuple(sum(values) / n for values in per_class),
    )
