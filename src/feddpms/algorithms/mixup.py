"""Mixup: train on mixtures of a client's own examples.

Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR 2018: with lam
from Beta(alpha, alpha), an example x_i and its partner x_j of the same batch cost
lam l(f(x), y_i) + (1 - lam) l(f(x), y_j) at x = lam x_i + (1 - lam) x_j.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.types import Loss, Memory, Message, Task, Tree, settings


@settings
class Mixup:
    """A training method on mixtures of each client's own examples."""

    about: ClassVar[About] = About("data", "Zhang et al., ICLR 2018", per_example=False)

    inner: Chosen = FedAvg()
    """the training method"""
    alpha: Annotated[float, Ge(0)] = 1.0
    """of Beta(alpha, alpha), which gives the share; near 0 little is mixed, at 0 nothing"""

    def start(self, model: Tree, task: Task) -> Any:
        """The inner state, which is all there is."""
        require_training("mixup", self.inner)
        return self.inner.start(model, task)

    def ask(self, state: Any, client: int, round: int) -> Message:
        """The inner ask."""
        return self.inner.ask(state, client, round)

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """The inner method on mixtures."""
        if self.alpha:
            shares, partners = me.rng.numpy("mixup shares"), me.rng.torch("mixup partners")
            me = replace(me, loss=mixture(self.alpha, shares, partners))
        return self.inner.client(ask, me)

    def server(self, state: Any, replies: Mapping[int, Message]) -> Any:
        """The inner server."""
        return self.inner.server(state, replies)


def mixture(alpha: float, shares: np.random.Generator, partners: torch.Generator) -> Loss:
    """The mean over a batch of the loss above; one share and one order of partners a batch."""

    def loss(net, batch):
        lam = shares.beta(alpha, alpha)
        other = torch.randperm(len(batch.y), generator=partners).to(batch.y.device)
        logits = net(lam * batch.x + (1 - lam) * batch.x[other])
        own, partner = (F.cross_entropy(logits, y) for y in (batch.y, batch.y[other]))
        return lam * own + (1 - lam) * partner

    return loss
