"""Matched averaging: what it must give back, whatever the order of hidden units."""

import importlib.util
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from feddpms import audits, config, runs
from feddpms.algorithms import PFNM, FedAvg, FedDPMS, FedMA, FedMix, Training
from feddpms.algorithms.chain import layers, part
from feddpms.algorithms.fit import fit, load
from feddpms.algorithms.merging import merge, unmatched, with_counts
from feddpms.algorithms.neurons import Prior
from feddpms.algorithms.trees import average, mean
from feddpms.data import Data, Partition, split
from feddpms.data import load as load_data
from feddpms.engine import Crew, Engine, Workers, simulate
from feddpms.engine.evaluate import evaluate
from feddpms.errors import ConfigError
from feddpms.models import NetSettings, build, trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Memory, Message, Shard, Task
from small import CLASSES, GOES_ON, LOOSE, TASK, client, small_mlp, small_net, three_shards, unseen

KINDS = ("mlp", "conv")
SMALL = {"width": 0.5, "latent": 16, "hidden": 24}
CHAIN = {
    "conv": [
        ("encoder.layers.0", "encoder.layers.1"),
        ("encoder.layers.3", "encoder.layers.4"),
        ("encoder.layers.6", "encoder.layers.7"),
        ("mean", ""),
        ("classifier.body.0", ""),
        ("classifier.head", ""),
    ],
    "mlp": [
        ("encoder.layers.0", ""),
        ("encoder.layers.2", ""),
        ("mean", ""),
        ("classifier.body.0", ""),
        ("classifier.head", ""),
    ],
}
ALL_NEW = Prior(gamma=1e9)
"""so many new neurons are believed in that none is matched"""

both_kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def digits():
    return load_data(Data(name="digits"), Rng(0))


def digits_net(kind, seed=0):
    return build((1, 8, 8), 10, NetSettings(kind=kind, **SMALL), Rng(seed))


def weights(net):
    return trunk({k: v.clone() for k, v in net.state_dict().items()})


def fitted(kind, shard, seed, epochs, id=0):
    """A client's reply, trained from initial weights of its own."""
    net = digits_net(kind, seed)
    task, local = Task(10, 4, 1, 16), Training(epochs=epochs, lr=5e-3)
    me = client(shard, net, id=id, task=task, local=local)
    return with_counts(fit(me, weights(net)).reply(me), me)


@cache
def trained(kind):
    """The weights of a network that knows the digits."""
    data = digits()
    shard = Shard(data.train.x[:600], data.train.y[:600])
    return fitted(kind, shard, 0, 8).trees["model"]


@cache
def independent(kind, clients=3, beta=5.0, draw=0):
    """Replies of clients with unequal data that began from different weights."""
    data = digits()
    parts = split(data.train.y.numpy(), 10, Partition(clients=clients, beta=beta), Rng(draw))
    shards = [Shard(data.train.x[i], data.train.y[i]) for i in map(torch.from_numpy, parts)]
    return {j: fitted(kind, s, 100 * draw + 10 + j, 8, id=j) for j, s in enumerate(shards)}


def replied(trees, counts=None, sizes=None):
    """Replies with these models."""
    counts = torch.ones(len(trees), 10) if counts is None else counts
    sizes = sizes or [10 + 7 * j for j in range(len(trees))]
    return {
        j: Message("train", {"model": t, "counts": {"counts": counts[j].double()}}, {"examples": n})
        for j, (t, n) in enumerate(zip(trees, sizes, strict=True))
    }


def shuffled(kind, tree, seed):
    """The same network with its hidden units in another order, and the orders."""
    rng, new, orders, before = np.random.default_rng(seed), dict(tree), [], None
    for i, (layer, norm) in enumerate(CHAIN[kind]):
        weight, bias = new[f"{layer}.weight"], new[f"{layer}.bias"]
        if before is not None and weight.ndim == 4:
            weight = weight[:, before]
        elif before is not None:  # pixel by pixel, the channels of each side by side
            weight = weight.view(len(weight), -1, len(before))[..., before].flatten(1)
        if i < len(CHAIN[kind]) - 1:
            before = torch.from_numpy(rng.permutation(len(weight)))
            orders.append(before)
            weight, bias = weight[before], bias[before]
            for name in ("weight", "bias", "running_mean", "running_var") if norm else ():
                new[f"{norm}.{name}"] = new[f"{norm}.{name}"][before]
        new |= {f"{layer}.weight": weight, f"{layer}.bias": bias}
    return new, orders


