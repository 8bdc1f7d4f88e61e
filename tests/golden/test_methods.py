"""Every method against its paper's formulas in NumPy: three unequal clients, several steps."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import (
    CLASSES,
    LATENT,
    Tiny,
    as_numpy,
    average,
    batches,
    classify,
    code,
    cross_entropies,
    decode,
    features,
    gradient,
    linear,
    logits,
    one_hot,
    sgd,
)

from feddpms.algorithms import (
    METHODS,
    Central,
    FedAvg,
    FedDPMS,
    FedMix,
    FedProx,
    Local,
    Moon,
    Training,
)
from feddpms.engine import Crew, Engine, simulate
from feddpms.models import VaeSettings, trunk
from feddpms.privacy import Ledger, Privacy, calibrate
from feddpms.rng import Rng
from feddpms.synthesis import Drawing, Matching
from feddpms.types import Shard, Task
from small import GOES_ON

SIZES, ROUNDS, EPOCHS, BATCH, LR = [5, 9, 7], 3, 2, 4, 0.5
TRAINING = Training(
    epochs=EPOCHS, batch_size=BATCH, optimizer="sgd", lr=LR, momentum=0.0, lr_period=100
)
PRIVACY = Privacy(
    target_epsilon=20.0, count_noise_multiplier=1.0, min_class_count=1.5, l2_clip=0.35
)
TASK = Task(classes=CLASSES, clients=3, rounds=ROUNDS, latent=LATENT)


def make_shards() -> list[Shard]:
    """Client k has few examples of class k."""
    g = torch.Generator().manual_seed(7)
    made = []
    for k, n in enumerate(SIZES):
        y = torch.tensor([(k + 1 + i % 2) % CLASSES for i in range(n)])
        x = torch.rand(n, 1, 2, 2, generator=g, dtype=torch.float64)
        made.append(Shard(x, y))
    return made


def arrays(shard: Shard):
    return shard.x.flatten(1).numpy(), shard.y.numpy()


def run(method, training=TRAINING):
    """The method's model, round by round, and what its clients keep."""
    net, shards = Tiny(), make_shards()
    models = []
    clients = dict(enumerate(shards))
    crew = Crew(method, clients, shards[0], net, TASK, training, PRIVACY, Rng(0))
    outcome = simulate(
        crew, Engine(), Ledger(), lambda *_: models.append(as_numpy(net.state_dict()))
    )
    return models, outcome


def stream(client: int, round: int) -> Rng:
    return Rng(0).at("client", client, round)


def expect_equal(got, want):
    """Equal to rounding; and the weights did move, in both directions."""
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-7, atol=1e-9, err_msg=key)
    start = as_numpy(Tiny().state_dict())
    moved = np.concatenate([(want[k] - start[k]).ravel() for k in want])
    assert moved.min() < -1e-3
    assert moved.max() > 1e-3


def rounds_of(
    local_loss, after=lambda k, model: None, step=lambda p, losses, t: sgd(p, losses, LR)
):
    """The models of FedAvg with `local_loss(p, w, k, x, y, t)` as the loss of a client."""
    shards, w, history = make_shards(), trunk(as_numpy(Tiny().state_dict())), []
    for t in range(1, ROUNDS + 1):
        models = []
        for k, shard in enumerate(shards):
            x, y = arrays(shard)
            steps = batches(len(y), EPOCHS, BATCH, stream(k, t))
            losses = [
                lambda p, i=i, x=x, y=y, k=k, w=w, t=t: local_loss(p, w, k, x[i], y[i], t)
                for i in steps
            ]
            models.append(step(w, losses, t))
            after(k, models[-1])
        w = average(models, SIZES)
        history.append(w)
    return history


def plain(p, w, k, x, y, t):
    return cross_entropies(logits(p, x), one_hot(y)).mean()


def test_fedavg():
    models, outcome = run(FedAvg())
    for got, want in zip(models, rounds_of(plain), strict=True):
        expect_equal(got, want)
    expect_equal(as_numpy(outcome.model), rounds_of(plain)[-1])


