"""Mixup against its formula in NumPy."""

import numpy as np
import pytest
import torch
from reference import cross_entropies, logits, one_hot
from test_methods import ROUNDS, expect_equal, rounds_of, run, stream

from contract.test_contract import same
from feddpms.algorithms import FedAvg, FedProx, Mixup, Moon
from feddpms.errors import ConfigError
from feddpms.types import Batch
from small import TASK, client, small_net, three_shards


def test_mixup():
    alpha, mu, made = 0.6, 0.3, {}
    shares = {(k, t): stream(k, t).numpy("mixup shares") for k in range(3) for t in (1, 2, 3)}
    orders = {(k, t): stream(k, t).torch("mixup partners") for k in range(3) for t in (1, 2, 3)}

    def loss(p, w, k, x, y, t):
        key = (k, t, x.tobytes())
        if key not in made:
            lam = shares[k, t].beta(alpha, alpha)
            made[key] = lam, torch.randperm(len(y), generator=orders[k, t]).numpy()
        lam, other = made[key]
        scores = logits(p, lam * x + (1 - lam) * x[other])
        a, b = (cross_entropies(scores, one_hot(labels)).mean() for labels in (y, y[other]))
        near = mu / 2 * sum(((p[n] - w[n]) ** 2).sum() for n in p)
        return lam * a + (1 - lam) * b + near

    assert ROUNDS == 3
    models, _ = run(Mixup(alpha=alpha, inner=FedProx(mu=mu)))
    for got, want in zip(models, rounds_of(loss), strict=True):
        expect_equal(got, want)
    drawn = [lam for lam, _ in made.values()]
    assert min(drawn) < 0.3
    assert max(drawn) > 0.7


def test_one_share_and_one_order_for_a_batch_and_new_ones_for_the_next():
    seen = []

    class Net:
        def __call__(self, x):
            seen.append(x)
            return torch.zeros(len(x), 3, requires_grad=True)

    losses = []

    class Inner(FedAvg):
        def client(self, ask, me):
            losses.append(me.loss)
            return super().client(ask, me)

    method, shard = Mixup(alpha=1.0, inner=Inner()), three_shards()[0]
    state = method.start(small_net().state_dict(), TASK)
    method.client(method.ask(state, 0, 1), client(shard, small_net()))
    x, y, places = torch.eye(8).view(8, 1, 2, 4), torch.arange(8) % 3, torch.arange(8)
    for _ in range(2):
        losses[0](Net(), Batch(x, y, None, places))
    for rows in (s.flatten(1) for s in seen):
        own = rows.diagonal()
        fixed = own == 1  # an example may be its own partner
        (lam,) = own[~fixed].unique().tolist()
        assert 0 < lam < 1
        assert torch.allclose(rows.sum(0), torch.ones(8))  # every example is a partner once
        assert torch.allclose(rows.sum(1), torch.ones(8))
    assert not torch.equal(*seen)


@pytest.mark.parametrize("alpha", [1e-300, 1e-5, 1.0, 1e5, 1e300])
def test_shares_are_numbers_for_every_alpha(alpha):
    me = client(three_shards()[0], small_net())
    method = Mixup(alpha=alpha)
    state = method.start(small_net().state_dict(), TASK)
    reply, _ = method.client(method.ask(state, 0, 1), me)
    assert np.isfinite(reply.numbers["train_loss"])
    assert all(v.isfinite().all() for v in reply.trees["model"].values())


@pytest.mark.parametrize("inner", [FedAvg(), FedProx(mu=0.1), Moon()])
def test_what_is_sent_and_kept_is_the_inner_methods(inner):
    """Nothing more crosses the wire, and without mixing every bit is its own."""
    shard, start = three_shards()[0], small_net().state_dict()
    plain, none, some = inner, Mixup(alpha=0.0, inner=inner), Mixup(inner=inner)
    answers = []
    for method in (plain, none, some):
        state = method.start(start, TASK)
        ask = method.ask(state, 0, 1)
        reply, memory = method.client(ask, client(shard, small_net()))
        answers.append((ask, reply, memory, method.server(state, {0: reply})))
    assert same(answers[0], answers[1])
    for one, other in zip(answers[0][:2], answers[2][:2], strict=True):
        assert (one.kind, list(one.trees), list(one.numbers)) == (
            other.kind,
            list(other.trees),
            list(other.numbers),
        )
        assert one.events == other.events
    assert not same(answers[0][1], answers[2][1])


def test_it_wraps_a_method_to_train_with():
    with pytest.raises(ConfigError, match="mixup wraps a training method"):
        Mixup(inner=Mixup()).start({}, TASK)


def test_it_is_no_mean_over_examples():
    assert not Mixup.about.per_example