def logits(kind, tree):
    with torch.no_grad():
        return load(digits_net(kind), tree).eval()(digits().test.x)


def accuracy(kind, tree):
    return evaluate(load(digits_net(kind), tree), digits().test, 10).accuracy


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def wide(tree):
    return sum(len(tree[keys[0]]) for keys in layers(tree)[:-1])


# Copies of one network


@both_kinds
def test_shuffled_copies_compute_the_same(kind):
    tree, orders = shuffled(kind, trained(kind), 1)
    assert accuracy(kind, tree) > 0.85
    close(logits(kind, tree), logits(kind, trained(kind)))
    assert all(not torch.equal(o, torch.arange(len(o))) for o in orders)


@both_kinds
@pytest.mark.parametrize("copies", [2, 3, 5])
def test_shuffled_copies_of_one_network_are_that_network(kind, copies):
    """The orders are found, nothing grows, and nothing is lost; a plain average loses all."""
    made = [shuffled(kind, trained(kind), seed) for seed in range(copies)]
    replies = replied([tree for tree, _ in made])
    state = merge(unmatched(trained(kind)), replies, Prior())
    assert wide(state.model) == wide(trained(kind)) == state.numbers["hidden_units"]
    close(logits(kind, state.model), logits(kind, trained(kind)))
    assert accuracy(kind, state.model) == pytest.approx(accuracy(kind, trained(kind)), abs=1e-3)
    assert accuracy(kind, average(replies)) < accuracy(kind, trained(kind)) - 0.15
    frozen = merge(unmatched(trained(kind)), replies, Prior(), frozen=len(CHAIN[kind]) - 1)
    for j, (_, orders) in enumerate(made):
        for place, order, first in zip(frozen.places[j], orders, made[0][1], strict=True):
            assert torch.equal(first[place], order)


@both_kinds
@pytest.mark.parametrize("prior", [ALL_NEW, Prior(gamma=7), Prior(gamma=30, sweeps=0)])
def test_copies_that_are_not_matched_are_still_that_network(kind, prior):
    """A neuron that others lack has weights of 0 at them, so what it adds is not added twice."""
    made = [shuffled(kind, trained(kind), seed)[0] for seed in range(3)]
    state = merge(unmatched(trained(kind)), replied(made), prior)
    assert wide(state.model) > wide(trained(kind))
    assert (wide(state.model) == 3 * wide(trained(kind))) == (prior == ALL_NEW)
    close(logits(kind, state.model), logits(kind, trained(kind)))


@pytest.mark.parametrize("copies", [1, 4])
def test_the_posterior_of_the_default_prior_shrinks_by_its_factors(copies):
    """sigma = sigma0 = 1: hidden rows by J / (J + 1), the output layer by one half."""
    made = [shuffled("mlp", trained("mlp"), seed)[0] for seed in range(copies)]
    state = merge(unmatched(made[0]), replied(made), Prior(), shrink=True)
    for key, value in state.model.items():
        factor = 0.5 if key.startswith("classifier.head") else copies / (copies + 1)
        torch.testing.assert_close(value, factor * made[0][key])
    flat = merge(unmatched(made[0]), replied(made), Prior(sigma0=1e4), shrink=True)
    for key, value in flat.model.items():
        torch.testing.assert_close(value, made[0][key])


def test_the_settings_of_pfnm_reach_the_merge():
    made = [shuffled("mlp", trained("mlp"), seed)[0] for seed in range(2)]
    state, replies = unmatched(trained("mlp")), replied(made)
    bias = {
        posterior: PFNM(posterior=posterior).server(state, replies).model["classifier.head.bias"]
        for posterior in ("mean", "map")
    }
    torch.testing.assert_close(bias["map"], bias["mean"] / 2)
    assert wide(PFNM(prior=ALL_NEW).server(state, replies).model) == 2 * wide(state.model)
    assert wide(FedMA(prior=ALL_NEW).server(state, replies).model) == 2 * wide(state.model)


# What is equal to what


@both_kinds
def test_one_client_keeps_its_network(kind):
    (reply, *_) = independent(kind).values()
    state = merge(unmatched(trained(kind)), {0: reply}, Prior())
    for key, value in reply.trees["model"].items():
        assert torch.equal(state.model[key], value), key
        assert state.model[key].dtype == value.dtype


