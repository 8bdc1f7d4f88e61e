"""FedMix: mix a client's examples with other clients' averaged examples, to first order.

Yoon, Shin, Hwang, Yang, ICLR 2021. The averages and the loss are in `feddpms.synthesis.mixing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Lt

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.synthesis import averages, mixed, pooled
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Mixing:
    """The inner state, every client's averages, and how many contributors each client knows of."""

    inner: Any
    pool: Mapping[int, Tree] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)

    @property
    def model(self) -> Tree:
        """The global model."""
        return self.inner.model


@settings
class FedMix:
    """A training method on examples mixed with other clients' averages."""

    about: ClassVar[About] = About(
        "data", "Yoon et al., ICLR 2021", "averages once", "averages", "averages", per_example=False
    )

    inner: Chosen = FedAvg()
    """the training method"""
    lam: Annotated[float, Ge(0), Lt(1)] = 0.05
    """share of the other clients' average in a mixture"""
    group_size: Annotated[int, Ge(1)] = 64
    """examples in an average, at the least; a client with fewer sends one average of all"""
    bounded: bool = True
    """keep an example's approximate mixed loss from falling below 0; the paper does not"""

    def start(self, model: Tree, task: Task) -> Mixing:
        """The inner state and an empty pool."""
        require_training("fedmix", self.inner)
        return Mixing(self.inner.start(model, task))

    def ask(self, state: Mixing, client: int, round: int) -> Message:
        """The averages once; then to train, with the pool whenever it has grown."""
        if client not in state.pool:
            return Message("share")
        trees = {} if state.sent.get(client) == len(state.pool) else {"pool": pooled(state.pool)}
        return Message("train", trees, inner=self.inner.ask(state.inner, client, round))

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Average groups of examples, or train on mixtures."""
        if ask.kind == "share" or ask.inner is None:
            sent = averages(me.shard, me.task.classes, self.group_size, me.rng.torch("groups"))
            events = me.clear("averaged images")
            return Message("share", {"averages": sent}, {}, events), me.memory
        pool = ask.trees.get("pool") or me.memory.trees["pool"]
        draws = me.rng.torch("mixtures")
        loss = mixed(pool, self.lam, self.bounded, draws) if self.lam else me.loss
        inner = replace(me, loss=loss, memory=me.memory.inner or Memory())
        reply, memory = self.inner.client(ask.inner, inner)
        return Message("train", inner=reply), Memory({"pool": pool}, inner=memory)

    def server(self, state: Mixing, replies: Mapping[int, Message]) -> Mixing:
        """Extend the pool, or hand the inner replies to the inner method."""
        shared = {c: r.trees["averages"] for c, r in replies.items() if r.kind == "share"}
        if shared:
            return replace(state, pool={**state.pool, **shared})
        inner = self.inner.server(state.inner, {c: r.inner for c, r in replies.items() if r.inner})
        return Mixing(inner, state.pool, {**state.sent, **dict.fromkeys(replies, len(state.pool))})
