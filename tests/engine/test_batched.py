"""Clients trained at once against the same clients in turn: equal but for rounding."""

import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError

from contract.test_contract import CASES, same
from feddpms import runs
from feddpms.algorithms import About, FedAvg, Training
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.fit import fit, load
from feddpms.config import Run
from feddpms.engine import Crew, Engine, require_engine, simulate
from feddpms.engine.device import moved
from feddpms.errors import ConfigError, PrivacyError
from feddpms.models import NetSettings, Plan, build
from feddpms.privacy import DpTraining, Ledger
from feddpms.rng import Rng
from feddpms.types import Memory, Message, Shard, Task
from small import CLASSES, LOOSE, blobs, three_shards, unseen

SGD = Training(epochs=2, batch_size=8, optimizer="sgd", lr=0.05, weight_decay=0.01)
ADAM = Training(epochs=2, batch_size=8, lr=0.01, weight_decay=0.01)
SETTINGS = {"batch norm, sgd": ("batch", SGD), "group norm, adam": ("group", ADAM)}
CLOSE = 1e-11
"""of float64 numbers near 1; a wrong step moves them by 1e-3"""

every_setting = pytest.mark.parametrize("setting", SETTINGS)
every_case = pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for name, method in CASES.items()
        for setting in SETTINGS
        if setting.startswith("batch")  # without batch norm, these two kinds refuse
        or not (hasattr(method, "inversion") or "fedma" in name)
    ],
)


def large(shard: Shard) -> Shard:
    """The same examples with four times as many pixels, in float64."""
    x = shard.x.double().repeat_interleave(2, 2).repeat_interleave(2, 3)
    return Shard(x, shard.y)


def shards() -> list[Shard]:
    """Clients that take 3 to 5 steps an epoch; a last batch of 7, and one of 9."""
    return [large(s) for s in (*three_shards(), blobs(17, [1, 0, 2], 4))]


def simulated(method, setting="batch norm, sgd", privacy=LOOSE, **engine):
    """A run of the small case in float64."""
    norm, local = SETTINGS[setting]
    settings = NetSettings(width=0.25, latent=6, hidden=8, norm=norm)
    plan = Plan((1, 8, 8), CLASSES, settings)
    net = plan.build().double()
    rounds = 3 if hasattr(method, "preliminary_rounds") else 2
    task = Task(CLASSES, 4, rounds, 6, plan)
    crew = Crew(
        method, dict(enumerate(shards())), large(unseen()), net, task, local, privacy, Rng(0)
    )
    return simulate(crew, Engine(**engine), Ledger())


@cache
def in_turn(name, setting):
    return simulated(CASES[name], setting)


def differ(a, b) -> float:
    """The largest difference between two runs: models, what clients keep, and what is recorded."""
    trees = [(a.model, b.model)]
    for c, memory in a.memories.items():
        trees += pairs(memory, b.memories[c])
    assert all(list(x) == list(y) for x, y in trees)
    apart = [
        (x[k].double() - y[k].double()).abs().max() for x, y in trees for k in x if x[k].numel()
    ]
    for x, y in zip(a.rounds, b.rounds, strict=True):
        assert x.numbers == y.numbers
        losses = torch.tensor([[x.train_loss, x.test_loss], [y.train_loss, y.test_loss]])
        apart.append(losses.nan_to_num().diff(dim=0).abs().max())
    return float(torch.stack([v.double() for v in apart]).max())


def pairs(a: Memory, b: Memory):
    """The trees of two memories, side by side."""
    found = [(a.trees[k], b.trees[k]) for k in a.trees]
    if a.synthetic is not None:
        found.append(({"x": a.synthetic.x, "y": a.synthetic.y}, vars(b.synthetic)))
        found[-1] = (found[-1][0], {k: found[-1][1][k] for k in ("x", "y")})
    return found + (pairs(a.inner, b.inner) if a.inner else [])


@every_case
def test_clients_at_once_are_clients_in_turn(name, setting):
    together = simulated(CASES[name], setting, clients_at_once=4)
    assert differ(in_turn(name, setting), together) < CLOSE


@pytest.mark.parametrize("name", ["fedprox", "feddpms+moon", "local"])
def test_a_cohort_may_take_several_groups(name):
    together = simulated(CASES[name], clients_at_once=3)
    assert differ(in_turn(name, "batch norm, sgd"), together) < CLOSE


def test_more_places_than_clients_are_no_harm():
    together = simulated(CASES["fedavg"], clients_at_once=64)
    assert differ(in_turn("fedavg", "batch norm, sgd"), together) < CLOSE


@pytest.mark.parametrize("name", ["fedprox", "feddpms+moon", "fedmix"])
def test_the_same_seed_gives_the_same_bits(name):
    one, other = (simulated(CASES[name], clients_at_once=3) for _ in range(2))
    assert same(one.model, other.model)
    assert same(dict(one.memories), dict(other.memories))


