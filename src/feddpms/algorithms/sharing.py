"""Sharing: clients complete their examples with real ones that others send in the clear.

Zhao, Li, Lai, Suda, Civin, Chandra, 2018. Who draws what is in `feddpms.synthesis.sharing`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.synthesis import Pool, candidates, completed, preliminary_rounds, shared, wanted
from feddpms.types import Memory, Message, Shard, Task, Tree, settings


@settings
class Sharing:
    """A training method on examples completed with other clients' real ones."""

    about: ClassVar[About] = About(
        "data", "Zhao et al., 2018", "examples once", "examples", "examples", per_example=False
    )

    inner: Chosen = FedAvg()
    """the training method"""
    preliminary_rounds: Annotated[int, Ge(0)] = 0
    """rounds of the training method alone; 0 takes 40 % of all rounds, as FedDPMS does"""
    per_class: Annotated[int, Ge(0), Le(100_000)] = 100
    """examples of a class that a client sends, and draws, at the most; 0 is the inner method"""
    scarce_below: Annotated[float, Gt(0)] = 0.5
    """a class is lacking if the client's count is under this fraction of its mean count"""
    weight: Annotated[float, Gt(0)] = 1.0
    """weight of another client's example in the loss"""

    def start(self, model: Tree, task: Task) -> Pool:
        """The inner state; nothing is shared."""
        require_training("sharing", self.inner)
        left = preliminary_rounds(self.preliminary_rounds, task)
        return Pool(self.inner.start(model, task), left)

    def ask(self, state: Pool, client: int, round: int) -> Message:
        """After the preliminary rounds to share once; to train, with new candidates if any."""
        if state.left or not self.per_class:
            return Message("train", inner=self.inner.ask(state.inner, client, round))
        if client not in state.bank:
            return Message("share")
        found = candidates(state, client, self.scarce_below, self.per_class)
        return Message("train", {"new": found}, inner=self.inner.ask(state.inner, client, round))

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Share; or train on own examples and those of others, drawn when there are new ones."""
        if ask.inner is None:
            sent = shared(me.shard, me.task.classes, self.per_class, me.rng.torch("shared"))
            events = me.clear("real examples", "class counts")
            return Message("share", {"shared": sent}, {}, events), me.memory
        need = wanted(me.shard.y, me.task.classes, self.scarce_below, self.per_class)
        before, found = me.memory.trees.get("others", {}), ask.trees.get("new", {})
        held = completed(before, found, need, me.rng.torch("drawn"))
        extra = Shard(held["x"], held["y"], self.weight) if held else None
        inner = replace(me, memory=me.memory.inner or Memory(), synthetic=extra)
        reply, memory = self.inner.client(ask.inner, inner)
        drawn = len(held.get("y", ())) - len(before.get("y", ()))  # follows from what is clear
        numbers = {"shared_drawn": drawn} if found else {}
        # Real examples are no `Memory.synthetic`, which the report shows as what a method made.
        kept = Memory({"others": held} if held else {}, inner=memory)
        return Message("train", numbers=numbers, inner=reply), kept

    def server(self, state: Pool, replies: Mapping[int, Message]) -> Pool:
        """Keep what was shared, or hand the inner replies to the inner method."""
        new = {c: r.trees["shared"] for c, r in replies.items() if r.kind == "share"}
        if new:
            return replace(state, bank={**state.bank, **new})
        inner = self.inner.server(state.inner, {c: r.inner for c, r in replies.items() if r.inner})
        sent = {**state.sent, **dict.fromkeys(replies, frozenset(state.bank))}
        return Pool(inner, max(0, state.left - 1), state.bank, sent)
