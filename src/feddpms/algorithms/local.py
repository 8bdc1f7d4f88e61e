"""Local training: no exchange; the floor that a federated method must beat.

Each client trains its own model from the common initial weights. What is measured is the mean over
the clients of their models' accuracy on the common test set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Started:
    """The initial model, and the clients that have it."""

    model: Tree
    clients: frozenset[int] = frozenset()


@settings
class Local:
    """Every client for itself."""

    about: ClassVar[About] = About(
        "bound", "no exchange", "one model less", client_state="its model", scope="local"
    )

    def start(self, model: Tree, task: Task) -> Started:
        """The initial model."""
        return Started(model)

    def ask(self, state: Started, client: int, round: int) -> Message:
        """The initial model, the first time only."""
        return Message("train", {} if client in state.clients else {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Go on with the client's own model; nothing that was computed from the data leaves."""
        start = me.memory.trees.get("model") or ask.trees["model"]
        return Message("train"), Memory(trees={"model": fit(me, start).tree})

    def server(self, state: Started, replies: Mapping[int, Message]) -> Started:
        """Remember who has started."""
        return Started(state.model, state.clients | set(replies))
