"""Server steps against their papers' formulas in NumPy: momentum, Adam and Yogi."""

import numpy as np
import pytest
import torch
from reference import Tiny, as_numpy, average, batches, sgd
from test_methods import (
    BATCH,
    EPOCHS,
    LR,
    ROUNDS,
    SIZES,
    arrays,
    expect_equal,
    make_shards,
    plain,
    run,
    stream,
)

from contract.test_contract import same
from feddpms.algorithms import FedAdam, FedAvg, FedAvgM, FedYogi
from feddpms.algorithms.trees import average as product_average
from feddpms.algorithms.trees import trained
from feddpms.models import trunk
from feddpms.types import Message
from small import TASK, small_net

B1, B2, TAU, RATE = 0.8, 0.95, 0.05, 0.3


def rounds_with(step):
    """The models of FedAvg's clients with `step(w, d)` at the server, d = mean model - w."""
    shards, w, history = make_shards(), trunk(as_numpy(Tiny().state_dict())), []
    for t in range(1, ROUNDS + 1):
        models = []
        for k, shard in enumerate(shards):
            x, y = arrays(shard)
            steps = batches(len(y), EPOCHS, BATCH, stream(k, t))
            losses = [lambda p, i=i, x=x, y=y: plain(p, None, 0, x[i], y[i], 0) for i in steps]
            models.append(sgd(w, losses, LR))
        mean = average(models, SIZES)
        w = step(w, {n: mean[n] - w[n] for n in w})
        history.append(w)
    return history


def test_fedavgm():
    """v <- b v + d;  w <- w + s v."""
    velocity = {}

    def step(w, d):
        for n in w:
            velocity[n] = 0.7 * velocity.get(n, 0) + d[n]
        return {n: w[n] + 0.6 * velocity[n] for n in w}

    models, outcome = run(FedAvgM(momentum=0.7, server_lr=0.6))
    want = rounds_with(step)
    for got, expected in zip(models, want, strict=True):
        expect_equal(got, expected)
    expect_equal(as_numpy(outcome.model), want[-1])


def adaptive(second):
    """m <- b1 m + (1 - b1) d;  v by `second`, from tau^2;  w <- w + s m / (sqrt(v) + tau)."""
    m, v = {}, {}

    def step(w, d):
        for n in w:
            m[n] = B1 * m.get(n, 0) + (1 - B1) * d[n]
            v[n] = second(v.get(n, np.full_like(w[n], TAU**2)), d[n] ** 2)
        return {n: w[n] + RATE * m[n] / (np.sqrt(v[n]) + TAU) for n in w}

    return step


SETTINGS = {"server_lr": RATE, "beta1": B1, "beta2": B2, "tau": TAU}


def test_fedadam():
    models, _ = run(FedAdam(**SETTINGS))
    want = rounds_with(adaptive(lambda v, dd: B2 * v + (1 - B2) * dd))
    for got, expected in zip(models, want, strict=True):
        expect_equal(got, expected)


def test_fedyogi():
    signs = set()

    def second(v, dd):
        signs.update(np.sign(v - dd).ravel().tolist())
        return v - (1 - B2) * dd * np.sign(v - dd)

    models, _ = run(FedYogi(**SETTINGS))
    want = rounds_with(adaptive(second))
    for got, expected in zip(models, want, strict=True):
        expect_equal(got, expected)
    assert signs == {-1.0, 1.0}  # both branches were taken


# What a step leaves alone, and where it starts


def replies(seed: int) -> dict[int, Message]:
    """Two clients' models of different sizes, counters and statistics among them."""
    made = {}
    for c, examples in enumerate((3, 5)):
        model = {k: v.clone() for k, v in small_net(seed + c).state_dict().items()}
        for k in model:
            if k.endswith("running_mean"):
                model[k] += 0.1 * (c + 1)
            if k.endswith("num_batches_tracked"):
                model[k] += 7 * c
        made[c] = Message("train", {"model": model}, {"examples": examples})
    return made


STEPS = {
    "fedavgm": FedAvgM(server_lr=0.5),
    "fedadam": FedAdam(),
    "fedyogi": FedYogi(),
}


@pytest.mark.parametrize("name", STEPS)
def test_statistics_and_counters_are_averaged_and_weights_take_the_step(name):
    method, start = STEPS[name], small_net(9).state_dict()
    state = method.start(start, TASK)
    for seed in (1, 3):
        given = replies(seed)
        mean, before = product_average(given), state.model
        state = method.server(state, given)
        assert list(state.model) == list(start)
        for k, v in state.model.items():
            assert v.dtype == start[k].dtype
            if k in trained(start):
                assert torch.equal(v, mean[k]) == torch.equal(mean[k], before[k])
            else:
                assert torch.equal(v, mean[k]), k


@pytest.mark.parametrize("name", STEPS)
def test_what_the_server_keeps_is_of_weights_alone_in_their_own_precision(name):
    state = STEPS[name].start(small_net().state_dict(), TASK)
    state = STEPS[name].server(state, replies(1))
    kept = [vars(state)[f] for f in vars(state) if f != "model"]
    assert len(kept) == {"fedavgm": 1}.get(name, 2)
    for tree in kept:
        assert list(tree) == list(trained(state.model))
        assert {v.dtype for v in tree.values()} == {torch.float32}


def test_without_momentum_and_at_rate_one_fedavgm_is_the_average_to_the_bit():
    method, fedavg = FedAvgM(momentum=0.0, server_lr=1.0), FedAvg()
    state, plain_state = (m.start(small_net(9).state_dict(), TASK) for m in (method, fedavg))
    for seed in (1, 3, 5):
        state = method.server(state, replies(seed))
        plain_state = fedavg.server(plain_state, replies(seed))
        assert same(state.model, plain_state.model)


def test_a_first_step_of_adam_is_that_of_yogi_only_where_the_update_is_small():
    """Yogi: v grows by (1 - b2) d^2 where d^2 > v; Adam: it moves towards d^2."""
    w = {"w": torch.tensor([0.0, 0.0])}
    far = {0: Message("train", {"model": {"w": torch.tensor([1e-3, 10.0])}}, {"examples": 1})}
    tau = 0.1
    adam = FedAdam(tau=tau).server(FedAdam(tau=tau).start(w, TASK), far).square["w"]
    yogi = FedYogi(tau=tau).server(FedYogi(tau=tau).start(w, TASK), far).square["w"]
    np.testing.assert_allclose(adam, [0.99 * tau**2 + 1e-8, 0.99 * tau**2 + 1], rtol=1e-5)
    np.testing.assert_allclose(yogi, [tau**2 - 1e-8, tau**2 + 1], rtol=1e-5)
