"""FedDPMS: synthetic data drawn around the noisy latent class means that each client shares once.

"Federated Learning in Non-IID Settings Aided by Differentially Private Synthetic Data" (arXiv
2206.00686). After preliminary rounds each client shares (`share`); from then on the server trains
the global classifier on codes drawn around the means. By default clients have trained as ever until
then (`classify`), and rest (`rest`). As in the paper, they go on: the preliminary rounds (`vae`)
train an auto-encoder with a classifier, the later ones (`classify`) encoder and classifier on real
examples and those decoded from the means. Network, release, matching and synthesis are in `models`,
`privacy` and `synthesis`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.fit import load
from feddpms.algorithms.method import About, Chosen, Client, require_training
from feddpms.algorithms.trees import mean
from feddpms.models import VaeSettings, split, trunk, vae_loss
from feddpms.privacy import UPDATES
from feddpms.synthesis import (
    Calibration,
    Drawing,
    Matching,
    Release,
    calibrated,
    extend,
    match,
    paper_release,
    preliminary_rounds,
    release,
)
from feddpms.types import Memory, Message, Task, Tree, settings


@dataclass(frozen=True)
class Bank:
    """What the server remembers.

    Attributes:
        task: what everybody knows.
        inner: what the training method remembers.
        decoder: the latest average of the clients' decoders; empty if they train none.
        averages: how often it was averaged.
        holds: which average, by its number, each client was sent last.
        prepared: preliminary rounds done.
        releases: what each client released.
        served: the classes that each client was sent means of.
        head: entries of the classifier that take the place of the averaged ones in the global
            model; clients go on from the average.
    """

    task: Task
    inner: Any
    decoder: Tree
    averages: int = 0
    holds: Mapping[int, int] = field(default_factory=dict)
    prepared: int = 0
    releases: Mapping[int, Release] = field(default_factory=dict)
    served: Mapping[int, frozenset[int]] = field(default_factory=dict)
    head: Tree = field(default_factory=dict)

    @property
    def model(self) -> Tree:
        """The global model with the decoder, and with the calibrated classifier."""
        return {**self.decoder, **self.inner.model, **self.head}


@settings
class FedDPMS:
    """A training method aided by synthetic data of the clients' noisy class means."""

    about: ClassVar[About] = About(
        "data",
        "FedDPMS, arXiv 2206.00686",
        extra="noisy class means once; decoder at times if clients go on",
        client_state="synthetic examples if it goes on",
        server_state="decoder, noisy class means, classifier",
        generative=True,
    )

    inner: Chosen = FedAvg()
    """the training method"""
    preliminary_rounds: Annotated[int, Ge(0)] = 0
    """T_p, rounds before clients share; 0 takes 95 % of all rounds, but one at least stays; or, if
    clients go on after them, 40 %, as the paper advises"""
    secondary: Literal["rest", "train"] = "rest"
    """what clients do once they have shared: rest, or train, on decoded examples too (the paper)"""
    calibration: Calibration = Calibration()
    """how the server trains the global classifier on the released means"""
    decoder_period: Annotated[int, Ge(0)] = 5
    """preliminary rounds from one average of the decoder to the next; 0 for one average, after the
    last of them (the paper), which is always made"""
    vae: VaeSettings = VaeSettings()
    """the auto-encoder's loss"""
    matching: Matching = Matching()
    """who helps whom"""
    synthesis: Drawing = Drawing()
    """how synthetic examples are drawn"""

    def start(self, model: Tree, task: Task) -> Bank:
        """The inner method on what is averaged every preliminary round.

        Resting clients train what predicts, and no more.
        """
        require_training("feddpms", self.inner, whole=not self._goes_on)
        self._rounds(task)  # complains if no round is left
        rest, decoder = split(model) if self._goes_on else (trunk(model), {})
        return Bank(task, self.inner.start(rest, task), decoder)

    def ask(self, state: Bank, client: int, round: int) -> Message:
        """To train, to share once, to rest, or to go on with the means that it needs."""
        inner = self.inner.ask(state.inner, client, round)
        if self._left(state) and not self._goes_on:
            return Message("classify", inner=inner)
        if self._left(state):
            new = state.holds.get(client) != state.averages
            trees = {"decoder": state.decoder} if new else {}
            return Message("vae", trees, {"send_decoder": self._due(state)}, inner=inner)
        if client not in state.releases:
            return Message("share", {"model": state.inner.model})
        if not self._goes_on:
            return Message("rest")
        served = state.served.get(client, frozenset())
        matched = match(self.matching, client, state.releases, served)
        trees = {"matched": matched, "decoder": state.decoder} if matched else {}
        return Message("classify", trees, inner=inner)

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """One of the phases."""
        if ask.inner is None:
            return self._share(ask, me)
        if ask.kind == "vae":
            return self._prepare(ask, ask.inner, me)
        extra, numbers = me.memory.synthetic, {}
        if "matched" in ask.trees and self.synthesis.per_class:
            net = load(me.net, {**ask.inner.trees["model"], **ask.trees["decoder"]})
            drawing, rng = self.synthesis, me.rng.torch("synthesis")
            extra, numbers = extend(extra, net, ask.trees["matched"], drawing, rng)
        begun = "decoder" not in me.memory.trees  # the first time, the inner method starts anew
        memory = (me.memory.inner if begun else None) or Memory()
        inner = replace(me, memory=memory, synthetic=extra)
        reply, memory = self.inner.client(ask.inner, inner)
        trees = {} if self._goes_on else _local(me, reply)
        return Message("classify", numbers=numbers, inner=reply), Memory(trees, extra, memory)

    def _share(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """Release once, under the broadcast model; from then on send the stored release again."""
        common = (me.shard, me.task.classes, me.privacy, self.matching.top_n)
        paid = (me.account, me.noise, me.round)
        if me.privacy.release == "paper":
            local = load(me.net, {**ask.trees["model"], **me.memory.trees.get("local", {})})
            released, events = paper_release(local, *common, *paid)
        else:
            net = load(me.net, ask.trees["model"])
            squares = self.synthesis.spread == "released"
            released, events = release(net, *common, squares, *paid)
        return Message("share", {"release": released}, {}, events), me.memory

    def _prepare(self, ask: Message, inner: Message, me: Client) -> tuple[Message, Memory]:
        """Train the auto-encoder; the decoder stays here but when it is averaged."""
        own = ask.trees.get("decoder") or me.memory.trees["decoder"]
        inner = replace(inner, trees={**inner.trees, "model": {**inner.trees["model"], **own}})
        loss = vae_loss(self.vae, me.normals("latent noise"))
        memory = me.memory.inner or Memory()
        reply, memory = self.inner.client(inner, replace(me, loss=loss, memory=memory))
        local = _local(me, reply)
        rest, own = split(reply.trees["model"])
        reply = replace(reply, trees={**reply.trees, "model": rest})
        memory = Memory({"decoder": own, **local}, inner=memory)
        if not ask.numbers["send_decoder"]:
            return Message("vae", inner=reply), memory
        paid = tuple(e for e in reply.events if e.channel == UPDATES) or me.clear("decoder")
        return Message("vae", {"decoder": own}, {}, paid, reply), memory

    def server(self, state: Bank, replies: Mapping[int, Message]) -> Bank:
        """Keep releases, or hand the inner replies on; then calibrate the global classifier."""
        state = self._served_by(state, replies)
        known = (state.task, state.inner.model, state.releases)
        return replace(state, head=calibrated(*known, self.calibration))

    def _served_by(self, state: Bank, replies: Mapping[int, Message]) -> Bank:
        """The state with releases, or with the inner replies; the inner method anew after T_p."""
        released = {c: r.trees["release"] for c, r in replies.items() if r.kind == "share"}
        if released:
            return replace(state, releases={**state.releases, **released})
        answers = {c: r.inner for c, r in sorted(replies.items()) if r.inner}
        inner = self.inner.server(state.inner, answers)
        if not self._left(state):
            return replace(state, inner=inner, served=self._served(state, answers))
        if not self._goes_on:
            return replace(state, inner=inner, prepared=state.prepared + 1)
        holds = {**state.holds, **dict.fromkeys(answers, state.averages)}
        if self._due(state):
            weights = [answers[c].numbers["examples"] for c in answers]
            decoder = mean([replies[c].trees["decoder"] for c in answers], weights)
            state = replace(state, decoder=decoder, averages=state.averages + 1)
        if self._left(state) == 1:
            inner = self.inner.start(trunk(inner.model), state.task)
        return replace(state, inner=inner, holds=holds, prepared=state.prepared + 1)

    def _left(self, state: Bank) -> int:
        """Preliminary rounds still to come."""
        return self._rounds(state.task) - state.prepared

    def _rounds(self, task: Task) -> int:
        """T_p."""
        return preliminary_rounds(self.preliminary_rounds, task, 0.4 if self._goes_on else 0.95)

    @property
    def _goes_on(self) -> bool:
        """Whether clients train after they have shared."""
        return self.secondary == "train"

    def _due(self, state: Bank) -> bool:
        """Whether the decoder is averaged after this preliminary round."""
        period = self.decoder_period
        return self._left(state) == 1 or (period > 0 and (state.prepared + 1) % period == 0)

    def _served(self, state: Bank, answers: Mapping[int, Message]) -> dict[int, frozenset[int]]:
        """Which classes each client has been served, after these answers."""
        served = dict(state.served)
        for c in answers:
            before = served.get(c, frozenset())
            matched = match(self.matching, c, state.releases, before)
            served[c] = before | set(matched["classes"].tolist() if matched else ())
        return served


def _local(me: Client, reply: Message) -> dict[str, Tree]:
    """What the paper's release encodes with: the model that the client has trained itself."""
    return {"local": reply.trees["model"]} if me.privacy.release == "paper" else {}
