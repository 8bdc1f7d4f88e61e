"""FedAvgM: momentum at the server, on the mean of the clients' updates.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335: with d = sum_i p_i y_i - w, v <- b v + d and w <- w + s v.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.trees import average, toward, trained, zeros
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Rolling:
    """The global model, and v of its trained entries."""

    model: Tree
    velocity: Tree


@settings
class FedAvgM:
    """FedAvg with momentum at the server."""

    about: ClassVar[About] = About(
        "aggregation", "Hsu, Qi, Brown, arXiv 1909.06335", server_state="a velocity"
    )

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """b in the equation"""
    server_lr: Annotated[float, Gt(0)] = 1.0
    """s in the equation"""

    def start(self, model: Tree, task: Task) -> Rolling:
        """The initial model, at rest."""
        return Rolling(model, zeros(trained(model)))

    def ask(self, state: Rolling, client: int, round: int) -> Message:
        """The global model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train from the global model, as FedAvg."""
        return fit(me, ask.trees["model"]).reply(me), me.memory

    def server(self, state: Rolling, replies: Mapping[int, Message]) -> Rolling:
        """The average, and what rate and momentum add to it; statistics are averaged alone.

        w + s v is a step `toward` the average and s b v, so rate 1 without momentum adds zeros.
        """
        mean = average(replies)
        model, velocity = toward(state.model, mean, self.server_lr), {}
        for k, rolling in state.velocity.items():
            carried = self.momentum * rolling
            velocity[k] = carried + (mean[k] - state.model[k])
            model[k] = model[k] + self.server_lr * carried
        return Rolling(model, velocity)
