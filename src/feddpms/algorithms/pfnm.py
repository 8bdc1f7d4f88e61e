"""PFNM: match the clients' neurons, whatever their order, before they are averaged.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, "Bayesian Nonparametric Federated Learning
of Neural Networks", ICML 2019. The matching is in `neurons`, the average in `merging`.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from feddpms.algorithms.chain import part, require_chain
from feddpms.algorithms.fit import fit
from feddpms.algorithms.merging import Matched, merge, unmatched, with_counts
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.neurons import Prior
from feddpms.errors import ConfigError
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class PFNM:
    """Average of matched neurons, for fully connected networks."""

    about: ClassVar[About] = About(
        "aggregation",
        "Yurochkin et al., ICML 2019",
        extra="class counts",
        server_state="matches, a wider model",
        whole=False,
    )

    prior: Prior = Prior()
    """how neurons are matched"""
    posterior: Literal["mean", "map"] = "mean"
    """a global neuron is the mean of those matched to it, or (the paper) its most likely value,
    which is nearer to 0"""

    def start(self, model: Tree, task: Task) -> Matched:
        """The initial model."""
        require_chain("pfnm", model)
        if any(value.ndim > 2 for value in model.values()):
            raise ConfigError(
                "pfnm matches neurons of fully connected layers, got convolutions; "
                "set net.kind=mlp, or take fedma"
            )
        return unmatched(model)

    def ask(self, state: Matched, client: int, round: int) -> Message:
        """The client's own neurons of the global model."""
        return Message("train", {"model": part(state.shared, state.held(client))})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train from there; class counts go along."""
        return with_counts(fit(me, ask.trees["model"]).reply(me), me), me.memory

    def server(self, state: Matched, replies: Mapping[int, Message]) -> Matched:
        """Match all layers anew, and average."""
        return merge(state, replies, self.prior, shrink=self.posterior == "map")
