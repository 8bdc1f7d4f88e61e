"""FedProx: a pull towards the weights that the client received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020: min_y L_i(y) + (mu/2) ||y - w||^2.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from feddpms.algorithms.fit import Penalty, fit
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
        return fit(me, start, penalty=proximal(start, self.mu)).reply(me), me.memory

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        """Average by n_i, as FedAvg."""
        return State(average(replies))


def proximal(centre: Tree, mu: float) -> Penalty | None:
    """(mu/2) squared distance of the parameters (buffers left out) to `centre`; None for mu 0."""
    if mu == 0:
        return None

    def penalty(net):
        near = [(p, centre[k]) for k, p in net.named_parameters() if k in centre]
        return mu / 2 * torch.stack([(p - w).square().sum() for p, w in near]).sum()

    return penalty
