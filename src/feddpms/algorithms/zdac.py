"""Fed-ZDAC: train on images, made of the global model alone, of the classes that a client lacks.

Hao et al., CVPR Workshops 2021. The images are made in `feddpms.synthesis.inversion`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.fit import load
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.synthesis import Inversion, invert, require_inversion, scarce, warm_up
from feddpms.types import Memory, Message, Shard, Task, Tree, settings


@settings
class Zdac:
    """A training method on own examples and images made of the global model."""

    about: ClassVar[About] = About(
        "data", "Hao et al., CVPRW 2021", client_state="synthetic examples", per_example=False
    )

    inner: Chosen = FedAvg()
    """the training method"""
    warm_up: Annotated[int, Ge(0)] = 0
    """rounds before the first images; 0 takes a fifth of all rounds"""
    period: Annotated[int, Ge(1)] = 5
    """rounds after which a client makes its images anew, of the model of the day"""
    per_class: Annotated[int, Ge(0), Le(100_000)] = 20
    """images of each lacking class, at the most; 0 is the inner method"""
    scarce_below: Annotated[float, Gt(0)] = 0.5
    """a class is lacking if the client's count is under this fraction of its mean count"""
    weight: Annotated[float, Gt(0)] = 1.0
    """weight of an image in the loss"""
    inversion: Inversion = Inversion()
    """how images are made"""

    def start(self, model: Tree, task: Task) -> Any:
        """The inner state."""
        require_training("zdac", self.inner)
        require_inversion("zdac", model, self.warm_up, task)
        return self.inner.start(model, task)

    def ask(self, state: Any, client: int, round: int) -> Message:
        """As the inner method: what is needed besides is in the model."""
        return self.inner.ask(state, client, round)

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Make images when they are due; train on them as well."""
        kept = me.memory
        if self._due(me):
            made = {"made": {"round": torch.tensor(me.round)}}
            kept = Memory(made, self._images(ask.trees["model"], me), kept.inner)
        inner = replace(me, memory=kept.inner or Memory(), synthetic=kept.synthetic)
        reply, memory = self.inner.client(ask, inner)
        return reply, replace(kept, inner=memory)

    def _due(self, me: Client) -> bool:
        """Whether the client has no images yet, or old ones."""
        if me.round <= warm_up(self.warm_up, me.task):
            return False
        made = me.memory.trees.get("made")
        return made is None or me.round - int(made["round"]) >= self.period

    def _images(self, model: Tree, me: Client) -> Shard:
        """Images of the classes that the client lacks."""
        labels = scarce(me.shard.y, me.task.classes, self.scarce_below, self.per_class)
        net, draws = load(me.net, model), me.rng.torch("inversion")
        made = invert(net, labels, me.shard.x.shape[1:], self.inversion, draws)
        return replace(made, weight=self.weight)

    def server(self, state: Any, replies: Mapping[int, Message]) -> Any:
        """As the inner method."""
        return self.inner.server(state, replies)
