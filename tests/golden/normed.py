"""A small network with batch normalisation, in torch and in NumPy."""

from dataclasses import dataclass

import numpy as np
import torch
from reference import CLASSES, LATENT, PIXELS, Params, cross_entropies, linear, one_hot, sgd
from torch import nn

BUFFERS = ("norm.running_mean", "norm.running_var")


class Normed(nn.Module):
    """Linear, batch normalisation, tanh, linear; in float64."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(PIXELS, LATENT)
        self.norm = nn.BatchNorm1d(LATENT)
        self.head = nn.Linear(LATENT, CLASSES)
        self.double()
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 1, generator=g)

    def features(self, x):
        return self.norm(self.mean(x.flatten(1))).tanh()

    def forward(self, x):
        return self.head(self.features(x))


@dataclass(frozen=True)
class Plan:
    """How to build it."""

    shape: tuple[int, int, int] = (1, 2, 2)

    def build(self) -> Normed:
        return Normed()


def variance(a):
    """Unbiased, by channel."""
    return ((a - a.mean(0)) ** 2).sum(0) / (len(a) - 1)


def scores(p: Params, a, mean, var):
    """Logits of what enters the normalisation, normalised by these statistics."""
    z = (a - mean) / np.sqrt(var + 1e-5) * p["norm.weight"] + p["norm.bias"]
    return linear(p, "head", np.tanh(z))


def training_scores(p: Params, x):
    """Logits by the batch's own statistics."""
    a = linear(p, "mean", x)
    return scores(p, a, a.mean(0), ((a - a.mean(0)) ** 2).mean(0))


def scores_of(p: Params, kept: Params, x):
    """Logits by the running statistics."""
    return scores(p, linear(p, "mean", x), *(kept[k] for k in BUFFERS))


def train(p: Params, kept: Params, steps, lr: float) -> tuple[Params, Params]:
    """Plain gradient steps over (x, y, weight); the running statistics move by a tenth each."""
    for x, y, weight in steps:

        def loss(p, x=x, y=y, v=weight):
            return (v * cross_entropies(training_scores(p, x), one_hot(y))).sum() / v.sum()

        a = linear(p, "mean", x)
        now = dict(zip(BUFFERS, (a.mean(0), variance(a)), strict=True))
        kept = {k: 0.9 * kept[k] + 0.1 * now[k] for k in BUFFERS}
        p = sgd(p, [loss], lr)
    return p, kept


def merge(trained, sizes) -> tuple[Params, Params]:
    """Means by size; the variance is that of the union."""
    shares = [n / sum(sizes) for n in sizes]

    def mean(trees):
        return {k: sum(s * t[k] for s, t in zip(shares, trees, strict=True)) for k in trees[0]}

    first, second = BUFFERS
    squares = mean([{second: kept[first] ** 2 + kept[second]} for _, kept in trained])
    kept = mean([kept for _, kept in trained])
    kept[second] = squares[second] - kept[first] ** 2
    return mean([p for p, _ in trained]), kept


def made_of(p: Params, kept: Params, y, how, draws, adam):
    """Images of these labels: Adam on logits of pixels, gradients by the complex step."""
    start = torch.randn(len(y), *Plan().shape, generator=draws, dtype=torch.float64)
    m, v = (kept[k] for k in BUFFERS)

    def loss(u):
        x = 1 / (1 + np.exp(-u["u"]))
        a = linear(p, "mean", x)
        near = ((a.mean(0) - m) ** 2).sum()
        near = near + ((np.sqrt(variance(a) + 1e-5) - np.sqrt(v + 1e-5)) ** 2).sum()
        return cross_entropies(scores(p, a, m, v), one_hot(y)).mean() + how.beta * near

    u = adam({"u": start.flatten(1).numpy()}, [loss] * how.steps, how.lr)["u"]
    return 1 / (1 + np.exp(-u))
