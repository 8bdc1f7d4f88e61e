"""Fed-ZDAS: the server trains the average on images that it made of the average alone.

Hao et al., CVPR Workshops 2021. The images are made in `feddpms.synthesis.inversion`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.models import rebuilt
from feddpms.rng import Rng
from feddpms.synthesis import Inversion, fine_tune, invert, require_inversion, warm_up
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Tuned:
    """The inner state, what everybody knows, the server's random streams, and rounds done."""

    inner: Any
    task: Task
    rng: Rng
    rounds: int = 0

    @property
    def model(self) -> Tree:
        """The global model."""
        return self.inner.model


@settings
class Zdas:
    """A training method whose average is fine-tuned on images made of it."""

    about: ClassVar[About] = About("data", "Hao et al., CVPRW 2021", per_example=False)

    inner: Chosen = FedAvg()
    """the training method"""
    warm_up: Annotated[int, Ge(0)] = 0
    """rounds before the first images; 0 takes a fifth of all rounds"""
    per_class: Annotated[int, Ge(1), Le(100_000)] = 10
    """images of each class"""
    steps: Annotated[int, Ge(0)] = 5
    """steps of fine-tuning after each round; 0 is the inner method"""
    lr: Annotated[float, Gt(0)] = 1e-4
    """learning rate of fine-tuning"""
    inversion: Inversion = Inversion()
    """how images are made"""

    def start(self, model: Tree, task: Task) -> Tuned:
        """The inner state; the initial weights, which follow from the run's seed, stand for it."""
        require_training("zdas", self.inner, whole=True)
        require_inversion("zdas", model, self.warm_up, task)
        rebuilt(task, model)  # complains if the server could not build the network
        seed = Rng(0).number("server", str([v.tolist() for v in model.values()]))
        return Tuned(self.inner.start(model, task), task, Rng(seed))

    def ask(self, state: Tuned, client: int, round: int) -> Message:
        """As the inner method."""
        return self.inner.ask(state.inner, client, round)

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """As the inner method."""
        return self.inner.client(ask, me)

    def server(self, state: Tuned, replies: Mapping[int, Message]) -> Tuned:
        """Aggregate as the inner method does; then make images, and train on them."""
        inner, number, task = self.inner.server(state.inner, replies), state.rounds + 1, state.task
        if number > warm_up(self.warm_up, task) and self.steps and task.network:
            net, draws = rebuilt(task, inner.model), state.rng.torch("inversion", number)
            labels = torch.arange(task.classes).repeat_interleave(self.per_class)
            made = invert(net, labels, task.network.shape, self.inversion, draws)
            fine_tune(net, made, self.steps, self.lr)
            inner = replace(inner, model={k: net.state_dict()[k] for k in inner.model})
        return replace(state, inner=inner, rounds=number)
