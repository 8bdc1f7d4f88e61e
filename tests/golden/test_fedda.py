"""FedDA against its formulas in NumPy: two rounds of knowledge, then FedAvg on what was made."""

import numpy as np
import pytest
import torch
from reference import (
    CLASSES,
    LATENT,
    PIXELS,
    Tiny,
    as_numpy,
    average,
    batches,
    cross_entropies,
    linear,
    logits,
    one_hot,
    sgd,
    sigmoid,
)
from test_methods import (
    BATCH,
    EPOCHS,
    LR,
    SIZES,
    adam,
    arrays,
    expect_equal,
    make_shards,
    run,
    stream,
)
from torch import nn

from feddpms.algorithms import FedDA, decoding
from feddpms.models import ConditionalSettings, trunk
from feddpms.synthesis import Filling, Guidance
from feddpms.synthesis.knowledge import DRAWS, READ

Q, GAMMA, RATE, SCALE, SEPARATION, MOST, WEIGHT = 4, 0.8, 0.05, 0.9, 1.5, 3, 0.6
M = SEPARATION / np.sqrt(2) * np.eye(CLASSES, LATENT)


class TinyConditional(nn.Module):
    """The product's side: an auto-encoder without convolutions, in float64."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Linear(PIXELS, LATENT)
        self.log_variance = nn.Linear(PIXELS, LATENT)
        self.open = nn.Linear(LATENT, Q)
        self.draw = nn.Linear(Q, PIXELS)
        self.double()
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 0.7, generator=g)
        self.means = torch.from_numpy(M)

    def encode(self, x):
        return self.offset(x.flatten(1)), self.log_variance(x.flatten(1))

    def features(self, z):
        return self.open(z).tanh()

    def decode(self, z):
        return self.draw(self.features(z)).sigmoid().view(-1, 1, 2, 2)


def features(p, z):
    return np.tanh(linear(p, "open", z))


def decode(p, z):
    return sigmoid(linear(p, "draw", features(p, z)))


def softmax(a):
    return np.exp(a) / np.exp(a).sum(-1, keepdims=True)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).numpy()


def learned(p, k, t, fused):
    """A round's training of client k's auto-encoder, from p."""
    x, y = arrays(make_shards()[k])
    noise, draws = stream(k, t).torch("latent noise"), stream(k, t).torch("prior draws")
    losses = []
    for i in batches(len(y), EPOCHS, BATCH, stream(k, t)):
        eps, further = normal(noise, len(i), LATENT), None
        if fused:
            further = normal(draws, len(fused) * DRAWS, LATENT).reshape(-1, DRAWS, LATENT)

        def loss(p, x=x[i], y=y[i], eps=eps, further=further):
            f, s = linear(p, "offset", x), np.exp(linear(p, "log_variance", x) / 2)
            kl = ((f**2 + s**2 - 1) / 2 - np.log(s)).sum(1)
            error = ((decode(p, M[y] + f + s * eps) - x) ** 2).sum(1) / (2 * SCALE**2)
            value = (kl + error).mean()
            for row, (c, fused_c) in enumerate(fused.items()):
                own = softmax(features(p, M[c] + further[row]).mean(0))
                value = value + GAMMA * (own * np.log(own / softmax(fused_c))).sum()
            return value

        losses.append(loss)
    return adam(p, losses, RATE)


def known(p, k, t):
    """What client k tells of its classes after round t."""
    codes = stream(k, t).torch("knowledge")
    own = sorted(set(make_shards()[k].y.tolist()))
    return {c: features(p, M[c] + normal(codes, READ, LATENT)).mean(0) for c in own}


def fused_by(reference, told):
    """Fused knowledge of each class, from what each client told."""
    fused = {}
    for c in range(CLASSES):
        k = np.array([known[c] for known in told if c in known])
        asked = k if reference == "self" else k.mean(0, keepdims=True)
        fused[c] = softmax(asked @ k.T / np.sqrt(Q)).mean(0) @ k
    return fused


def made(p, k):
    """What client k makes in the round after."""
    y = make_shards()[k].y.numpy()
    counts = np.bincount(y, minlength=CLASSES)
    labels = np.repeat(np.arange(CLASSES), np.minimum(counts.max() - counts, MOST))
    z = M[labels] + normal(stream(k, 3).torch("synthesis"), len(labels), LATENT)
    return decode(p, z), labels


@pytest.mark.parametrize("reference", ["self", "mean"])
def test_fedda(reference, monkeypatch):
    monkeypatch.setattr(decoding, "build_conditional", lambda *_: TinyConditional())
    method = FedDA(
        preliminary_rounds=2,
        guidance=Guidance(gamma=GAMMA, reference=reference),
        filling=Filling(per_class=MOST, weight=WEIGHT),
        auto_encoder=ConditionalSettings(pixel_scale=SCALE, separation=SEPARATION, lr=RATE),
    )
    models, outcome = run(method)
    own, fused = [as_numpy(TinyConditional().state_dict())] * 3, {}
    for t in (1, 2):
        own = [learned(p, k, t, fused) for k, p in enumerate(own)]
        fused = fused_by(reference, [known(p, k, t) for k, p in enumerate(own)])
    extra = [made(p, k) for k, p in enumerate(own)]
    for k, (x, y) in enumerate(extra):
        got = outcome.memories[k].synthetic
        assert got.y.tolist() == y.tolist()
        np.testing.assert_allclose(got.x.flatten(1), x, rtol=1e-7)
    w, trained = trunk(as_numpy(Tiny().state_dict())), []
    for k, shard in enumerate(make_shards()):
        (x, y), (xs, ys) = arrays(shard), extra[k]
        x, y = np.concatenate([x, xs]), np.concatenate([y, ys])
        weight = np.array([1.0] * len(shard) + [WEIGHT] * len(ys))
        losses = []
        for i in ridden(len(shard), len(ys), stream(k, 3)):

            def loss(p, x=x[i], y=y[i], v=weight[i]):
                return (v * cross_entropies(logits(p, x), one_hot(y))).sum() / v.sum()

            losses.append(loss)
        trained.append(sgd(w, losses, LR))
    expect_equal(models[2], average(trained, SIZES))


def ridden(n, synthetic, rng):
    """Index of each step's examples: own ones, then the synthetic ones that ride along."""
    steps, further = batches(n, EPOCHS, BATCH, rng), rng.torch("synthetic batches")
    per_epoch = len(steps) // EPOCHS
    ride = min(BATCH, -(-synthetic // per_epoch))
    for e in range(EPOCHS):
        order = torch.randperm(synthetic, generator=further).numpy() + n
        for s in range(per_epoch):
            yield np.concatenate([steps[e * per_epoch + s], order[s * ride : (s + 1) * ride]])
