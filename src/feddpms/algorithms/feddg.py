"""FedDG: train on one's own images in the styles of other clients as well.

Liu, Chen, Qin, Dou, Heng, CVPR 2021. Spectra and loss are in `feddpms.synthesis.spectrum`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.synthesis import pooled, require_window, spectra, styled
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Styles:
    """The inner state, every client's amplitudes, and how many contributors each client knows."""

    inner: Any
    bank: Mapping[int, Tree] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)

    @property
    def model(self) -> Tree:
        """The global model."""
        return self.inner.model


@settings
class FedDG:
    """A training method on examples, and on the same examples in other clients' styles."""

    about: ClassVar[About] = About(
        "data", "Liu et al., CVPR 2021", "spectra once", "spectra", "spectra", per_example=False
    )

    inner: Chosen = FedAvg()
    """the training method"""
    window: Annotated[float, Ge(0), Lt(0.5)] = 0.1
    """L: half-width of the window over the image's shorter side; below one pixel, the mean alone"""
    share: Annotated[float, Gt(0), Le(1)] = 0.125
    """share of a client's images whose amplitudes it sends, at least of one"""
    weight: Annotated[float, Ge(0)] = 1.0
    """weight of the loss in other styles; 0 is the inner method"""

    def start(self, model: Tree, task: Task) -> Styles:
        """The inner state and an empty bank; complains if the window covers the images."""
        require_training("feddg", self.inner)
        require_window(task, self.window)
        return Styles(self.inner.start(model, task))

    def ask(self, state: Styles, client: int, round: int) -> Message:
        """The amplitudes once; then to train, with the others' whenever there are more."""
        if client not in state.bank:
            return Message("share")
        others = {c: tree for c, tree in state.bank.items() if c != client}
        trees = {"bank": pooled(others)} if state.sent.get(client, 1) < len(state.bank) else {}
        return Message("train", trees, inner=self.inner.ask(state.inner, client, round))

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Send amplitudes of some images, or train in two styles; in one while nobody else sent."""
        if ask.inner is None:
            sent = spectra(me.shard, self.share, self.window, me.rng.torch("spectra"))
            return Message("share", {"bank": sent}, {}, me.clear("amplitude spectra")), me.memory
        kept = {**me.memory.trees, **ask.trees}
        loss = styled(me.loss, kept.get("bank"), self.weight, me.rng.torch("styles"))
        inner = replace(me, loss=loss, memory=me.memory.inner or Memory())
        reply, memory = self.inner.client(ask.inner, inner)
        return Message("train", inner=reply), Memory(kept, inner=memory)

    def server(self, state: Styles, replies: Mapping[int, Message]) -> Styles:
        """Extend the bank, or hand the inner replies to the inner method."""
        shared = {c: r.trees["bank"] for c, r in replies.items() if r.kind == "share"}
        if shared:
            return replace(state, bank={**state.bank, **shared})
        inner = self.inner.server(state.inner, {c: r.inner for c, r in replies.items() if r.inner})
        return Styles(inner, state.bank, {**state.sent, **dict.fromkeys(replies, len(state.bank))})
