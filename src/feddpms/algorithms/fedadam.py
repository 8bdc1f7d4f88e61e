"""FedAdam: Adam at the server, on the mean of the clients' updates.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2; the step itself is in
`adaptive`. Second moment: v <- b2 v + (1 - b2) d^2.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from feddpms.algorithms.adaptive import Adaptive, begin, step
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.trees import average
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class FedAdam:
    """FedAvg whose server takes Adam's step."""

    about: ClassVar[About] = About(
        "aggregation", "Reddi et al., ICLR 2021", server_state="two moments"
    )

    server_lr: Annotated[float, Gt(0)] = 0.01
    """size of the server's step"""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """share of the old first moment"""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """share of the old second moment"""
    tau: Annotated[float, Gt(0)] = 1e-3
    """added to the root of the second moment, which starts at its square"""

    def start(self, model: Tree, task: Task) -> Adaptive:
        """The initial model and moments."""
        return begin(model, self.tau)

    def ask(self, state: Adaptive, client: int, round: int) -> Message:
        """The global model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train from the global model, as FedAvg."""
        return fit(me, ask.trees["model"]).reply(me), me.memory

    def server(self, state: Adaptive, replies: Mapping[int, Message]) -> Adaptive:
        """A step along the mean update."""

        def square(v, dd):
            return self.beta2 * v + (1 - self.beta2) * dd

        mean = average(replies)
        return step(state, mean, square, self.server_lr, self.beta1, self.tau)