def test_fedprox():
    mu = 0.7

    def loss(p, w, k, x, y, t):
        return plain(p, w, k, x, y, t) + mu / 2 * sum(((p[n] - w[n]) ** 2).sum() for n in p)

    models, _ = run(FedProx(mu=mu))
    for got, want in zip(models, rounds_of(loss), strict=True):
        expect_equal(got, want)


def momentum(p, losses, lr):
    """v <- rho v + g + decay p;  p <- p - lr v, from v = 0."""
    v = dict.fromkeys(p, 0)
    for loss in losses:
        g = gradient(loss, p)
        v = {k: 0.6 * v[k] + g[k] + 0.01 * p[k] for k in p}
        p = {k: p[k] - lr * v[k] for k in p}
    return p


def adam(p, losses, lr):
    """Kingma and Ba (2015), algorithm 1, from zero moments."""
    m, v = dict.fromkeys(p, 0), dict.fromkeys(p, 0)
    for t, loss in enumerate(losses, 1):
        g = gradient(loss, p)
        m = {k: 0.9 * m[k] + 0.1 * g[k] for k in p}
        v = {k: 0.999 * v[k] + 0.001 * g[k] ** 2 for k in p}
        step = {k: m[k] / (1 - 0.9**t) / (np.sqrt(v[k] / (1 - 0.999**t)) + 1e-8) for k in p}
        p = {k: p[k] - lr * step[k] for k in p}
    return p


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (momentum, {"optimizer": "sgd", "momentum": 0.6, "weight_decay": 0.01, "lr": 0.2}),
        (adam, {"optimizer": "adam", "lr": 0.05}),
    ],
)
def test_optimisers_start_anew_and_the_rate_halves_each_period(optimizer, settings):
    training = Training(epochs=EPOCHS, batch_size=BATCH, lr_period=2, lr_decay=0.5, **settings)
    models, _ = run(FedAvg(), training)
    rates = [settings["lr"], settings["lr"], settings["lr"] / 2]
    want = rounds_of(plain, step=lambda p, losses, t: optimizer(p, losses, rates[t - 1]))
    for got, expected in zip(models, want, strict=True):
        expect_equal(got, expected)


def cosine(a, b):
    return (a * b).sum(1) / np.sqrt((a * a).sum(1)) / np.sqrt((b * b).sum(1))


def test_moon():
    mu, temperature, previous = 1.5, 0.4, {}

    def loss(p, w, k, x, y, t):
        if k not in previous or t == 1:
            return plain(p, w, k, x, y, t)
        z = features(p, x)
        near = np.exp(cosine(z, features(w, x)) / temperature)
        far = np.exp(cosine(z, features(previous[k], x)) / temperature)
        return plain(p, w, k, x, y, t) - mu * np.log(near / (near + far)).mean()

    models, _ = run(Moon(mu=mu, temperature=temperature))
    for got, want in zip(models, rounds_of(loss, previous.__setitem__), strict=True):
        expect_equal(got, want)


