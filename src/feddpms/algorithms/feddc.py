"""FedDC: each client learns how far it drifts, and the server adds the drift back.

Gao, Fu, Li, Chen, Xu, Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling
and Correction", CVPR 2022: a client minimises L_i(theta) + (alpha/2) ||theta + h_i - w||^2 with
SCAFFOLD's correction c - c_i of the gradient; then h_i <- h_i + theta_i - w and
w <- mean_i theta_i + (1/N) sum_i h_i.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from feddpms.algorithms.correction import Correction, WithAdam, effective_steps, steered
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.trees import average, zeros
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Drifting:
    """The mean of the last models, means over all N clients of h_i and c_i, and N."""

    model: Tree
    drift: Tree
    control: Tree
    clients: int


@settings
class FedDC:
    """FedAvg with learned drifts."""

    about: ClassVar[About] = About(
        "drift", "Gao et al., CVPR 2022", "control down", "drift and control", "mean drift, control"
    )

    alpha: Annotated[float, Ge(0)] = 0.01
    """strength of the pull of theta + h_i towards w"""
    with_adam: WithAdam = "refuse"
    """what to do where clients train with Adam: refuse, or correct after its step (`decoupled`)"""

    def start(self, model: Tree, task: Task) -> Drifting:
        """No drift, no control."""
        none = zeros(steered(model))
        return Drifting(model, none, none, task.clients)

    def ask(self, state: Drifting, client: int, round: int) -> Message:
        """Where to start, and the global control."""
        return Message("train", {"model": _sent(state), "control": state.control})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train towards w - h_i with the corrected gradient; renew drift and control."""
        w, control = ask.trees["model"], ask.trees["control"]
        h, own = (me.memory.trees.get(k) or zeros(control) for k in ("drift", "control"))
        drift, centre = {k: c - own[k] for k, c in control.items()}, {k: w[k] - h[k] for k in h}
        by = Correction(drift, centre, self.alpha, decoupled=me.local.optimizer == "adam")
        fitted = fit(me, w, correction=by)
        path = me.lr * effective_steps(me.local, fitted.steps)
        own = {k: (w[k] - fitted.tree[k]) / path - d for k, d in drift.items()}
        h = {k: h[k] + fitted.tree[k] - w[k] for k in h}
        return fitted.reply(me, path_length=path), Memory({"drift": h, "control": own})

    def server(self, state: Drifting, replies: Mapping[int, Message]) -> Drifting:
        """The clients' mean; mean drift and control move by 1/N for each client that replied."""
        sent, drift, control = _sent(state), dict(state.drift), dict(state.control)
        for _, reply in sorted(replies.items()):
            for k, c in state.control.items():
                moved = reply.trees["model"][k] - sent[k]
                drift[k] = drift[k] + moved / state.clients
                change = -moved / reply.numbers["path_length"] - c
                control[k] = control[k] + change / state.clients
        return Drifting(average(replies, "uniform"), drift, control, state.clients)


def _sent(state: Drifting) -> Tree:
    """w; statistics of batch norm are no weights and do not drift."""
    return state.model | {k: state.model[k] + h for k, h in state.drift.items()}
