"""Every method, alone and composed, against every invariant of the seam."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from feddpms.algorithms import (
    METHODS,
    FedAvg,
    FedAvgM,
    FedDA,
    FedDC,
    FedDG,
    FedDPMS,
    FedDyn,
    FedMA,
    FedMix,
    FedNova,
    FedProx,
    Mixup,
    Moon,
    Scaffold,
    Sharing,
    Training,
    Zdac,
    Zdas,
)
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import Method
from feddpms.engine import Crew, Engine, InProcess, simulate
from feddpms.engine.grid import unfold
from feddpms.models import VaeSettings, trunk
from feddpms.privacy import Ledger
from feddpms.rng import Rng
from feddpms.synthesis import Drawing, Inversion
from feddpms.types import Message, Shard
from small import GOES_ON, LOOSE, TASK, client, small_net, three_shards, unseen

LOCAL = Training(epochs=2, batch_size=8, lr=0.01)
DPMS = {**GOES_ON, "preliminary_rounds": 2, "vae": VaeSettings(weight=0.05)}
MADE = {"warm_up": 1, "per_class": 3, "inversion": Inversion(steps=4)}


def settled(cls: type) -> Method:
    """A method's defaults, but that one which is defined for SGD corrects after Adam's step."""
    return cls(with_adam="decoupled") if hasattr(cls, "with_adam") else cls()


OWN_SETTINGS = ("fedda", "feddpms", "pfnm")
"""methods whose defaults fit no run of four rounds, or no convolutions"""
CASES: dict[str, Method] = {
    **{name: settled(cls) for name, cls in METHODS.items() if name not in OWN_SETTINGS},
    "feddpms": FedDPMS(**DPMS),
    "feddpms, resting": FedDPMS(),
    "feddpms, decoder every round": FedDPMS(**DPMS, decoder_period=1),
    "feddpms, decoder once, pair": FedDPMS(**DPMS, decoder_period=0, matching={"kind": "pair"}),
    "feddpms+fedprox": FedDPMS(**DPMS, inner=FedProx(mu=0.1)),
    "feddpms+moon": FedDPMS(**DPMS, inner=Moon()),
    "fedmix+fedma": FedMix(inner=FedMA()),
    "fedmix+fedprox": FedMix(inner=FedProx(mu=0.1)),
    "fedmix+moon": FedMix(inner=Moon()),
    "feddpms+scaffold": FedDPMS(**DPMS, inner=Scaffold(with_adam="decoupled")),
    "feddpms+feddyn": FedDPMS(**DPMS, inner=FedDyn(with_adam="decoupled")),
    "feddpms+feddc": FedDPMS(**DPMS, inner=FedDC(with_adam="decoupled")),
    "feddpms+fednova": FedDPMS(**DPMS, inner=FedNova(with_adam="decoupled")),
    "fedmix+feddyn": FedMix(inner=FedDyn(with_adam="decoupled")),
    "fedavgm": FedAvgM(momentum=0.5),  # with 0.9, six rounds end in an overshoot
    "mixup+moon": Mixup(inner=Moon()),
    "feddpms+fedavgm": FedDPMS(**DPMS, inner=FedAvgM(momentum=0.5)),
    "fedda": FedDA(preliminary_rounds=2),
    "fedda+moon": FedDA(preliminary_rounds=2, inner=Moon()),
    "feddg+fedprox": FedDG(inner=FedProx(mu=0.1)),
    "feddg+moon": FedDG(window=0.3, inner=Moon()),
    "zdac": Zdac(**MADE, period=2),
    "zdac+moon": Zdac(**MADE, inner=Moon()),
    "zdas": Zdas(**MADE, steps=3),
    "zdas+fedprox": Zdas(**MADE, steps=3, inner=FedProx(mu=0.1)),
    "sharing+moon": Sharing(preliminary_rounds=1, inner=Moon()),
    "sharing+feddyn": Sharing(inner=settled(FedDyn)),
    "feddg+feddyn": FedDG(inner=settled(FedDyn)),
    "fedda+scaffold": FedDA(preliminary_rounds=2, inner=settled(Scaffold)),
}
STEPPING = ("fedavgm", "fedadam", "fedyogi", "feddpms+fedavgm")
"""whose server goes on by itself: its next model is no average of what it got"""
RESTING = ("feddpms, resting",)
"""who train no more in the last of four rounds"""
FEDERATED = [name for name, m in CASES.items() if m.about.scope == "federated"]
AVERAGING = [name for name in FEDERATED if not isinstance(CASES[name], Zdas)]
"""those whose server does not train"""
NEUTRAL = {
    "fedavgm": FedAvgM(momentum=0.0),
    "mixup": Mixup(alpha=0),
    "fedprox": FedProx(mu=0),
    "moon": Moon(mu=0),
    "fedmix": FedMix(lam=0),
    "fedmix+fedprox": FedMix(lam=0, inner=FedProx(mu=0)),
    "feddg": FedDG(weight=0),
    "zdac": Zdac(**{**MADE, "per_class": 0}),
    "zdas": Zdas(**MADE, steps=0),
    "sharing": Sharing(per_class=0),
}

every_method = pytest.mark.parametrize("name", CASES)
federated = pytest.mark.parametrize("name", FEDERATED)
averaging = pytest.mark.parametrize("name", AVERAGING)


@dataclass
class Watched:
    """A method that notes what goes in and out, and keeps copies of what went in."""

    method: Method

    def __post_init__(self):
        self.about = self.method.about
        self.calls: list[tuple[Message, object, Message]] = []
        self.served: list[tuple[object, dict[int, Message], object]] = []
        self.changed: list[str] = []

    def start(self, model, task):
        return self.method.start(model, task)

    def ask(self, state, client, round):
        return self._unchanged("ask", self.method.ask, state, client, round)

    def client(self, ask, me):
        watched = (ask, me.memory, me.shard)
        before = copy.deepcopy(watched)
        reply, memory = self.method.client(ask, me)
        if not same(before, watched):
            self.changed.append("client")
        self.calls.append((ask, me, reply))
        return reply, memory

    def server(self, state, replies):
        after = self._unchanged("server", self.method.server, state, replies)
        self.served.append((state, dict(replies), after))
        return after

    def _unchanged(self, name, function, *args):
        before = copy.deepcopy(args)
        result = function(*args)
        if not same(before, args):
            self.changed.append(name)
        return result


def same(a, b) -> bool:
    """Equal bit for bit, through records, mappings and tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(
            same(getattr(a, k), getattr(b, k)) for k in a.__dataclass_fields__
        )
    return a == b