@both_kinds
def test_equal_clients_in_one_order_are_fedavg(kind):
    replies = replied([trained(kind)] * 3)
    state, expected = merge(unmatched(trained(kind)), replies, Prior()), average(replies)
    for key, value in expected.items():
        assert torch.equal(state.model[key], value), key
        assert state.model[key].stride() == value.stride(), key
    assert part(state.shared, state.held(1)) is state.shared


@both_kinds
def test_the_order_of_a_clients_units_does_not_matter(kind):
    replies = independent(kind)
    tree, _ = shuffled(kind, replies[1].trees["model"], 5)
    other = replace(replies[1], trees={**replies[1].trees, "model": tree})
    for prior in (Prior(), Prior(gamma=7)):
        state = unmatched(trained(kind))
        one = merge(state, replies, prior)
        two = merge(state, {**replies, 1: other}, prior)
        assert wide(one.model) == wide(two.model)
        close(logits(kind, one.model), logits(kind, two.model))


def test_hidden_layers_that_are_matched_in_place_are_averaged_by_examples():
    """Batch-norm statistics are pooled, as in every average of networks."""
    base = trained("conv")
    moved = {k: v + 0.01 if v.is_floating_point() else v + 3 for k, v in base.items()}
    state = merge(unmatched(base), replied([base, moved], sizes=[30, 10]), Prior())
    for key, value in mean([base, moved], [30, 10]).items():
        if not key.startswith("classifier.head"):
            assert torch.equal(state.model[key], value), key


def test_statistics_of_apart_clients_are_those_of_their_union():
    base = trained("conv")
    name = "encoder.layers.1.running_"
    apart = [
        {**base, f"{name}mean": torch.full((8,), m), f"{name}var": torch.ones(8)}
        for m in (-2.0, 2.0)
    ]
    state = merge(unmatched(base), replied(apart, sizes=[1, 1]), Prior())
    assert torch.equal(state.model[f"{name}var"], torch.full((8,), 5.0))


# The output layer


def test_the_output_layer_is_averaged_by_class_shares():
    base = trained("mlp")
    heads = [torch.full((10, 24), v) for v in (1.0, 4.0)]
    trees = [{**base, "classifier.head.weight": h} for h in heads]
    counts = torch.tensor([[3.0] + 9 * [1.0], [1.0] + 9 * [0.0]])
    head = merge(unmatched(base), replied(trees, counts), Prior()).model["classifier.head.weight"]
    torch.testing.assert_close(head, torch.tensor([[1.75]] + 9 * [[1.0]]).expand(10, 24))


@both_kinds
@pytest.mark.parametrize("shrink", [False, True])
def test_a_class_that_nobody_has_counts_by_equal_shares(kind, shrink):
    base, counts = trained(kind), torch.ones(2, 10)
    counts[:, 3] = torch.tensor([0.0, -0.5])  # a noisy count may be below 0
    moved = {k: v + 1 if k.startswith("classifier.head") else v for k, v in base.items()}
    state = merge(unmatched(base), replied([base, moved], counts), Prior(), shrink=shrink)
    assert all(v.isfinite().all() for v in state.model.values())
    expected = (base["classifier.head.bias"] + 0.5) * (0.5 if shrink else 1)
    torch.testing.assert_close(state.model["classifier.head.bias"], expected)


# More neurons than a client has


def few(kind):
    """Replies of which some neurons are matched and some are not, and the state after them."""
    replies = independent(kind)
    state = merge(unmatched(trained(kind)), replies, Prior(gamma=7))
    assert wide(trained(kind)) < wide(state.model) < 3 * wide(trained(kind))
    return replies, state


@both_kinds
def test_a_client_is_sent_a_network_of_its_own_width(kind):
    _, state = few(kind)
    for j in (0, 1, 2, 99):
        tree = part(state.shared, state.held(j))
        assert {k: v.shape for k, v in tree.items()} == {
            k: v.shape for k, v in trained(kind).items()
        }
        for place in state.held(j):
            assert (place.diff() > 0).all()


