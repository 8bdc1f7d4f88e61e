"""SCAFFOLD: each local step is corrected by what the client's own gradients lack or have too much.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, algorithm 1 with option II: y <- y - eta (g + c - c_i); then
c_i <- c_i - c + (w - y) / (K eta), w <- w + eta_g mean (y - w), c <- c + (1/N) sum (change in c_i).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from feddpms.algorithms.correction import Correction, WithAdam, effective_steps, steered
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.trees import average, toward, zeros
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Controlled:
    """The global model w, its control c (the mean of all clients' c_i), and their number N."""

    model: Tree
    control: Tree
    clients: int


@settings
class Scaffold:
    """FedAvg with control variates."""

    about: ClassVar[About] = About(
        "drift",
        "Karimireddy et al., ICML 2020",
        extra="control down",
        client_state="its control",
        server_state="the global control",
    )

    server_lr: Annotated[float, Gt(0)] = 1.0
    """eta_g, step of the server towards the clients' mean"""
    weighting: Literal["uniform", "samples"] = "uniform"
    """of the clients in that mean; the paper's is uniform"""
    with_adam: WithAdam = "refuse"
    """what to do where clients train with Adam: refuse, or correct after its step (`decoupled`)"""

    def start(self, model: Tree, task: Task) -> Controlled:
        """All controls are zero."""
        return Controlled(model, zeros(steered(model)), task.clients)

    def ask(self, state: Controlled, client: int, round: int) -> Message:
        """The global model and the global control."""
        return Message("train", {"model": state.model, "control": state.control})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train with the corrected gradient; renew the own control."""
        start, control = ask.trees["model"], ask.trees["control"]
        own = me.memory.trees.get("control") or zeros(control)
        drift = {k: c - own[k] for k, c in control.items()}
        decoupled = me.local.optimizer == "adam"
        fitted = fit(me, start, correction=Correction(drift, decoupled=decoupled))
        path = me.lr * effective_steps(me.local, fitted.steps)
        own = {k: (start[k] - fitted.tree[k]) / path - d for k, d in drift.items()}
        return fitted.reply(me, path_length=path), Memory({"control": own})

    def server(self, state: Controlled, replies: Mapping[int, Message]) -> Controlled:
        """Step towards the clients' mean; c moves by 1/N of each change, which y itself tells."""
        control = dict(state.control)
        for _, reply in sorted(replies.items()):
            share, model = 1 / state.clients, reply.trees["model"]
            for k, c in state.control.items():
                change = (state.model[k] - model[k]) / reply.numbers["path_length"] - c
                control[k] = control[k] + share * change
        mean = average(replies, self.weighting)
        return Controlled(toward(state.model, mean, self.server_lr), control, state.clients)
