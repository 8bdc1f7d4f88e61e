"""The one local training loop. A loss and an added gradient cover every method."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from feddpms.algorithms.method import Client, Training
from feddpms.privacy import in_the_clear
from feddpms.types import Batch, Loss, Message, Tree


@dataclass(frozen=True)
class Fitted:
    """A trained model.

    Attributes:
        tree: the entries of the starting tree after training.
        steps: optimiser steps taken.
        loss: mean loss over the steps.
    """

    tree: Tree
    steps: int
    loss: float

    def reply(self, me: Client, kind: str = "train") -> Message:
        """The usual reply: the model and how much it was trained, all of it in the clear."""
        numbers = {"examples": len(me.shard), "steps": self.steps, "train_loss": self.loss}
        events = in_the_clear("model", "example count", "training loss")
        return Message(kind, {"model": self.tree}, numbers, events)


def fit(me: Client, start: Tree, loss: Loss | None = None, drift: Tree | None = None) -> Fitted:
    """Train from `start` for the round's local epochs.

    The number of steps follows from the client's own examples alone, so every method takes the same
    number; synthetic examples ride along in the same steps, at most as many as real ones fit in a
    batch.

    Args:
        me: shard, network, optimiser settings and random streams.
        start: weights and buffers to start from; only its parameters are trained.
        loss: the loss; the client's base loss if None.
        drift: added to each step's gradient, for the parameters that it names.
    """
    loss = loss or me.loss
    net = load(me.net, start).train()
    named = {k: p for k, p in net.named_parameters() if k in start}
    optimizer = _optimizer(list(named.values()), me.local, me.lr)
    total, steps = torch.zeros((), dtype=torch.float64), 0
    for batch in _batches(me):
        optimizer.zero_grad()
        value = loss(net, batch)
        value.backward()
        for key, g in (drift or {}).items():
            named[key].grad = g.clone() if named[key].grad is None else named[key].grad + g
        optimizer.step()
        total += value.detach()
        steps += 1
    state = net.state_dict()
    return Fitted({k: state[k].clone() for k in start}, steps, float(total) / steps)


def load(net: Any, tree: Tree) -> Any:
    """The network with these entries overwritten; entries that the tree lacks stay."""
    state = net.state_dict()
    with torch.no_grad():
        for key, value in tree.items():
            state[key].copy_(value)
    return net


def frozen(net: nn.Module, tree: Tree) -> nn.Module:
    """A copy of the network with these entries, in eval mode and without gradients."""
    return load(copy.deepcopy(net), tree).eval().requires_grad_(False)


def examples(me: Client) -> tuple[Tensor, Tensor, Tensor | None]:
    """Images, labels and loss weights of a client's own examples, then of the synthetic ones."""
    own, extra = me.shard, me.synthetic
    if extra is None or not len(extra):
        return own.x, own.y, None
    weight = torch.cat([torch.full((len(s),), s.weight, dtype=own.x.dtype) for s in (own, extra)])
    return torch.cat([own.x, extra.x]), torch.cat([own.y, extra.y]), weight


def _batches(me: Client):
    """The batches of all local epochs; a last batch of one joins the one before it."""
    x, y, weight = examples(me)
    own, size = me.rng.torch("batches"), me.local.batch_size
    extra = me.rng.torch("synthetic batches")
    n = len(me.shard)
    for _ in range(me.local.epochs):
        parts = list(torch.randperm(n, generator=own).split(size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        further = torch.randperm(len(y) - n, generator=extra) + n
        ride = min(size, -(-len(further) // len(parts)))
        for i, index in enumerate(parts):
            index = torch.cat([index, further[i * ride : (i + 1) * ride]])
            w = None if weight is None else weight[index]
            yield Batch(x[index], y[index], w, index)


def _optimizer(parameters: list[nn.Parameter], local: Training, lr: float) -> torch.optim.Optimizer:
    """A fresh optimiser."""
    if local.optimizer == "adam":
        return torch.optim.Adam(parameters, lr, weight_decay=local.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters, lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=True
    )