@both_kinds
def test_clients_that_send_back_what_they_were_sent_change_nothing(kind):
    replies, state = few(kind)
    places = state.places
    for frozen in range(len(CHAIN[kind])):
        now = replace(state, frozen=frozen)
        echoes = {
            j: replace(r, trees={**r.trees, "model": part(state.shared, state.held(j))})
            for j, r in replies.items()
        }
        # All stand still but the output layer: the matching itself is not what is asked here.
        after = merge(replace(now, frozen=len(CHAIN[kind]) - 1), echoes, Prior(), frozen)
        for key, value in state.model.items():
            torch.testing.assert_close(after.model[key], value, msg=key)
        for j, own in after.places.items():
            assert all(map(torch.equal, own, places[j]))


@both_kinds
def test_whoever_is_new_is_sent_the_most_used_neurons(kind):
    replies, state = few(kind)
    for i, common in enumerate(state.held(99)):
        use = torch.zeros(max(int(own[i].max()) for own in state.places.values()) + 1)
        for j, own in state.places.items():
            use[own[i]] += replies[j].numbers["examples"]
        rest = torch.ones(len(use), dtype=torch.bool)
        rest[common] = False
        assert len(common) == len(state.places[0][i])
        if rest.any():
            assert use[common].min() >= use[rest].max()
    apart = replied([r.trees["model"] for r in replies.values()], sizes=[1, 50, 2])
    state = merge(state, apart, ALL_NEW)
    assert all(map(torch.equal, state.held(99), state.places[1]))


@both_kinds
def test_a_network_takes_a_wider_model_and_is_as_before_after_it(kind):
    _, state = few(kind)
    net, fresh = digits_net(kind, 3), digits_net(kind, 3)
    load(net, state.model)
    with torch.no_grad():
        assert net.eval()(digits().test.x).shape == (len(digits().test), 10)
        expected = logits(kind, trained(kind))
        load(net, trained(kind))
        load(fresh, trained(kind))
        assert torch.equal(net(digits().test.x), expected)
    for key, value in fresh.state_dict().items():
        assert torch.equal(net.state_dict()[key], value), key
        assert net.state_dict()[key].stride() == value.stride(), key
    assert all(p.requires_grad for p in net.parameters())
    shard = three_shards()[0]
    x = torch.nn.functional.interpolate(shard.x, (8, 8))
    trees = [
        fit(client(Shard(x, shard.y), n), trained(kind)).tree
        for n in (load(net, state.model), fresh)
    ]
    assert all(torch.equal(v, trees[1][k]) for k, v in trees[0].items())


def go(method, workers=None, rounds=8, net=None, shards=None, **engine):
    shards = shards or three_shards()
    task = Task(CLASSES, len(shards), rounds, 6)
    local = Training(epochs=2, batch_size=8, lr=0.01)
    net = net or small_net()
    given = (method, dict(enumerate(shards)), unseen(), net, task, local, LOOSE, Rng(0))
    return simulate(Crew(*given), Engine(**engine), Ledger(), workers=workers)


WIDER = Prior(gamma=30)
GROWN = {"pfnm": (PFNM(prior=WIDER), small_mlp), "fedma": (FedMA(prior=WIDER), small_net)}

every_grown = pytest.mark.parametrize("name", GROWN)


@every_grown
def test_a_wider_model_is_scored_alike_in_workers_and_together(name):
    method, net = GROWN[name]
    alone = go(method, net=net())
    initial = wide(trunk(net().state_dict()))
    assert all(initial < r.numbers["hidden_units"] <= 3 * initial for r in alone.rounds)
    assert alone.rounds[-1].test_loss < alone.rounds[0].test_loss
    pair = Workers(2)
    try:
        apart = go(method, pair, net=net())
    finally:
        pair.close()
    assert all(torch.equal(v, apart.model[k]) for k, v in alone.model.items())
    assert [r.test_loss for r in apart.rounds] == [r.test_loss for r in alone.rounds]
    at_once = go(method, net=net(), clients_at_once=3)
    assert [r.numbers["hidden_units"] for r in at_once.rounds] == [
        r.numbers["hidden_units"] for r in alone.rounds
    ]
    assert at_once.rounds[-1].test_loss == pytest.approx(alone.rounds[-1].test_loss, abs=0.01)


@pytest.mark.parametrize("gamma", [1.0, 3.0])
@pytest.mark.parametrize("share", [0.3, 0.7])
@every_grown
def test_some_of_the_clients_take_part(name, share, gamma):
    method, net = GROWN[name]
    method = replace(method, prior=Prior(gamma=gamma))
    outcome = go(method, net=net(), rounds=14, cohort=share)
    assert all(v.isfinite().all() for v in outcome.model.values())
    assert outcome.rounds[-1].test_loss < outcome.rounds[0].test_loss


