"""How good a model is on the test set."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from feddpms.types import Shard

PART = 500
"""examples in a part; fixed, since the size of a batch changes the last bits of a loss"""
Tally = tuple[Tensor, float]
"""right answers of each class [classes], and the sum of the losses, of one part"""


@dataclass(frozen=True)
class Score:
    """Accuracy and loss on a set of examples.

    Attributes:
        accuracy: share of right answers, in [0, 1]; NaN if the loss is not finite.
        loss: mean cross entropy in nats.
        per_class: share of right answers for each class; NaN where there is no example, and if
            the loss is not finite.
    """

    accuracy: float
    loss: float
    per_class: tuple[float, ...]


def evaluate(net: Any, shard: Shard, classes: int, size: int = PART) -> Score:
    """Score a network in eval mode; every example counts once, whatever the batches."""
    return total(tally(net, shard, classes, size), shard, classes)


def tally(net: Any, shard: Shard, classes: int, size: int = PART) -> list[Tally]:
    """What a network in eval mode gets right in each part of a set of examples."""
    net.eval()
    parts = []
    with torch.no_grad():
        for x, y in zip(shard.x.split(size), shard.y.split(size), strict=True):
            logits = net(x)
            loss = float(F.cross_entropy(logits, y, reduction="sum"))
            right = torch.bincount(y[logits.argmax(1) == y], minlength=classes)
            parts.append((right.cpu(), loss))
    return parts


def total(parts: Iterable[Tally], shard: Shard, classes: int) -> Score:
    """The score of all parts of a set of examples, added up in their order."""
    right, loss = torch.zeros(classes, dtype=torch.int64), 0.0
    for r, part in parts:
        right += r
        loss += part
    if not math.isfinite(loss):  # the largest of logits that are no numbers is no answer
        return Score(math.nan, loss / len(shard), (math.nan,) * classes)
    count = torch.bincount(shard.y, minlength=classes).cpu()
    per_class = tuple(int(r) / int(n) if n else math.nan for r, n in zip(right, count, strict=True))
    return Score(int(right.sum()) / len(shard), loss / len(shard), per_class)


def average(scores: list[Score]) -> Score:
    """Mean over several models' scores."""
    n = len(scores)
    per_class = zip(*(s.per_class for s in scores), strict=True)
    return Score(
        sum(s.accuracy for s in scores) / n,
        sum(s.loss for s in scores) / n,
        tuple(sum(values) / n for values in per_class),
    )
