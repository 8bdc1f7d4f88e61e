"""Methods that control drift or normalise it, against their papers' formulas in NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import Tiny, as_numpy, average, batches, gradient
from test_methods import (
    BATCH,
    EPOCHS,
    LR,
    ROUNDS,
    SIZES,
    TRAINING,
    arrays,
    expect_equal,
    make_shards,
    momentum,
    plain,
    run,
    stream,
)

from contract.test_contract import settled
from feddpms.algorithms import (
    METHODS,
    FedAvg,
    FedDC,
    FedDPMS,
    FedDyn,
    FedNova,
    Scaffold,
    Training,
)
from feddpms.algorithms.correction import effective_steps, require_optimizer
from feddpms.config import parse
from feddpms.errors import ConfigError
from feddpms.models import trunk
from feddpms.types import Shard, Task
from small import GOES_ON, client, small_net, three_shards

N = len(SIZES)


def begin():
    return trunk(as_numpy(Tiny().state_dict()))


def losses_of(t):
    """The loss of each local step of each client in round t."""
    for k, shard in enumerate(make_shards()):
        x, y = arrays(shard)
        steps = batches(len(y), EPOCHS, BATCH, stream(k, t))
        yield k, [lambda p, i=i, x=x, y=y, k=k: plain(p, None, k, x[i], y[i], 0) for i in steps]


def each(function, *trees):
    return {k: function(*(t[k] for t in trees)) for k in trees[0]}


def mean(trees):
    return each(lambda *v: sum(v) / len(v), *trees)


def descend(w, losses, addend):
    """Plain steps down each loss and `addend(y)`."""
    y = w
    for loss in losses:
        g, more = gradient(loss, y), addend(y)
        y = {k: y[k] - LR * (g[k] + more[k]) for k in y}
    return y


def expect_rounds(method, want, training=TRAINING):
    models, _ = run(method, training)
    assert len(models) == len(want) == ROUNDS
    for got, w in zip(models, want, strict=True):
        expect_equal(got, w)


def test_scaffold():
    w, history = begin(), []
    c, own = each(np.zeros_like, w), [each(np.zeros_like, w) for _ in SIZES]
    for t in range(1, ROUNDS + 1):
        ends, news = [], []
        for k, losses in losses_of(t):
            drift = each(lambda a, b: a - b, c, own[k])
            y = descend(w, losses, lambda _, drift=drift: drift)
            ends.append(y)
            scale = len(losses) * LR
            news.append(each(lambda o, g, a, b: o - g + (a - b) / scale, own[k], c, w, y))  # noqa: B023
        c = each(lambda g, n, o: g + n - o, c, mean(news), mean(own))
        own, step = news, each(lambda a, b: a - b, mean(ends), w)
        w = each(lambda a, b: a + 1.5 * b, w, step)
        history.append(w)
    expect_rounds(Scaffold(server_lr=1.5), history)


def test_scaffold_decoupled_from_adam():
    """Adam's step first; then y <- y - lr (c - c_i); c_i is the mean of Adam's own steps."""
    w, history, lr = begin(), [], 0.05
    c, own = each(np.zeros_like, w), [each(np.zeros_like, w) for _ in SIZES]
    for t in range(1, ROUNDS + 1):
        ends, news = [], []
        for k, losses in losses_of(t):
            y, m, v = w, each(np.zeros_like, w), each(np.zeros_like, w)
            for s, loss in enumerate(losses, 1):
                g = gradient(loss, y)
                m = each(lambda a, b: 0.9 * a + 0.1 * b, m, g)
                v = each(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
                for n in y:
                    size = np.sqrt(v[n] / (1 - 0.999**s)) + 1e-8
                    adam = m[n] / (1 - 0.9**s) / size
                    y = {**y, n: y[n] - lr * adam - lr * (c[n] - own[k][n])}
            ends.append(y)
            scale = len(losses) * lr
            news.append(each(lambda o, g, a, b: o - g + (a - b) / scale, own[k], c, w, y))  # noqa: B023
        c = each(lambda g, n, o: g + n - o, c, mean(news), mean(own))
        own, w = news, mean(ends)
        history.append(w)
    training = replace(TRAINING, optimizer="adam", lr=lr)
    expect_rounds(Scaffold(with_adam="decoupled"), history, training)


def recursion(steps, rho):
    """||a||_1 as the gradients of each step enter the displacement, one after another."""
    inner = total = 0.0
    for _ in range(steps):
        inner = rho * inner + 1
        total += inner
    return total


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9, 0.99])
def test_effective_steps_are_the_recursions(rho):
    local = Training(optimizer="sgd", momentum=rho)
    for steps in (1, 2, 7, 80):
        assert effective_steps(local, steps) == pytest.approx(recursion(steps, rho), rel=1e-12)
    assert effective_steps(Training(optimizer="adam"), 7) == 7


def test_fednova():
    training = replace(TRAINING, momentum=0.6, weight_decay=0.01, lr=0.2)
    w, history = begin(), []
    share = [n / sum(SIZES) for n in SIZES]
    for t in range(1, ROUNDS + 1):
        ends, norms = [], []
        for _, losses in losses_of(t):
            ends.append(momentum(w, losses, 0.2))
            norms.append(recursion(len(losses), 0.6))
        assert len(set(norms)) > 1
        effective = sum(p * a for p, a in zip(share, norms, strict=True))
        directions = [
            each(lambda u, v, a=a: (u - v) / a, w, y) for y, a in zip(ends, norms, strict=True)
        ]
        direction = average(directions, SIZES)
        w = each(lambda a, d: a - effective * d, w, direction)  # noqa: B023
        history.append(w)
    expect_rounds(FedNova(), history, training)


def test_feddyn():
    alpha, w, history = 0.3, begin(), []
    h, dual = each(np.zeros_like, w), [each(np.zeros_like, w) for _ in SIZES]
    for t in range(1, ROUNDS + 1):
        ends = []
        for k, losses in losses_of(t):
            addend = lambda y, k=k, w=w: each(lambda a, b, d: alpha * (a - b) - d, y, w, dual[k])  # noqa: E731
            ends.append(descend(w, losses, addend))
            dual[k] = each(lambda d, a, b: d - alpha * (a - b), dual[k], ends[-1], w)
        h = each(lambda a, b, c: a - alpha * (b - c), h, mean(ends), w)
        for key, value in mean(dual).items():
            np.testing.assert_allclose(h[key], value, atol=1e-12)
        history.append(mean(ends))
        w = each(lambda a, b: a - b / alpha, mean(ends), h)
    expect_rounds(FedDyn(alpha=alpha), history)


def test_feddc():
    alpha, w, history = 0.3, begin(), []
    c, own, h = (each(np.zeros_like, w), [each(np.zeros_like, w)] * N, [each(np.zeros_like, w)] * N)
    for t in range(1, ROUNDS + 1):
        ends, news, drifts = [], [], []
        for k, losses in losses_of(t):
            addend = lambda y, k=k, w=w, c=c, own=own, h=h: each(  # noqa: E731
                lambda a, d, b, g, o: alpha * (a + d - b) + g - o, y, h[k], w, c, own[k]
            )
            y = descend(w, losses, addend)
            scale = len(losses) * LR
            news.append(each(lambda o, g, a, b: o - g + (a - b) / scale, own[k], c, w, y))  # noqa: B023
            drifts.append(each(lambda d, a, b: d + a - b, h[k], y, w))
            ends.append(y)
        c = each(lambda g, n, o: g + n - o, c, mean(news), mean(own))
        own, h = news, drifts
        history.append(mean(ends))
        w = each(lambda a, b: a + b, mean(ends), mean(h))
    expect_rounds(FedDC(alpha=alpha), history)


class Point(torch.nn.Module):
    """A network that is one vector, in float64."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))


