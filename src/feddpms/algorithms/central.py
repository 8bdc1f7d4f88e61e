"""Central training on the pooled data: the ceiling, for which nobody keeps anything private.

The engine gives this method one client that holds every client's examples. It trains for the same
number of epochs a round, with the same optimiser made anew each round.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import About, Client, State
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class Central:
    """One model on all the data."""

    about: ClassVar[About] = About("bound", "pooled data", "the data themselves", scope="pooled")

    def start(self, model: Tree, task: Task) -> State:
        """The initial model."""
        return State(model)

    def ask(self, state: State, client: int, round: int) -> Message:
        """The model."""
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train on; the records themselves are what was sent."""
        reply = fit(me, ask.trees["model"]).reply(me)
        return replace(reply, events=reply.events + me.clear("the records themselves")), me.memory

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        """Take the one reply."""
        (reply,) = replies.values()
        return State(dict(reply.trees["model"]))
