"""FedAvg: train locally, average by the number of examples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, algorithm 1.
"""

from collections.abc import Mapping
from typing import ClassVar

from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client, State
from feddpms.algorithms.trees import average
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class FedAvg:
    """Weighted mean of the clients' models."""

    about: ClassVar[About] = About("aggregation", "McMahan et al., AISTATS 2017")

    def start(self, model: Tree, task: Task) -> State:
        """The initial model."""
        return State(model)

    def ask(self, state: State, client: int, round: int) -> Message:
        """The global model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train from the global model."""
        return fit(me, ask.trees["model"]).reply(me), me.memory

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        """Average by n_i."""
        return State(average(replies))
