"""Arithmetic on trees: weighted means that treat every kind of tensor as it should be treated."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from feddpms.types import Message, Tree

VARIANCE = "running_var"
BUFFERS = ("running_mean", VARIANCE, "num_batches_tracked")
"""endings of what a network counts and does not train"""


def trained(tree: Tree) -> Tree:
    """The entries of a network that are trained: no batch-norm statistics, no counters."""
    return {k: v for k, v in tree.items() if not k.endswith(BUFFERS)}


def zeros(tree: Tree) -> Tree:
    """A tree of the same shape that is zero."""
    return {k: torch.zeros_like(v) for k, v in tree.items()}


def toward(old: Tree, new: Tree, step: float) -> Tree:
    """From an old model a step towards a new one: 1 is the new one, bit for bit; buffers are new.

    Written new + (step - 1) (new - old), which is old + step (new - old).
    """
    return new | {k: new[k] + (step - 1) * (new[k] - w) for k, w in trained(old).items()}


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another shape to be filled, with the type, device and layout of one."""
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def average(
    replies: Mapping[int, Message], weighting: Literal["samples", "uniform"] = "samples"
) -> Tree:
    """Mean of the clients' models, weighted by each client's number of examples, or not.

    FedAvg (McMahan et al. 2017): w = sum_i p_i y_i with p_i = n_i / sum_j n_j over the replies that
    arrived.

    Args:
        replies: by client; each with its `model` and the number `examples`.
        weighting: `samples` for n_i, or `uniform`.
    """
    ordered = [replies[client] for client in sorted(replies)]
    examples = [r.numbers["examples"] for r in ordered]
    weights = examples if weighting == "samples" else [1.0] * len(ordered)
    return mean([r.trees["model"] for r in ordered], weights)


def mean(trees: list[Tree], weights: list[float]) -> Tree:
    """Weighted mean of trees with equal keys; sums in float64, types kept.

    Integer tensors (counters) take the largest value. A batch-norm variance is pooled with its
    mean, var = sum p_i (var_i + mean_i^2) - (sum p_i mean_i)^2: the variance of the union, not the
    mean of the variances.

    Args:
        trees: at least one.
        weights: not negative, one a tree; they need not sum to 1.
    """
    first = trees[0]
    keys = [k for k, v in first.items() if v.is_floating_point()]
    total = torch.zeros(sum(first[k].numel() for k in keys), dtype=torch.float64)
    row = torch.empty_like(total)
    squares = _parts(row, first, keys)
    for tree, weight in zip(trees, weights, strict=True):
        row.copy_(torch.cat([torch.empty(0), *(tree[k].reshape(-1) for k in keys)]))
        _add_squares(squares, 1)  # E[x^2] adds up; a variance does not
        total += row.mul_(weight / sum(weights))
    merged = _parts(total, first, keys)
    _add_squares(merged, -1)
    for key in first:
        if key not in merged:
            merged[key] = torch.stack([t[key] for t in trees]).amax(0)
        elif key.endswith(VARIANCE):
            merged[key].clamp_(min=0)
    return {k: torch.empty_like(v).copy_(merged[k].view(v.shape)) for k, v in first.items()}


def _parts(row: Tensor, like: Tree, keys: list[str]) -> Tree:
    """The entries that lie side by side in a row, as flat views of it."""
    return dict(zip(keys, row.split([like[k].numel() for k in keys]), strict=True))


def _add_squares(parts: Tree, sign: int) -> None:
    """Add a batch norm's squared mean to its variance, or take it off."""
    for key, value in parts.items():
        if key.endswith(VARIANCE):
            value += sign * parts[mean_of(key)].square()


def mean_of(variance: str) -> str:
    """The name of the running mean that goes with a running variance."""
    return variance.removesuffix(VARIANCE) + "running_mean"