def test_training_at_once_does_move_the_weights():
    started = simulated(CASES["fedavg"], clients_at_once=4)
    norm, _ = SETTINGS["batch norm, sgd"]
    net = build((1, 8, 8), CLASSES, NetSettings(width=0.25, latent=6, hidden=8, norm=norm), Rng(0))
    assert (
        max(float((v - net.state_dict()[k]).abs().max()) for k, v in started.model.items()) > 1e-2
    )


@dataclass(frozen=True)
class Own:
    """FedAvg whose clients train each in a way of its own."""

    rule: str
    about: ClassVar[About] = About("drift", "nobody")

    def start(self, model, task):
        return FedAvg().start(model, task)

    def ask(self, state, client, round):
        return FedAvg().ask(state, client, round)

    def client(self, ask, me):
        return RULES[self.rule](me, ask.trees["model"]).reply(me), me.memory

    def server(self, state, replies):
        return FedAvg().server(state, replies)


def drifting(me, start):
    """A drift of its own, for two entries; client 2 has none, client 1 one of them."""
    drift = {k: torch.full_like(start[k], 0.1 * (me.id + 1)) for k in list(start)[:2]}
    names = {2: 0, 1: 1}.get(me.id, 2)
    return fit(me, start, correction=Correction(dict(list(drift.items())[:names])))


def pulled(me, start):
    """A pull to a place of its own, by a strength of its own."""
    names = [k for k in start if me.id == 1 or "bias" in k]
    centre = {k: torch.full_like(start[k], 0.1 * me.id) for k in names}
    return fit(me, start, correction=Correction({}, centre, pull=0.3 * me.id))


def pulled_alone(me, start):
    """Only client 1 is pulled."""
    return pulled(me, start) if me.id == 1 else fit(me, start)


def decoupled(me, start):
    """Drift and pull as a step after the optimiser's."""
    drift = {k: torch.full_like(start[k], 0.1 * (me.id + 1)) for k in list(start)[:2]}
    return fit(me, start, correction=Correction(drift, start, 0.3, decoupled=True))


def curious(me, start):
    """Odd clients look at the features as well, and client 3 twice."""

    def loss(net, batch):
        value = me.loss(net, batch)
        for _ in range((0, 1, 0, 2)[me.id]):
            value = value + 0.1 * net.features(batch.x).square().mean()
        return value

    return fit(me, start, loss)


def constant(me, start):
    """What is computed without a graph is a constant."""

    def loss(net, batch):
        with torch.no_grad():
            z = net.features(batch.x)
        return me.loss(net, batch) + (net.features(batch.x) * z).sum(1).mean()

    return fit(me, start, loss)


def twice(me, start):
    """Train, look at one's own network, and train on from there."""
    first = fit(me, start)
    net = load(me.net, first.tree).eval()
    with torch.no_grad():
        shift = 0.01 * net(me.shard.x).mean().tanh()
    return fit(me, {k: v + shift if v.is_floating_point() else v for k, v in first.tree.items()})


def part(me, start):
    """Only some entries are trained; the others stand still, whatever the network held."""
    load(me.net, {k: v + 1 if v.is_floating_point() else v for k, v in start.items()})
    load(me.net, start)
    fitted = fit(me, {k: v for k, v in start.items() if k.startswith("classifier.")})
    return replace(fitted, tree={**start, **fitted.tree})


def longer(me, start):
    """Client 0 trains for one more epoch than the others."""
    return fit(replace(me, local=replace(me.local, epochs=2 + (me.id == 0))), start)


OWN = (drifting, pulled, pulled_alone, decoupled, curious, constant, twice, part, longer)
RULES = {f.__name__: f for f in OWN}


@every_setting
@pytest.mark.parametrize("rule", RULES)
def test_what_is_a_clients_own_stays_its_own(rule, setting):
    alone = simulated(Own(rule), setting)
    assert differ(alone, simulated(Own(rule), setting, clients_at_once=4)) < CLOSE
    assert not same(alone.model, in_turn("fedavg", setting).model)


@dataclass(frozen=True)
class Fails(Own):
    """Clients that fail: at once, or in the middle of training."""

    rule: str = ""
    fails: tuple[int, ...] = (2,)
    steps: int = 0
    ended: list[int] = field(default_factory=list)

    def client(self, ask, me):
        left = [self.steps]

        def loss(net, batch):
            if me.id in self.fails and not left[0]:
                raise PrivacyError(f"client {me.id}")
            left[0] -= 1
            return me.loss(net, batch)

        try:
            return fit(me, ask.trees["model"], loss).reply(me), me.memory
        finally:
            self.ended.append(me.id)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("fails", [(2,), (3, 1), (0, 1, 2, 3)])
def test_the_first_error_ends_all(fails, steps):
    method, threads = Fails(fails=fails, steps=steps), threading.active_count()
    with pytest.raises(PrivacyError, match=f"client {min(fails)}"):
        simulated(method, clients_at_once=4)
    assert threading.active_count() == threads
    assert set(method.ended) >= set(range(min(fails) + 1))