@pytest.mark.parametrize("bounded", [False, True])
def test_fedmix(bounded):
    lam, group_size, h = 0.2, 3, 1e-4
    pool_x, pool_y = [], []
    for k, shard in enumerate(make_shards()):
        x, y = arrays(shard)
        order = torch.randperm(len(y), generator=stream(k, 1).torch("groups")).numpy()
        for group in np.array_split(order, len(y) // group_size):
            pool_x.append(x[group].mean(0))
            pool_y.append(one_hot(y[group]).mean(0))
    pool_x, pool_y = np.array(pool_x), np.array(pool_y)
    draws = {(k, t): stream(k, t).torch("mixtures") for k in range(3) for t in range(1, ROUNDS + 1)}
    picks = {}

    def loss(p, w, k, x, y, t):
        key = (k, t, x.tobytes())
        if key not in picks:
            picks[key] = torch.randint(len(pool_x), (len(y),), generator=draws[k, t]).numpy()
        x_bar, y_bar = pool_x[picks[key]], pool_y[picks[key]]
        v = (1 - lam) * x

        def own(v):
            return cross_entropies(logits(p, v), one_hot(y))

        slope = (own(v + h * x_bar) - own(v - h * x_bar)) / (2 * h)
        other = cross_entropies(logits(p, v), y_bar)
        mixture = own(v) + lam * slope
        if bounded:
            mixture = np.where(mixture.real < 0, 0, mixture)
        return ((1 - lam) * mixture + lam * other).mean()

    models, _ = run(FedMix(lam=lam, group_size=group_size, bounded=bounded))
    for got, want in zip(models, rounds_of(loss), strict=True):
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_local():
    _, outcome = run(Local())
    for k, shard in enumerate(make_shards()):
        x, y = arrays(shard)
        p = trunk(as_numpy(Tiny().state_dict()))
        for t in range(1, ROUNDS + 1):
            for i in batches(len(y), EPOCHS, BATCH, stream(k, t)):
                p = sgd(p, [lambda p, i=i, x=x, y=y: plain(p, None, k, x[i], y[i], t)], LR)  # noqa: B023
        expect_equal(as_numpy(outcome.memories[k].trees["model"]), p)


def test_central():
    models, _ = run(Central())
    shards = make_shards()
    x = np.concatenate([arrays(s)[0] for s in shards])
    y = np.concatenate([arrays(s)[1] for s in shards])
    p = trunk(as_numpy(Tiny().state_dict()))
    for t in range(1, ROUNDS + 1):
        steps = batches(len(y), EPOCHS, BATCH, stream(0, t))
        for i in steps:
            p = sgd(p, [lambda p, i=i: plain(p, None, 0, x[i], y[i], t)], LR)  # noqa: B023
        expect_equal(models[t - 1], p)


LAMBDA, M0, S0 = 0.3, 0.4, 0.5
DRAWING = Drawing(per_class=3, spread=0.8, tries=4, weight=0.5, filter="global")
VAE = VaeSettings(weight=LAMBDA, prior_mean=M0, prior_scale=S0)


def prepare_vae():
    """The preliminary round: cross entropy + lambda (divergence + squared error), all averaged."""
    models = []
    for k, shard in enumerate(make_shards()):
        x, y = arrays(shard)
        noise = stream(k, 1).torch("latent noise")
        losses = []
        for i in batches(len(y), EPOCHS, BATCH, stream(k, 1)):
            eps = torch.randn(len(i), LATENT, generator=noise, dtype=torch.float64).numpy()

            def loss(p, x=x[i], y=y[i], eps=eps):
                m, s = code(p, x), np.exp(linear(p, "log_variance", x) / 2)
                z = m + s * eps
                kl = (np.log(S0 / s) + (s**2 + (m - M0) ** 2) / (2 * S0**2) - 0.5).sum(1)
                rebuild = ((decode(p, z) - x) ** 2).sum(1)
                return (
                    cross_entropies(classify(p, z), one_hot(y)).mean()
                    + LAMBDA * (kl + rebuild).mean()
                )

            losses.append(loss)
        models.append(sgd(as_numpy(Tiny().state_dict()), losses, LR))
    return average(models, SIZES)


def release(w, k):
    """Noisy counts, and noisy means of the classes whose noisy count is large enough."""
    x, y = arrays(make_shards()[k])
    centred = code(w, x) - 0.5
    radius, multipliers = PRIVACY.l2_clip, calibrate(PRIVACY)
    norms = np.sqrt((centred**2).sum(1))
    assert norms.max() > radius > norms.min()  # some codes are clipped, some are not
    sums, n = np.zeros((CLASSES, LATENT)), np.zeros(CLASSES)
    for z, c, norm in zip(centred, y, norms, strict=True):
        sums[c] += z * min(1, radius / norm)
        n[c] += 1
    noise = stream(k, 2).numpy("privacy noise", "latent means")
    draw = noise.standard_normal((CLASSES, LATENT))
    sums = sums + multipliers.latent * radius * draw
    noise = stream(k, 2).numpy("privacy noise", "class histogram")
    draw = noise.standard_normal(CLASSES)
    n = n + PRIVACY.count_noise_multiplier * draw
    means = {
        c: np.clip(0.5 + sums[c] / n[c], 0, 1)
        for c in range(CLASSES)
        if n[c] >= PRIVACY.min_class_count
    }
    return n, means


def synthesise(w, k, releases):
    """What client k decodes of the classes that it is short of and others released."""
    counts, _ = releases[k]
    need = [c for c in range(CLASSES) if counts[c] < 0.5 * np.clip(counts, 0, None).mean()]
    sources = {
        c: [releases[j][1][c] for j in range(3) if j != k and c in releases[j][1]] for c in need
    }
    kept = {c: [] for c, means in sources.items() if means}
    positive = np.clip(counts, 0, None)
    amount = {c: min(DRAWING.per_class, max(1, round(positive.mean() - positive[c]))) for c in kept}
    noise = stream(k, 2).torch("synthesis")
    for _ in range(DRAWING.tries):
        wanted = [
            (c, sources[c][i % len(sources[c])])
            for c in kept
            for i in range(amount[c] - len(kept[c]))
        ]
        if not wanted:
            break
        draw = torch.randn(len(wanted), LATENT, generator=noise, dtype=torch.float64).numpy()
        for (c, mean), eps in zip(wanted, draw, strict=True):
            x = decode(w, np.clip(mean + DRAWING.spread * eps, 0, 1)[None])[0]
            if logits(w, x[None])[0].argmax() == c:
                kept[c].append(x)
    x = np.array([x for c in kept for x in kept[c]])
    return x.reshape(-1, 4), np.array([c for c in kept for _ in kept[c]], dtype=int)


def test_feddpms():
    w = full = prepare_vae()
    models, outcome = run(
        FedDPMS(**GOES_ON, preliminary_rounds=1, vae=VAE, synthesis=DRAWING, matching=Matching())
    )
    sent_on = {k: v for k, v in full.items() if not k.startswith("log_variance")}
    expect_equal(models[0], sent_on)
    releases = [release(full, k) for k in range(3)]
    extra = [synthesise(full, k, releases) for k in range(3)]
    assert sum(len(y) for _, y in extra) >= 3  # the case does make synthetic examples
    for k, (x, _) in enumerate(extra):
        made = outcome.memories[k].synthetic
        assert (made is None and not len(x)) or np.allclose(made.x.flatten(1), x)
    w = trunk(full)
    for t in (2, 3):
        locals_ = []
        for k, shard in enumerate(make_shards()):
            (x, y), (xs, ys) = arrays(shard), extra[k]
            x_all, y_all = np.concatenate([x, xs]), np.concatenate([y, ys])
            weight = np.array([1.0] * len(y) + [DRAWING.weight] * len(ys))
            further, losses = stream(k, t).torch("synthetic batches"), []
            steps = batches(len(y), EPOCHS, BATCH, stream(k, t))
            per_epoch = len(steps) // EPOCHS
            ride = min(BATCH, -(-len(ys) // per_epoch))
            for e in range(EPOCHS):
                order = torch.randperm(len(ys), generator=further).numpy() + len(y)
                for s in range(per_epoch):
                    i = np.concatenate([steps[e * per_epoch + s], order[s * ride : (s + 1) * ride]])

                    def loss(p, x=x_all[i], y=y_all[i], v=weight[i]):
                        each = cross_entropies(logits(p, x), one_hot(y))
                        return (v * each).sum() / v.sum()

                    losses.append(loss)
            locals_.append(sgd(w, losses, LR))
        w = average(locals_, SIZES)
        expect_equal({k: v for k, v in models[t - 1].items() if k in w}, w)


def test_every_method_has_a_golden_reference():
    files = Path(__file__).parent.glob("test_*.py")
    tests = re.findall(r"^def (test_\w+)", "\n".join(f.read_text() for f in files), re.M)
    assert {f"test_{name}" for name in METHODS} <= set(tests)
