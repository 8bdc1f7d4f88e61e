"""FedNova: average how far clients went per step, so that more local steps do not pull harder.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020: w <- w - tau_eff sum_i p_i (w - y_i) / ||a_i||_1 with
tau_eff = sum_i p_i ||a_i||_1, where a_i holds the weights of the local gradients in w - y_i.
"""

from collections.abc import Mapping
from typing import ClassVar

from feddpms.algorithms.correction import WithAdam, effective_steps
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client, State
from feddpms.algorithms.trees import average, trained
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class FedNova:
    """Mean of the clients' updates, each divided by its effective number of steps."""

    about: ClassVar[About] = About("aggregation", "Wang et al., NeurIPS 2020", extra="a number up")

    with_adam: WithAdam = "refuse"
    """what to do where clients train with Adam, whose ||a_i||_1 is not defined: refuse, or count
    each of its steps as one (`decoupled`)"""

    def start(self, model: Tree, task: Task) -> State:
        """The initial model."""
        return State(model)

    def ask(self, state: State, client: int, round: int) -> Message:
        """The global model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train as in FedAvg, and count what the steps amount to, momentum included."""
        fitted = fit(me, ask.trees["model"])
        path = effective_steps(me.local, fitted.steps)
        return fitted.reply(me, path_length=path), me.memory

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        """FedAvg's mean, and what normalising adds: sum p_i (tau_eff / ||a_i||_1 - 1) (y_i - w).

        So it is FedAvg, bit for bit, where all ||a_i||_1 are equal. Buffers are averaged.
        """
        ordered = [replies[c] for c in sorted(replies)]
        total = sum(r.numbers["examples"] for r in ordered)
        steps = [(r.numbers["examples"] / total, r.numbers["path_length"]) for r in ordered]
        model = average(replies)
        for reply, (p, a) in zip(ordered, steps, strict=True):
            excess = p * sum(q * (b - a) for q, b in steps) / a
            for k, w in trained(state.model).items():
                model[k] = model[k] + excess * (reply.trees["model"][k] - w)
        return State(model)
