"""FedDA's two phases: what travels, what a client keeps, and what it makes of it."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from contract.test_contract import Watched, same
from feddpms.algorithms import FedAvg, FedDA, FedProx, Moon, Training
from feddpms.algorithms.private import require_private_training
from feddpms.engine import Crew, Engine, InProcess, simulate
from feddpms.errors import ConfigError
from feddpms.models import trunk
from feddpms.privacy import DpTraining, Ledger
from feddpms.rng import Rng
from feddpms.synthesis import Filling, Guidance
from feddpms.types import Memory, Message, Task
from small import CLASSES, LOOSE, client, small_net, three_shards, unseen

ROUNDS, PREPARED = 4, 2
LOCAL = Training(epochs=2, batch_size=8, lr=0.01)
TASK = Task(CLASSES, 3, ROUNDS, 6)


def crew(method, shards=None) -> Crew:
    shards = shards or dict(enumerate(three_shards()))
    return Crew(method, shards, unseen(), small_net(), TASK, LOCAL, LOOSE, Rng(0))


def run(cohort=1.0, **settings) -> Watched:
    spy = Watched(FedDA(preliminary_rounds=PREPARED, **settings))
    simulate(crew(spy), Engine(cohort=cohort), Ledger())
    return spy


@pytest.fixture(scope="module")
def spy() -> Watched:
    return run()


def test_no_network_travels_while_clients_learn(spy):
    calls = [c for c in spy.calls if c[1].round <= PREPARED]
    assert len(calls) == 3 * PREPARED
    for ask, me, reply in calls:
        assert (ask.kind, ask.inner, reply.inner) == ("knowledge", None, None)
        own = me.shard.y.unique()
        assert list(reply.trees) == ["knowledge"]
        assert torch.equal(reply.trees["knowledge"]["classes"], own)
        assert reply.trees["knowledge"]["means"].shape == (len(own), 16 * 2 * 2)
        assert {e.channel for e in reply.events} == {
            "class knowledge",
            "training loss",
            "step count",
        }
    assert all(not ask.trees["fused"] for ask, me, _ in calls if me.round == 1)
    told = [ask.trees["fused"]["classes"].tolist() for ask, me, _ in calls if me.round == 2]
    assert told == [[0, 1, 2]] * 3


def test_after_that_the_inner_method_trains_on_even_classes(spy):
    calls = [c for c in spy.calls if c[1].round > PREPARED]
    memories = {}
    for ask, me, reply in calls:
        assert ask.kind == reply.kind == "classify"
        assert not ask.trees
        assert not reply.trees
        assert "model" in reply.inner.trees
        made = FedDA(preliminary_rounds=PREPARED).client(ask, me)[1].synthetic
        counts = torch.bincount(torch.cat([me.shard.y, made.y]), minlength=CLASSES)
        assert counts.tolist() == [int(torch.bincount(me.shard.y).max())] * CLASSES
        assert same(memories.setdefault(me.id, made), made)  # once, and then the same


def test_the_auto_encoder_is_kept_while_it_is_needed(spy):
    for _, me, _ in spy.calls:
        kept = {1: set(), 4: set()}.get(me.round, {"auto_encoder", "heard"})
        assert set(me.memory.trees) == kept
        assert (me.memory.synthetic is not None) == (me.round == 4)


def test_all_start_from_one_auto_encoder_of_the_runs_seed():
    """With almost no rate each client keeps the weights that it started from."""
    kept = []
    for id, seed in ((0, 0), (1, 0), (0, 1)):
        still = FedDA(auto_encoder={"lr": 1e-30}).client
        rng = Rng(seed).at("client", id, 1)
        me = client(three_shards()[id], small_net(), id=id, rng=rng)
        kept.append(still(Message("knowledge", {"fused": {}}), me)[1].trees["auto_encoder"])
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=1e-20)
    assert not torch.allclose(kept[0]["open.weight"], kept[2]["open.weight"], atol=0.01)


def test_without_guidance_every_client_learns_alone():
    together, alone = run(guidance=Guidance(gamma=0)), {}
    for number, shard in enumerate(three_shards()):
        one = Watched(FedDA(preliminary_rounds=PREPARED))
        grid = InProcess(crew(one, {number: shard}))
        for t in (1, 2):
            grid.ask_all({number: Message("knowledge", {"fused": {}})}, t)
        alone[number] = grid.memories[number].trees["auto_encoder"]
    learned = {me.id: me.memory.trees for _, me, _ in together.calls if me.round == 3}
    guided = {me.id: me.memory.trees for _, me, _ in run().calls if me.round == 3}
    for number, want in alone.items():
        assert same(learned[number]["auto_encoder"], want)
        assert not same(guided[number]["auto_encoder"], want)


@pytest.mark.parametrize("inner", [FedAvg(), FedProx(mu=0.1), Moon()])
def test_without_synthetic_examples_it_is_its_inner_method(inner):
    """per_class = 0: the inner method's rounds from the initial model on, bit for bit."""
    settings = {"preliminary_rounds": PREPARED, "inner": inner}
    got = simulate(crew(FedDA(**settings, filling=Filling(per_class=0))), Engine(), Ledger())
    grid, net = InProcess(crew(inner)), small_net()
    own = inner.start(trunk({k: v.clone() for k, v in net.state_dict().items()}), TASK)
    for number in range(PREPARED + 1, ROUNDS + 1):
        asks = {c: inner.ask(own, c, number) for c in range(3)}
        own = inner.server(own, grid.ask_all(asks, number))
    assert same(got.model, own.model)
    assert not same(simulate(crew(FedDA(**settings)), Engine(), Ledger()).model, own.model)