def go(method, rounds=4, shards=None, **engine):
    """A run of the small case; the outcome and the ledger."""
    ledger = Ledger()
    shards = shards or three_shards()
    task = replace(TASK, clients=len(shards), rounds=rounds)
    given = (method, dict(enumerate(shards)), unseen(), small_net(), task, LOCAL, LOOSE, Rng(0))
    return simulate(Crew(*given), Engine(**engine), ledger), ledger


@pytest.fixture(scope="module")
def watched() -> dict[str, tuple]:
    """Each case run once, watched."""
    runs = {}
    for name, method in CASES.items():
        spy = Watched(method)
        runs[name] = (spy, *go(spy))
    return runs


@every_method
def test_inputs_are_not_changed(name, watched):
    assert watched[name][0].changed == []


@every_method
def test_the_same_seed_gives_the_same_bits(name, watched):
    again, _ = go(CASES[name])
    assert same(again.model, watched[name][1].model)
    assert same(dict(again.memories), dict(watched[name][1].memories))


@every_method
def test_a_client_rule_does_not_depend_on_what_the_network_held(name, watched):
    for ask, me, reply in watched[name][0].calls[-3:]:
        other = small_net(seed=77)
        assert same(CASES[name].client(ask, replace(me, net=other))[0], reply)


@every_method
def test_the_order_of_replies_does_not_matter(name, watched):
    for state, replies, after in watched[name][0].served:
        backwards = dict(reversed(replies.items()))
        assert same(sorted_maps(CASES[name].server(state, backwards)), sorted_maps(after))