def test_a_loss_that_cannot_be_stacked_ends_all():
    def loss(net, batch):
        return net(batch.x[:, :, :2]).sum()

    RULES["broken"] = lambda me, start: fit(me, start, loss)
    threads = threading.active_count()
    with pytest.raises(RuntimeError):
        simulated(Own("broken"), clients_at_once=4)
    assert threading.active_count() == threads


def test_a_loss_may_use_what_a_network_has_alone():
    RULES["odd"] = lambda me, start: fit(me, start, lambda net, batch: net.body(batch.x))
    with pytest.raises(AttributeError, match="body"):
        simulated(Own("odd"), clients_at_once=4)


def test_one_thread_runs_at_a_time_and_on_one_thread():
    running, most, threads = [0], [0], set()

    def rule(me, start):
        def loss(net, batch):
            running[0] += 1
            most[0] = max(most[0], running[0])
            threads.add(torch.get_num_threads())
            time.sleep(0.001)  # so that another thread could run
            running[0] -= 1
            return me.loss(net, batch)

        return fit(me, start, loss)

    RULES["counted"] = rule
    simulated(Own("counted"), clients_at_once=4)
    assert most == [1]
    assert threads == {1}


PRIVATE = replace(LOOSE, training=DpTraining(kind="dpsgd"))


@pytest.mark.parametrize(
    ("engine", "privacy", "workers", "said"),
    [
        ({"clients_at_once": 2}, LOOSE, 2, "set --workers 1"),
        ({"clients_at_once": 2}, PRIVATE, 1, "cannot train privately"),
        pytest.param(
            {"device": "cuda"},
            LOOSE,
            1,
            "needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(engine, privacy, workers, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as told:
        require_engine(Engine(**engine), privacy, workers)
    assert "\n" not in str(told.value)
    settings = Run(engine=Engine(**engine), privacy=privacy)
    for start in (
        runs.run,
        lambda s, out, workers: runs.compare(s, ["fedavg"], [0], out, workers=workers),
    ):
        with pytest.raises(ConfigError, match=said):
            start(settings, tmp_path / "new", workers=workers)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("engine", "several"), [({}, True), ({"clients_at_once": 2}, False)])
def test_auto_is_one_process_where_clients_train_at_once(engine, several, monkeypatch):
    monkeypatch.setattr(runs, "cores", lambda: 2)
    monkeypatch.setattr(runs, "Workers", Started)
    settings = Run(engine=Engine(**engine))
    with runs._workers(None, settings, 10**9, 1) as workers:
        assert bool(workers) == several


class Started:
    """Workers that are counted, not started."""

    def __init__(self, count):
        self.count = count

    def close(self):
        pass


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_clients_at_once_are_a_number(value):
    with pytest.raises(ValidationError):
        Engine(clients_at_once=value)


def test_everything_of_a_message_and_a_memory_moves():
    tree = {"t": {"a": torch.zeros(2)}}
    message = moved(Message("train", tree, inner=Message("vae", tree)), "meta")
    assert message.trees["t"]["a"].is_meta
    assert message.inner.trees["t"]["a"].is_meta
    memory = moved(Memory(tree, unseen(), Memory(tree, unseen())), "meta")
    for part_of in (memory, memory.inner):
        assert part_of.trees["t"]["a"].is_meta
        assert part_of.synthetic.x.is_meta
        assert part_of.synthetic.y.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("at_once", [1, 4])
@every_case
def test_a_gpu_computes_the_same(name, setting, at_once):
    there = simulated(CASES[name], setting, device="cuda", clients_at_once=at_once)
    assert differ(in_turn(name, setting), there) < 1e-6
    assert all(v.device.type == "cpu" for v in there.model.values())
    for memory in there.memories.values():
        assert all(v.device.type == "cpu" for a, _ in pairs(memory, memory) for v in a.values())


GAUGED = {
    "noisy weights": replace(LOOSE, weights="noisy"),
    "second moments": replace(LOOSE, adjacency="replace_one"),
    "means of m": replace(LOOSE, release="fixed_m_mean", mean_size=4),
    "the paper's": replace(LOOSE, release="paper", mean_size=4, paper_sigma=0.1),
    "private training": replace(
        LOOSE,
        weights="noisy",
        training=DpTraining(kind="dpsgd", expected_batch_size=8, expected_examples=24),
    ),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", GAUGED)
def test_a_gpu_draws_the_same_noise(kind):
    spread = "released" if kind == "second moments" else 0.3
    method, privacy = replace(CASES["feddpms"], synthesis={"spread": spread}), GAUGED[kind]
    here, there = (
        simulated(method, "group norm, adam", privacy, device=device) for device in ("cpu", "cuda")
    )
    assert differ(here, there) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_gpu_gives_the_same_bits_each_time(at_once):
    one, other = (
        simulated(CASES["feddpms+moon"], device="cuda", clients_at_once=at_once) for _ in range(2)
    )
    assert same(one.model, other.model)
