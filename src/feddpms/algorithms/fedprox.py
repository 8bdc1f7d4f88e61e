"""FedProx: a pull towards the weights that the client received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020: min_y L_i(y) + (mu/2) ||y - w||^2.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge

from feddpms.algorithms.correction import Correction, steered
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client, State
from feddpms.algorithms.trees import average
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class FedProx:
    """FedAvg with a proximal term in the local loss."""

    about: ClassVar[About] = About("drift", "Li et al., MLSys 2020")

    mu: Annotated[float, Ge(0)] = 0.01
    """weight of the proximal term, applied once, to the squared distance"""

    def start(self, model: Tree, task: Task) -> State:
        """The initial model."""
        return State(model)

    def ask(self, state: State, client: int, round: int) -> Message:
        """The global model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train with the pull towards the global model."""
        start = ask.trees["model"]
        pull = Correction(centre=steered(start), pull=self.mu) if self.mu else None
        return fit(me, start, correction=pull).reply(me), me.memory

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        """Average by n_i, as FedAvg."""
        return State(average(replies))