def sorted_maps(state):
    """A state with its mappings by client in one order, so that only content is compared."""
    values = {}
    for key in state.__dataclass_fields__:
        value = getattr(state, key)
        values[key] = dict(sorted(value.items())) if isinstance(value, dict) else value
    return values


@averaging
def test_replies_equal_to_the_broadcast_change_nothing(name, watched):
    for state, replies, _ in watched[name][0].served:
        if any(r.kind == "share" for r in replies.values()):
            continue
        if name in STEPPING and state is not watched[name][0].served[0][0]:
            continue  # it moved before
        model = innermost(state).model
        echoes = {c: echo(r, model) for c, r in replies.items()}
        after = CASES[name].server(state, echoes)
        for key, value in innermost(after).model.items():
            assert torch.equal(value, model[key]), key


def innermost(state):
    return innermost(state.inner) if hasattr(state, "inner") else state


def echo(reply: Message, model) -> Message:
    """The reply with the broadcast model in place of the trained one."""
    if reply.inner:
        return replace(reply, inner=echo(reply.inner, model))
    return replace(reply, trees={**reply.trees, "model": model})


@averaging
def test_one_client_is_local_training(name):
    shard = three_shards()[0]
    spy = Watched(CASES[name])
    go(spy, rounds=3, shards=[shard])
    for state, replies, after in spy.served:
        (reply,) = replies.values()
        if reply.kind != "share" and "model" in unfold(reply)[-1].trees and name not in STEPPING:
            trained = unfold(reply)[-1].trees["model"]
            left = innermost(after).model
            assert all(torch.allclose(left[k], trained[k]) for k in left if k in trained), name
            assert not all(torch.equal(left[k], innermost(state).model[k]) for k in left)


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_neutral_setting_is_fedavg_bit_for_bit(name):
    assert same(go(NEUTRAL[name])[0].model, go(FedAvg())[0].model)
    assert not same(go(CASES[name])[0].model, go(FedAvg())[0].model)


@pytest.mark.parametrize(
    "inner",
    [FedAvg(), FedProx(mu=0.1), Moon(), *(settled(c) for c in (Scaffold, FedDyn, FedDC, FedNova))],
    ids=lambda method: type(method).__name__,
)
def test_feddpms_without_synthetic_examples_is_its_inner_method(inner):
    """per_class = 0: the preliminary model is what the inner method starts from, bit for bit."""
    method = FedDPMS(**DPMS, inner=inner, synthesis=Drawing(per_class=0))
    spy = Watched(method)
    go(spy)
    state = next(after for _, _, after in spy.served if after.prepared == 2)
    own = inner.start(trunk(state.model), TASK)
    shards = dict(enumerate(three_shards()))
    crew = Crew(inner, shards, unseen(), small_net(), TASK, LOCAL, LOOSE, Rng(0))
    grid = InProcess(crew)
    for number in (3, 4):
        asks = {c: inner.ask(own, c, number) for c in range(3)}
        own = inner.server(own, grid.ask_all(asks, number))
    assert same(own.model, trunk(spy.served[-1][2].model))
    assert not same(own.model, trunk(go(FedDPMS(**DPMS, inner=inner))[0].model))


@federated
def test_a_missing_reply_is_survived(name, watched):
    for state, replies, _ in watched[name][0].served:
        fewer = dict(list(replies.items())[1:])
        if fewer:
            model = CASES[name].server(state, fewer).model
            assert all(v.isfinite().all() for v in model.values())


