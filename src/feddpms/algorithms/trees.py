"""Arithmetic on trees: weighted means that treat every kind of tensor as it should be treated."""

from collections.abc import Mapping

import torch
from torch import Tensor

from feddpms.types import Message, Tree

VARIANCE = "running_var"


def average(replies: Mapping[int, Message], name: str = "model") -> Tree:
    """Mean of a tree over the replies, weighted by each client's number of examples.

    FedAvg (McMahan et al. 2017): w = sum_i p_i y_i with p_i = n_i / sum_j n_j over the replies that
    arrived.

    Args:
        replies: by client; each with the tree and the number `examples`.
        name: which of the trees.
    """
    ordered = [replies[client] for client in sorted(replies)]
    return mean([r.trees[name] for r in ordered], [r.numbers["examples"] for r in ordered])


def mean(trees: list[Tree], weights: list[float]) -> Tree:
    """Weighted mean of trees with equal keys; sums in float64, types kept.

    Integer tensors (counters) take the largest value. A batch-norm variance is pooled with its
    mean, var = sum p_i (var_i + mean_i^2) - (sum p_i mean_i)^2: the variance of the union, not the
    mean of the variances.

    Args:
        trees: at least one.
        weights: not negative, one a tree; they need not sum to 1.
    """
    share = [w / sum(weights) for w in weights]
    merged = {}
    for key, first in trees[0].items():
        values = [t[key] for t in trees]
        if not first.is_floating_point():
            merged[key] = torch.stack(values).amax(0)
        elif key.endswith(VARIANCE):
            means = [t[key.removesuffix(VARIANCE) + "running_mean"].double() for t in trees]
            moments = [v.double() + m.square() for v, m in zip(values, means, strict=True)]
            pooled = _sum(moments, share) - _sum(means, share).square()
            merged[key] = pooled.clamp(min=0).to(first.dtype)
        else:
            merged[key] = _sum([v.double() for v in values], share).to(first.dtype)
    return merged


def _sum(values: list[Tensor], share: list[float]) -> Tensor:
    """Weighted sum in the order given."""
    total = torch.zeros_like(values[0])
    for value, p in zip(values, share, strict=True):
        total = total + p * value
    return total
