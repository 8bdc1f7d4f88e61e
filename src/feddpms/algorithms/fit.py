"""The one local training loop. A loss and a correction of its gradient cover every method."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from feddpms.algorithms.batches import shuffled
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.flat import Flat, new_optimizer
from feddpms.algorithms.method import Client
from feddpms.algorithms.precision import precision
from feddpms.algorithms.private import noisy_gradients, training_event
from feddpms.algorithms.trees import empty
from feddpms.privacy import histogram
from feddpms.types import Event, Loss, Message, Tree


@dataclass(frozen=True)
class Fitted:
    """A trained model.

    Attributes:
        tree: the entries of the starting tree after training.
        steps: optimiser steps taken.
        loss: mean loss over the steps, without corrections; NaN if training was private, since
            nothing paid for it.
        events: what paid for the model; empty if it was trained without protection.
    """

    tree: Tree
    steps: int
    loss: float
    events: tuple[Event, ...] = ()

    def reply(self, me: Client, **more: float) -> Message:
        """The usual reply: the model, the client's weight in the average, and the training loss.

        Args:
            me: whose reply it is.
            more: numbers that follow from the number of steps, which is in the reply.
        """
        weight, paid = _weight(me)
        numbers = {"examples": weight, "steps": self.steps, **more}
        if self.events:
            return Message("train", {"model": self.tree}, numbers, self.events + paid)
        numbers["train_loss"] = self.loss
        return Message(
            "train",
            {"model": self.tree},
            numbers,
            me.clear("model", "training loss", "step count") + paid,
        )


def fit(
    me: Client,
    start: Tree,
    loss: Loss | None = None,
    correction: Correction | None = None,
) -> Fitted:
    """Train from `start` for the round's local epochs.

    Args:
        me: shard, network, optimiser settings, privacy and random streams.
        start: weights and buffers to start from; only its parameters are trained.
        loss: the loss, a mean over a batch's examples; the client's base loss if None.
        correction: of each step; it sees no example, so private training takes it as it is.

    Raises:
        PrivacyError: private training would cost more than the client's budget.
    """
    loss = loss or me.loss

    def train(gradients) -> tuple[Tree, int, float]:
        return _train(me, start, gradients(me, loss), correction)

    if me.privacy.training.kind == "none" and me.together:
        return Fitted(*me.together(me, start, loss, correction))
    if me.privacy.training.kind == "none":
        return Fitted(*train(_gradients))
    _weight(me)  # before training: without a weight the model could not be sent, only paid for
    event = training_event(me)
    tree, events = me.account.release(me.round, event, lambda: train(noisy_gradients)[0])
    return Fitted(tree, event.times, math.nan, events)


def load(net: Any, tree: Tree) -> Any:
    """The network with these entries overwritten; entries that the tree lacks stay.

    An entry takes the tree's shape: a model of matched neurons may have more than the network.
    """
    state = net.state_dict()
    with torch.no_grad():
        for key, value in tree.items():
            if state[key].shape != value.shape:
                module, _, name = key.rpartition(".")
                held = getattr(net.get_submodule(module), name)
                held.data = empty(held, value.shape)
                state[key] = held
            state[key].copy_(value)
    return net


def frozen(net: nn.Module, tree: Tree) -> nn.Module:
    """A copy of the network with these entries, in eval mode and without gradients."""
    return load(copy.deepcopy(net), tree).eval().requires_grad_(False)


def _train(
    me: Client, start: Tree, gradients, correction: Correction | None
) -> tuple[Tree, int, float]:
    """The loop: trained entries, steps taken, mean loss."""
    net = load(me.net, start).train()
    flat = Flat({k: p for k, p in net.named_parameters() if k in start})
    optimizer = new_optimizer([flat.vector], me.local, me.lr)
    steer = correction.over(flat) if correction else None
    decoupled = correction is not None and correction.decoupled
    total, steps = torch.zeros((), dtype=torch.float64, device=me.shard.x.device), 0
    for value in gradients(net, flat):
        if steer and not decoupled:
            flat.gradient += steer()
        optimizer.step()
        if steer and decoupled:
            flat.vector.data -= me.lr * steer()
        total += value
        steps += 1
    flat.release()
    state = net.state_dict()
    return {k: state[k].clone() for k in start}, steps, float(total) / max(steps, 1)


def _gradients(me: Client, loss: Loss):
    """Plain gradients: what sets `grad` before each step, and yields the step's loss."""

    def steps(net: Any, flat: Flat) -> Iterator[Tensor]:
        for batch in shuffled(me):
            flat.gradient.zero_()
            with precision(me.local, batch.x.device):
                value = loss(net, batch)
            value.backward()
            yield value.detach()

    return steps


def _weight(me: Client) -> tuple[float, tuple[Event, ...]]:
    """A client's weight in an average: its number of examples, exact or by its noisy histogram."""
    if me.privacy.weights == "exact":
        return len(me.shard), me.clear("example count")
    paid = (me.privacy, me.account, me.noise, me.round)
    counts, events = histogram(me.shard.y, me.task.classes, *paid)
    return max(1.0, float(counts.sum())), events