@federated
def test_a_client_may_come_late(name):
    """One client of three a round: whoever comes first after the preparation shares then."""
    outcome, ledger = go(CASES[name], rounds=8, cohort=0.3)
    assert all(v.isfinite().all() for v in outcome.model.values())
    assert all(r.numbers["clients"] == (r.phase != "rest") for r in outcome.rounds)
    assert ledger.clients()


@every_method
def test_buffers_travel_and_keep_their_type(name, watched):
    model = watched[name][1].model
    start = small_net().state_dict()
    assert "encoder.layers.1.running_mean" in model
    for key, value in model.items():
        assert value.dtype == start[key].dtype, key
    if CASES[name].about.scope != "local":
        assert model["encoder.layers.1.num_batches_tracked"] > 0


@every_method
def test_training_lowers_the_loss(name):
    outcome, _ = go(CASES[name], rounds=6)
    if CASES[name].about.scope == "local":  # a client that lacks a class only gets surer of it
        assert outcome.rounds[-1].test_accuracy > outcome.rounds[0].test_accuracy
    else:
        assert outcome.rounds[-1].test_loss < outcome.rounds[0].test_loss


@every_method
def test_what_comes_from_data_has_an_event(name, watched):
    carried = 0
    for _, _, reply in watched[name][0].calls:
        if any(m.trees for m in unfold(reply)):
            carried += 1
            assert all(m.events for m in unfold(reply) if m.trees)
    assert carried or CASES[name].about.scope == "local"


@every_method
def test_every_method_takes_the_same_number_of_steps(name, watched):
    if CASES[name].about.scope != "federated":
        return
    steps = [r.numbers["steps"] for r in watched[name][1].rounds]
    expected = sum(2 * -(-len(s) // 8) for s in three_shards())
    trained = 4 - (name in RESTING)
    assert steps == [expected] * trained + [0] * (4 - trained)


@every_method
def test_a_method_trains_only_what_it_should(name, watched):
    generative = [k for k in watched[name][1].model if k.startswith("decoder.")]
    assert bool(generative) == (CASES[name].about.generative and name not in RESTING)


def test_every_method_starts_from_the_same_weights():
    starts = {}
    for name in FEDERATED:
        spy = Watched(CASES[name])
        go(spy, rounds=3)
        asks = (unfold(ask)[-1].trees for ask, _, _ in spy.calls)
        starts[name] = trunk(next(trees["model"] for trees in asks if "model" in trees))
    for name, model in starts.items():
        assert same(model, starts["fedavg"]), name


def test_fit_leaves_its_start_alone_and_trains_no_more_than_it():
    net, shard = small_net(), three_shards()[0]
    start = trunk({k: v.clone() for k, v in net.state_dict().items()})
    kept = copy.deepcopy(start)
    fitted = fit(client(shard, net), start)
    assert same(start, kept)
    assert set(fitted.tree) == set(start)
    assert fitted.steps == 2 * 3


def test_an_added_gradient_moves_the_weights_by_it():
    """Plain SGD with drift d and a zero loss: y = w - steps * lr * d."""
    net, shard = small_net(), three_shards()[0]
    local = Training(epochs=1, batch_size=8, optimizer="sgd", momentum=0.0, lr=0.5)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    drift = {"classifier.head.bias": torch.tensor([1.0, -2.0, 0.5])}
    nothing = lambda net, batch: 0 * net(batch.x).sum()  # noqa: E731
    fitted = fit(client(shard, net, local=local), start, nothing, Correction(drift))
    moved = fitted.tree["classifier.head.bias"] - start["classifier.head.bias"]
    torch.testing.assert_close(moved, -3 * 0.5 * drift["classifier.head.bias"])


def test_a_last_batch_of_one_joins_the_one_before_it():
    shard = three_shards()[0]
    nine = Shard(shard.x[:9], shard.y[:9])
    sizes = []

    def loss(net, batch):
        sizes.append(len(batch.y))
        return net(batch.x).square().mean()

    net = small_net()
    fit(client(nine, net, local=LOCAL), net.state_dict(), loss)
    assert sizes == [9, 9]