def test_the_log_tells_the_width_of_a_method_inside():
    outcome = go(FedMix(inner=FedMA()), rounds=2)
    assert outcome.rounds[-1].numbers["hidden_units"] == wide(trunk(small_net().state_dict()))
    assert "hidden_units" not in go(FedAvg(), rounds=1).rounds[0].numbers


# Layers that stand still


class Watched:
    """FedMA, noting what is asked and what state there was."""

    def __init__(self, method):
        self.method, self.about, self.asks, self.states = method, method.about, [], []

    def start(self, model, task):
        return self.method.start(model, task)

    def ask(self, state, client, round):
        return self.method.ask(state, client, round)

    def client(self, ask, me):
        reply, memory = self.method.client(ask, me)
        self.asks.append((ask, me, reply, memory))
        return reply, memory

    def server(self, state, replies):
        self.states.append(self.method.server(state, replies))
        return self.states[-1]


def still(tree, frozen):
    """The trained entries of the first layers."""
    ends = ("running_mean", "running_var", "num_batches_tracked")
    return [k for keys in layers(tree)[:frozen] for k in keys if not k.endswith(ends)]


@pytest.mark.parametrize("prior", [Prior(), WIDER])
def test_matched_layers_stand_still_until_all_are_matched(prior):
    spy = Watched(FedMA(prior=prior))
    go(spy, rounds=13)
    assert [s.frozen for s in spy.states] == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1]
    for before, after in zip(spy.states, spy.states[1:], strict=False):
        for key in still(before.model, before.frozen):
            assert torch.equal(before.model[key], after.model[key]), key
        nxt = layers(before.model)[before.frozen][0]
        same = before.model[nxt].shape == after.model[nxt].shape
        assert not (same and torch.equal(before.model[nxt], after.model[nxt]))
    statistics = [s.model["encoder.layers.1.running_mean"] for s in spy.states[:5]]
    assert not torch.equal(statistics[0], statistics[4])  # they go on under the new weights
    for ask, me, reply, memory in spy.asks:
        frozen, own = ask.numbers["frozen"], memory.trees["model"]
        kept = still(own, int(frozen))
        assert not set(kept) & set(reply.trees["model"])
        held = me.memory.trees.get("model", {})
        for key in kept:
            assert torch.equal(own[key], ask.trees["model"].get(key, held.get(key))), key
        counted = {k for keys in layers(own)[: int(frozen)] for k in keys} - set(kept)
        assert counted <= set(ask.trees["model"])  # as they are after averaging
        news = {k for k in ask.trees["model"] if "running" not in k and "tracked" not in k}
        assert news == set(still(own, 6)) if not frozen else news <= set(kept)


def test_a_client_goes_on_from_its_own_layers_and_takes_the_matched_one():
    spy = Watched(FedMA())
    go(spy, rounds=3)
    first, second = spy.asks[:3], spy.asks[3:6]
    for (_, _, _, memory), (ask, me, _, _) in zip(first, second, strict=True):
        own = memory.trees["model"]
        assert me.memory.trees["model"] is own or all(
            torch.equal(v, me.memory.trees["model"][k]) for k, v in own.items()
        )
        assert set(ask.trees["model"]) == set(layers(own)[0])
        assert not torch.equal(
            ask.trees["model"]["encoder.layers.0.weight"], own["encoder.layers.0.weight"]
        )


def test_layers_that_stand_still_do_so_whoever_replies():
    """Units whose owners all stay silent keep their weights and statistics."""
    replies = independent("conv")
    state = merge(unmatched(trained("conv")), replies, WIDER, frozen=2)
    moved = {k: v + 1 if "running" in k else v for k, v in replies[1].trees["model"].items()}
    other = replace(replies[1], trees={**replies[1].trees, "model": moved})
    after = merge(state, {1: other}, WIDER, frozen=3)
    silent = torch.ones(len(state.model["encoder.layers.0.bias"]), dtype=torch.bool)
    silent[state.places[1][0]] = False
    assert silent.any()
    for key in (k for keys in layers(state.model)[:2] for k in keys):
        if key in still(state.model, 2):
            assert torch.equal(after.model[key], state.model[key]), key
            assert torch.equal(after.shared[key], state.shared[key]), key
    for name in ("running_mean", "running_var"):
        key = f"encoder.layers.1.{name}"
        assert torch.equal(after.model[key][silent], state.model[key][silent])
        assert not torch.equal(after.model[key][~silent], state.model[key][~silent])


