"""FedMA: match and average a network layer by layer; what is matched stands still.

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated Learning with Matched Averaging", ICLR
2020. With L layers, L rounds are a cycle: after the l-th, layers 1 to l stand still at the clients,
who go on training their own others; after the L-th, all begin anew from the matched model. The
matching is in `neurons`, the average in `merging`.
"""

from collections.abc import Mapping
from typing import ClassVar

from feddpms.algorithms.chain import layers, part, require_chain
from feddpms.algorithms.fit import fit, load
from feddpms.algorithms.merging import Matched, merge, unmatched, with_counts
from feddpms.algorithms.method import About, Client
from feddpms.algorithms.neurons import Prior
from feddpms.algorithms.trees import BUFFERS
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class FedMA:
    """Matched averaging, layer by layer."""

    about: ClassVar[About] = About(
        "aggregation",
        "Wang et al., ICLR 2020",
        extra="class counts; layers, not all",
        client_state="its model",
        server_state="matches, a wider model",
        whole=False,
    )

    prior: Prior = Prior()
    """how channels and neurons are matched"""

    def start(self, model: Tree, task: Task) -> Matched:
        """The initial model."""
        require_chain("fedma", model)
        return unmatched(model)

    def ask(self, state: Matched, client: int, round: int) -> Message:
        """The client's part: all of it at first, then the layer that was matched last."""
        own, names = part(state.shared, state.held(client)), layers(state.shared)
        if state.frozen and client in state.places:
            still = [k for keys in names[: state.frozen] for k in keys]
            last = names[state.frozen - 1]
            own = {k: own[k] for k in still if k in last or k.endswith(BUFFERS)}
        return Message("train", {"model": own}, {"frozen": state.frozen})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Train the layers that do not stand still; batch-norm statistics go on in all."""
        start = {**me.memory.trees.get("model", {}), **ask.trees["model"]}
        names = layers(start)[: int(ask.numbers["frozen"])]
        still = {k for keys in names for k in keys if not k.endswith(BUFFERS)}
        load(me.net, start)
        fitted = fit(me, {k: v for k, v in start.items() if k not in still})
        memory = Memory({"model": {**start, **fitted.tree}})
        return with_counts(fitted.reply(me), me), memory

    def server(self, state: Matched, replies: Mapping[int, Message]) -> Matched:
        """Match the next layer for good, and those behind it for the model that is scored."""
        frozen = (state.frozen + 1) % len(layers(state.model))
        return merge(state, replies, self.prior, frozen)