def test_a_client_without_an_auto_encoder_trains_on_its_own_examples():
    model = trunk({k: v.clone() for k, v in small_net().state_dict().items()})
    me = client(three_shards()[0], small_net(), task=TASK)
    ask = Message("train", {"model": model})
    reply, memory = FedDA().client(Message("classify", inner=ask), me)
    assert same(reply.inner, FedAvg().client(ask, me)[0])
    assert memory == Memory(inner=Memory())


def test_a_client_that_was_told_nothing_makes_no_class_that_it_lacks():
    """Client 0 has classes 0 and 1; it learned in the first round alone."""
    shard = three_shards()[0]
    shard = replace(shard, x=shard.x[:23], y=shard.y[:23])
    me, method = client(shard, small_net(), task=TASK), FedDA()
    _, memory = method.client(Message("knowledge", {"fused": {}}), me)
    model = trunk({k: v.clone() for k, v in small_net().state_dict().items()})
    ask = Message("classify", inner=Message("train", {"model": model}))
    made = method.client(ask, replace(me, memory=memory))[1].synthetic
    assert made.y.tolist() == [1]


def test_a_client_that_misses_a_round_remembers_what_it_was_told():
    me, method = client(three_shards()[0], small_net(), task=TASK), FedDA()
    reply, _ = method.client(Message("knowledge", {"fused": {}}), me)
    fused = reply.trees["knowledge"]
    for told in (fused, {}):
        _, memory = method.client(Message("knowledge", {"fused": told}), me)
        me = replace(me, memory=memory)
    assert same(memory.trees["heard"], {"classes": fused["classes"]})


def test_what_a_client_told_is_known_until_it_tells_more():
    method = FedDA(preliminary_rounds=3)
    state = method.start({}, TASK)
    k = {c: {"classes": torch.tensor([c]), "means": torch.full((1, 4), float(c))} for c in range(3)}
    for c in (2, 0):
        state = method.server(state, {c: Message("knowledge", {"knowledge": k[c]})})
    assert state.fused["classes"].tolist() == [0, 2]
    torch.testing.assert_close(state.fused["means"], torch.cat([k[0]["means"], k[2]["means"]]))
    assert state.left == 1


@pytest.mark.parametrize(
    ("rounds", "chosen", "left"), [(20, 0, 4), (4, 0, 2), (3, 0, 2), (9, 5, 5)]
)
def test_rounds_of_knowledge(rounds, chosen, left):
    assert FedDA(preliminary_rounds=chosen).start({}, replace(TASK, rounds=rounds)).left == left


@pytest.mark.parametrize(
    ("settings", "rounds", "said"),
    [
        ({"preliminary_rounds": 1}, 9, r"at least 2 and below rounds \(9\), got 1"),
        ({"preliminary_rounds": 9}, 9, r"below rounds \(9\), got 9; change it"),
        ({}, 2, r"below rounds \(2\), got 2; change it, or run 3 rounds or more"),
        ({"auto_encoder": {"latent": 2}}, 9, r"at least the number of classes \(3\), got 2"),
        ({"inner": FedDA()}, 9, "fedda wraps a training method such as fedavg"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(settings, rounds, said):
    with pytest.raises(ConfigError, match=said) as told:
        FedDA(**settings).start({}, replace(TASK, rounds=rounds))
    assert "\n" not in str(told.value)


def test_private_training_is_refused():
    privacy = replace(LOOSE, training=DpTraining(kind="dpsgd"), weights="noisy")
    with pytest.raises(ConfigError, match="fedda cannot train privately"):
        require_private_training(FedDA(), privacy, "group", LOCAL)


@pytest.mark.parametrize(
    "settings",
    [
        {"guidance": {"gamma": -1.0}},
        {"guidance": {"reference": "others"}},
        {"filling": {"per_class": -1}},
        {"filling": {"weight": 0.0}},
        {"auto_encoder": {"separation": 0.0}},
        {"auto_encoder": {"pixel_scale": 0.0}},
        {"auto_encoder": {"lr": 0.0}},
        {"gamma": 1.0},
    ],
)
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(ValidationError):
        FedDA(**settings)