def test_who_missed_a_round_of_a_cycle_is_sent_a_whole_network():
    spy = FedMA(prior=WIDER)
    state = spy.start(trunk(small_net().state_dict()), TASK)
    memories = {}
    for number, cohort in enumerate([(0, 1, 2), (0, 1), (0, 1, 2), (2,)], 1):
        asks = {c: spy.ask(state, c, number) for c in cohort}
        whole = {c for c, a in asks.items() if len(a.trees["model"]) == len(state.model)}
        assert whole == {1: {0, 1, 2}, 2: set(), 3: {2}, 4: set()}[number]
        replies = {}
        for c, ask in asks.items():
            shard = three_shards()[c]
            me = client(shard, small_net(9), number, c, memory=memories.get(c, Memory()))
            replies[c], memories[c] = spy.client(ask, me)
        state = spy.server(state, replies)
        assert all(v.isfinite().all() for v in state.model.values())


# What cannot be matched


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (PFNM(), {}, r"got convolutions; set net\.kind=mlp"),
        (PFNM(), {"norm": "group"}, "set net"),
        (
            FedMA(),
            {"norm": "group"},
            r"group normalisation ties some together; set net\.norm=batch",
        ),
        (
            FedDPMS(**GOES_ON, inner=PFNM()),
            {"kind": "mlp"},
            "decoders at the clients would not follow",
        ),
        (FedDPMS(**GOES_ON, inner=FedMA()), {}, "decoders at the clients would not follow"),
    ],
)
def test_a_network_that_cannot_be_matched_is_refused_in_one_line(method, settings, words):
    net = build((1, 4, 4), CLASSES, NetSettings(width=0.25, latent=6, **settings), Rng(0))
    with pytest.raises(ConfigError, match=words) as caught:
        go(method, net=net)
    assert "\n" not in str(caught.value)


# On data


@pytest.mark.parametrize(("kind", "method"), [("mlp", PFNM()), ("mlp", FedMA()), ("conv", FedMA())])
def test_independent_clients_are_better_matched_than_averaged(kind, method):
    gaps = []
    for draw in range(4):
        replies = independent(kind, 2, draw=draw)
        state = method.server(method.start(trained(kind), TASK), replies)
        gaps.append(accuracy(kind, state.model) - accuracy(kind, average(replies)))
    assert np.mean(gaps) > 0.05, gaps


# Whole runs


QUICK = {
    "rounds": 2,
    "data": {"name": "digits", "fraction": 0.08},
    "partition": {"clients": 3, "beta": 5.0},
    "local": {"epochs": 1},
    "net": {"kind": "mlp", "width": 0.25},
}


def test_a_network_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    settings = config.parse({**QUICK, "net": {"kind": "conv"}, "method": "pfnm"})
    with pytest.raises(ConfigError, match="got convolutions"):
        runs.run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")
@pytest.mark.parametrize("method", ["pfnm", "fedma"])
def test_private_training_covers_class_counts(method):
    """An mlp has no batch norm, so nothing has to be set for that; counts are paid for once."""
    privacy = {
        "target_epsilon": 50.0,
        "weights": "noisy",
        "training": {"kind": "dpsgd", "expected_examples": 64},
    }
    settings = config.parse({**QUICK, "method": method, "privacy": privacy})
    result = runs.run(settings)
    assert len(result.rounds) == 2
    assert "clear" not in result.claim
    counts = [r.numbers["hidden_units"] for r in result.rounds]
    assert counts[0] > 0
    in_the_clear = runs.run(replace(settings, privacy=Privacy()))
    assert "clear" in in_the_clear.claim


def test_a_run_with_a_wider_model_can_be_attacked(tmp_path):
    settings = config.parse({**QUICK, "method": {"name": "pfnm", "prior": {"gamma": 30.0}}})
    result = runs.run(settings, tmp_path / "run")
    assert result.rounds[-1].numbers["hidden_units"] > 32 + 32 + 32 + 128
    assert 0 < audits.attack(tmp_path / "run").model.auc < 1
