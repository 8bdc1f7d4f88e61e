"""FedDyn: a linear term that each client learns makes its optimum agree with the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021: theta_k = argmin L_k(theta) - <lam_k, theta> + (alpha/2) |theta - w|^2;
lam_k <- lam_k - alpha (theta_k - w); h <- h - (alpha/N) sum_k (theta_k - w);
w <- mean_k theta_k - h / alpha.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from feddpms.algorithms.correction import Correction, WithAdam, steered
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.trees import average, zeros
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Dual:
    """The mean of the last models, h (the mean of all clients' lam), and their number N."""

    model: Tree
    h: Tree
    clients: int


@settings
class FedDyn:
    """FedAvg with dynamic regularisation."""

    about: ClassVar[About] = About(
        "drift",
        "Acar et al., ICLR 2021",
        client_state="its dual variable",
        server_state="the mean dual variable",
    )

    alpha: Annotated[float, Gt(0)] = 0.01
    """strength of the regularisation"""
    with_adam: WithAdam = "refuse"
    """what to do where clients train with Adam: refuse, or correct after its step (`decoupled`)"""

    def start(self, model: Tree, task: Task) -> Dual:
        """All dual variables are zero."""
        return Dual(model, zeros(steered(model)), task.clients)

    def ask(self, state: Dual, client: int, round: int) -> Message:
        """Where to start: the mean of the models, less h / alpha."""
        return Message("train", {"model": self._sent(state)})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train on the regularised loss; renew the dual variable."""
        start = ask.trees["model"]
        centre = steered(start)
        own = me.memory.trees.get("dual") or zeros(centre)
        drift, decoupled = {k: -v for k, v in own.items()}, me.local.optimizer == "adam"
        fitted = fit(me, start, correction=Correction(drift, centre, self.alpha, decoupled))
        own = {k: own[k] - self.alpha * (fitted.tree[k] - w) for k, w in centre.items()}
        return fitted.reply(me), Memory({"dual": own})

    def server(self, state: Dual, replies: Mapping[int, Message]) -> Dual:
        """The clients' mean; h moves by alpha/N for each client that replied."""
        sent, h = self._sent(state), dict(state.h)
        for _, reply in sorted(replies.items()):
            for k, v in reply.trees["model"].items():
                if k in h:
                    h[k] = h[k] - self.alpha / state.clients * (v - sent[k])
        return Dual(average(replies, "uniform"), h, state.clients)

    def _sent(self, state: Dual) -> Tree:
        """w; statistics of batch norm are no weights and are not extrapolated."""
        return state.model | {k: state.model[k] - h / self.alpha for k, h in state.h.items()}