def quadratics(clients=10):
    """A_i, b_i of L_i(w) = 1/2 (w - b_i)' A_i (w - b_i): unlike optima and unlike curvatures."""
    rng = np.random.default_rng(3)
    for _ in range(clients):
        q, _ = np.linalg.qr(rng.standard_normal((4, 4)))
        yield (
            torch.from_numpy(q @ np.diag(rng.uniform(0.5, 2, 4)) @ q.T),
            torch.from_numpy(rng.standard_normal(4) * 3),
        )


def distance(method, rounds, epochs, lr, cohort=3, clients=10):
    """How far the model ends from the true optimum, and what the server and clients then hold."""
    problems = list(quadratics(clients))
    optimum = torch.linalg.solve(sum(a for a, _ in problems), sum(a @ b for a, b in problems))
    local = Training(epochs=epochs, batch_size=2, optimizer="sgd", momentum=0.0, lr=lr)
    task, net, memories = Task(3, clients, rounds, 4), Point(), {}
    shard = Shard(torch.zeros(2, 1, 4, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    state = method.start({k: v.clone() for k, v in net.state_dict().items()}, task)
    draws = np.random.default_rng(0)
    for t in range(1, rounds + 1):
        replies = {}
        for i in draws.choice(clients, cohort, replace=False).tolist():
            a, b = problems[i]
            loss = lambda net, batch, a=a, b=b: 0.5 * (net.w - b) @ a @ (net.w - b)  # noqa: E731
            me = client(shard, net, round=1, id=i, local=local, loss=loss, task=task)
            me = replace(me, round=t, memory=memories.get(i, me.memory))
            replies[i], memories[i] = method.client(method.ask(state, i, t), me)
        state = method.server(state, replies)
        yield float((state.model["w"] - optimum).norm()), state, memories


def last(*args, **more):
    *_, end = distance(*args, **more)
    return end


@pytest.mark.parametrize(
    ("method", "epochs"), [(Scaffold(), 10), (FedDyn(alpha=2.0), 25), (FedDC(alpha=0.01), 10)]
)
def test_three_of_ten_unlike_clients_reach_the_optimum_of_all(method, epochs):
    assert last(method, 190, epochs, 0.1)[0] < 1e-8


def test_fedavg_does_not_reach_it():
    assert last(FedAvg(), 190, 10, 0.1)[0] > 0.1


def test_what_clients_keep_averages_to_what_the_server_keeps():
    """Over all clients, those that never took part counted as zero."""
    for method, kept, held in [
        (Scaffold(), "control", "control"),
        (FedDyn(), "dual", "h"),
        (FedDC(), "control", "control"),
        (FedDC(), "drift", "drift"),
    ]:
        for gap, state, memories in distance(method, 6, 3, 0.1):
            assert gap > 0
            total = sum(m.trees[kept]["w"] for m in memories.values()) / 10
            torch.testing.assert_close(getattr(state, held)["w"], total, rtol=0, atol=1e-12)


def test_exact_local_solutions_make_the_dual_the_gradient():
    for _, _, memories in distance(FedDyn(alpha=0.5), 1, 400, 0.2):
        for i, memory in memories.items():
            a, b = list(quadratics())[i]
            theta = -memory.trees["dual"]["w"] / 0.5  # lam = -alpha (theta - 0)
            torch.testing.assert_close(memory.trees["dual"]["w"], a @ (theta - b))


def test_unequal_work_biases_fedavg_and_not_fednova():
    """Clients of like curvature, one of which takes five times the steps."""
    optima = [torch.tensor([float(i)] * 4, dtype=torch.float64) for i in range(2)]
    for method, want in [(FedNova(), 0.5), (FedAvg(), None)]:
        net = Point()
        state = method.start({k: v.clone() for k, v in net.state_dict().items()}, Task(3, 2, 1, 4))
        shard = Shard(torch.zeros(2, 1, 4, 4).double(), torch.zeros(2, dtype=torch.int64))
        for _ in range(400):
            replies = {}
            for i, b in enumerate(optima):
                local = Training(
                    epochs=(2, 10)[i], batch_size=2, optimizer="sgd", momentum=0.0, lr=0.01
                )
                loss = lambda net, batch, b=b: 0.5 * (net.w - b).square().sum()  # noqa: E731
                me = client(shard, net, id=i, local=local, loss=loss)
                replies[i], _ = method.client(method.ask(state, i, 1), me)
            state = method.server(state, replies)
        if want is None:
            assert float(state.model["w"][0]) > 0.75
        else:
            assert float(state.model["w"][0]) == pytest.approx(want, abs=0.02)


@pytest.mark.parametrize("name", ["scaffold", "fednova", "feddyn", "feddc"])
def test_adam_is_refused_unless_the_settings_say_what_to_do(name):
    adam = parse({"method": name})
    with pytest.raises(ConfigError, match=r"local.optimizer=sgd .*method.with_adam=decoupled"):
        require_optimizer(adam.method, adam.local)
    require_optimizer(adam.method, replace(adam.local, optimizer="sgd"))
    decoupled = parse({"method": {"name": name, "with_adam": "decoupled"}})
    require_optimizer(decoupled.method, decoupled.local)
    with pytest.raises(ConfigError, match="defined for SGD"):
        run(adam.method, replace(TRAINING, optimizer="adam"))  # from Python, without a run folder
    inner = parse({"method": f"feddpms+{name}"})
    with pytest.raises(ConfigError, match=r"method.inner.with_adam=decoupled"):
        require_optimizer(inner.method, inner.local)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "feddc"])
def test_inside_feddpms_the_decoder_is_not_steered(name):
    """It stays with a client for several rounds, so nothing brings it back to a global one."""
    inner = settled(METHODS[name])
    method = FedDPMS(**GOES_ON, inner=inner, preliminary_rounds=2)
    net, task = small_net(), Task(3, 3, 5, 6)
    state = method.start(net.state_dict(), task)
    for t in (1, 2):
        me = client(three_shards()[0], net, round=t)
        _, memory = method.client(method.ask(state, 0, t), me)
        assert memory.inner.trees
        for tree in memory.inner.trees.values():
            assert not any(k.startswith("decoder") for k in tree)
            assert any(k.startswith("encoder") for k in tree)
