"""FedDA: clients exchange what their decoders know of each class, and fill up their examples.

Wen, Wu, Li, Duan, CVPR Workshops 2022; the equations are in `synthesis.knowledge`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from feddpms.algorithms.decoding import fill, learn
from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.models import ConditionalSettings
from feddpms.synthesis import Filling, Guidance, fuse, knowledge_rounds
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Known:
    """The inner state, rounds of knowledge still to come, each client's latest, and it fused."""

    inner: Any
    left: int
    sent: Mapping[int, Tree] = field(default_factory=dict)
    fused: Tree = field(default_factory=dict)

    @property
    def model(self) -> Tree:
        """The global model."""
        return self.inner.model


@settings
class FedDA:
    """A training method on examples completed by each client's own auto-encoder."""

    about: ClassVar[About] = About(
        "data", "Wen et al., CVPRW 2022", "class features", "decoder", "features", per_example=False
    )

    inner: Chosen = FedAvg()
    """the training method"""
    preliminary_rounds: Annotated[int, Ge(0)] = 0
    """rounds of knowledge; 0 takes 20 % of all rounds, at least 2: the first has none to go by"""
    guidance: Guidance = Guidance()
    """how what all know is fused, and how much it weighs"""
    auto_encoder: ConditionalSettings = ConditionalSettings()
    """each client's own"""
    filling: Filling = Filling()
    """how many examples it makes"""

    def start(self, model: Tree, task: Task) -> Known:
        """The inner state; nothing is known."""
        require_training("fedda", self.inner)
        self.auto_encoder.length(task)
        return Known(self.inner.start(model, task), knowledge_rounds(self.preliminary_rounds, task))

    def ask(self, state: Known, client: int, round: int) -> Message:
        """To learn, by what is known; after that to train."""
        if state.left:
            return Message("knowledge", {"fused": state.fused})
        return Message("classify", inner=self.inner.ask(state.inner, client, round))

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Learn; or train on own and decoded examples, which are made once."""
        if ask.inner is None:
            return learn(me, self.auto_encoder, ask.trees["fused"], self.guidance)
        filled = fill(me, self.auto_encoder, self.filling)
        reply, memory = self.inner.client(ask.inner, filled)
        return Message("classify", inner=reply), Memory(synthetic=filled.synthetic, inner=memory)

    def server(self, state: Known, replies: Mapping[int, Message]) -> Known:
        """Fuse what was sent, or hand the inner replies to the inner method."""
        if state.left:
            sent = {**state.sent, **{c: r.trees["knowledge"] for c, r in replies.items()}}
            return Known(state.inner, state.left - 1, sent, fuse(sent, self.guidance))
        inner = self.inner.server(state.inner, {c: r.inner for c, r in replies.items() if r.inner})
        return replace(state, inner=inner)
