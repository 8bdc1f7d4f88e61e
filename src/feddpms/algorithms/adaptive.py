"""A server's adaptive step: the mean of the clients' updates as a gradient with two moments.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated Optimization",
ICLR 2021, algorithm 2: with d = sum_i p_i y_i - w, m <- b1 m + (1 - b1) d, v by the method's own
rule, w <- w + s m / (sqrt(v) + tau), from m = 0 and v = tau^2, with no correction for that start.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from feddpms.algorithms.trees import trained, zeros
from feddpms.types import Tree


@dataclass(frozen=True)
class Adaptive:
    """The global model, and the moments m and v of the update of its trained entries."""

    model: Tree
    first: Tree
    square: Tree


def begin(model: Tree, tau: float) -> Adaptive:
    """The initial model, m = 0 and v = tau^2."""
    own = trained(model)
    return Adaptive(model, zeros(own), {k: torch.full_like(w, tau**2) for k, w in own.items()})


def step(
    state: Adaptive,
    mean: Tree,
    square: Callable[[Tensor, Tensor], Tensor],
    server_lr: float,
    beta1: float,
    tau: float,
) -> Adaptive:
    """The next state; what is not trained, such as batch-norm statistics, is averaged.

    Args:
        state: the last one.
        mean: average of the clients' models.
        square: the next v from v and d^2.
        server_lr: s, size of the step.
        beta1: b1, in [0, 1).
        tau: least denominator, above 0.
    """
    model, first, second = dict(mean), {}, {}
    for k, m in state.first.items():
        d = mean[k] - state.model[k]
        first[k] = beta1 * m + (1 - beta1) * d
        second[k] = square(state.square[k], d.square())
        model[k] = state.model[k] + server_lr * first[k] / (second[k].sqrt() + tau)
    return Adaptive(model, first, second)
