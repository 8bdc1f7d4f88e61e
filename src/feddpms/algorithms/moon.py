"""MOON: keep a sample's representation near the global model's, away from the previous local one's.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, equation 3:
l_con = -log( exp(cos(z, z_g)/t) / (exp(cos(z, z_g)/t) + exp(cos(z, z_p)/t)) ), written here as
softplus((cos(z, z_p) - cos(z, z_g)) / t), which is the same and does not overflow.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from feddpms.algorithms.batches import examples
from feddpms.algorithms.fit import fit, frozen
from feddpms.algorithms.method import About, Client, State
from feddpms.algorithms.trees import average
from feddpms.types import Loss, Memory, Message, Task, Tree, settings


@settings
class Moon:
    """FedAvg with a model-contrastive term in the local loss."""

    about: ClassVar[About] = About(
        "drift", "Li, He, Song, CVPR 2021", client_state="its last local model"
    )

    mu: Annotated[float, Ge(0)] = 1.0
    """weight of the contrastive term"""
    temperature: Annotated[float, Gt(0)] = 0.5
    """t in the equation"""

    def start(self, model: Tree, task: Task) -> State:
        """The initial model."""
        return State(model)

    def ask(self, state: State, client: int, round: int) -> Message:
        """The global model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train with the contrastive term, from the second participation on."""
        start, previous = ask.trees["model"], me.memory.trees.get("previous")
        loss = me.loss
        if previous and self.mu:
            # Both models stand still for the whole round, so each sees every example once.
            z_g, z_p = (representations(me, tree) for tree in (start, previous))
            loss = contrastive(me.loss, z_g, z_p, self.mu, self.temperature)
        fitted = fit(me, start, loss)
        return fitted.reply(me), Memory(trees={"previous": fitted.tree})

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        """Average by n_i, as FedAvg."""
        return State(average(replies))


def representations(me: Client, tree: Tree) -> Tensor:
    """Representation of each of the client's examples under a frozen model [n, d].

    Own and synthetic examples apart, so that how many own ones there are does not show in the last
    bits of the others.
    """
    net = frozen(me.net, tree)
    parts = examples(me)[0].tensor_split([len(me.shard)])
    with torch.no_grad():
        return torch.cat([net.features(x) for part in parts for x in part.split(500)])  # pyright: ignore


def contrastive(base: Loss, z_g: Tensor, z_p: Tensor, mu: float, temperature: float) -> Loss:
    """Base loss + mu * mean of l_con over the batch; `z_g`, `z_p` are constants [n, d]."""

    def loss(net, batch):
        z, i = net.features(batch.x), batch.index
        gap = F.cosine_similarity(z, z_p[i]) - F.cosine_similarity(z, z_g[i])
        return base(net, batch) + mu * F.softplus(gap / temperature).mean()

    return loss
