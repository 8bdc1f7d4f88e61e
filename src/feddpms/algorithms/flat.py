"""A network's trained parameters as one vector, so that an optimiser takes one step for all."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from feddpms.algorithms.training import Training
from feddpms.types import Tree


def new_optimizer(
    parameters: Iterable[Tensor], local: Training, lr: float
) -> torch.optim.Optimizer:
    """A fresh optimiser."""
    decay = local.weight_decay
    if local.optimizer == "adam":
        return torch.optim.Adam(parameters, lr, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, lr, local.momentum, weight_decay=decay, fused=True)


class Flat:
    """Parameters, and their gradients, that lie side by side in memory.

    Each parameter keeps its shape and memory layout, but its values become a view of one vector,
    and its gradient a view of another. What an optimiser does to the vector it does to all of them,
    number by number, in one call instead of one for each.

    Args:
        named: parameters of one type; at least one.

    Attributes:
        named: the parameters.
        vector: all values [n].
        gradient: all gradients [n], zero at first; it is the vector's `grad`.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]):
        self.named = named
        values = torch.cat([p.detach().flatten() for p in named.values()])
        self.vector, self.gradient = nn.Parameter(values), torch.zeros_like(values)
        self.vector.grad = self.gradient
        for key, view in self._views(self.vector.data).items():
            view.copy_(named[key].data)
            named[key].data = view
        self._attach(self._views(self.gradient))

    def set(self, gradient: Tensor) -> None:
        """Take a gradient [n] whose parts lie row by row, whatever the parameters' layouts are."""
        views = self._views(self.gradient)
        parts = gradient.split([view.numel() for view in views.values()])
        for view, part in zip(views.values(), parts, strict=True):
            view.copy_(part.view(view.shape))
        self._attach(views)

    def like(self, tree: Tree) -> Tensor:
        """A tree over some of the parameters as a vector [n]; zero for the others."""
        vector = torch.zeros_like(self.gradient)
        views = self._views(vector)
        for key, value in tree.items():
            views[key].copy_(value)
        return vector

    def release(self) -> None:
        """Leave the parameters without gradients."""
        for p in self.named.values():
            p.grad = None

    def _attach(self, views: Tree) -> None:
        """Let backward add to the vector of gradients."""
        for key, view in views.items():
            self.named[key].grad = view

    def _views(self, vector: Tensor) -> Tree:
        """A vector's parts, in the parameters' shapes and memory layouts."""
        views, start = {}, 0
        for key, p in self.named.items():
            views[key] = vector.as_strided(p.shape, p.stride(), start)
            start += p.numel()
        return views
