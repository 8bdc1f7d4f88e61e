"""What the golden tests compare with: the paper's formulas in plain NumPy, slow and obvious.

Gradients come from the complex step: for an analytic loss, Im L(p + ih) / h is dL/dp to machine
precision, so nothing here repeats the product's automatic differentiation.
"""

import numpy as np
import torch
from torch import nn

H = 1e-30
PIXELS, LATENT, HIDDEN, CLASSES = 4, 3, 3, 3
Params = dict[str, np.ndarray]


class Tiny(nn.Module):
    """The product's side: a network with every part that a method may use, in float64."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.mean = nn.Linear(PIXELS, LATENT)
        self.log_variance = nn.Linear(PIXELS, LATENT)
        self.decoder = nn.Linear(LATENT, PIXELS)
        self.body = nn.Linear(LATENT, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.double()
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 1, generator=g)

    def encode(self, x):
        return self.code(x), self.log_variance(x.flatten(1))

    def code(self, x):
        return self.mean(x.flatten(1)).sigmoid()

    def decode(self, z):
        return self.decoder(z).sigmoid().view(-1, 1, 2, 2)

    def features(self, x):
        return self.body(self.code(x)).tanh()

    def classify(self, z):
        return self.head(self.body(z).tanh())

    def forward(self, x):
        return self.classify(self.code(x))


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def linear(p: Params, name: str, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def code(p, x):
    return sigmoid(linear(p, "mean", x))


def decode(p, z):
    return sigmoid(linear(p, "decoder", z))


def features(p, x):
    return np.tanh(linear(p, "body", code(p, x)))


def classify(p, z):
    return linear(p, "head", np.tanh(linear(p, "body", z)))


def logits(p, x):
    return classify(p, code(p, x))


def cross_entropies(scores, targets):
    """-sum_c target_c log softmax_c, one an example."""
    log_z = np.log(np.exp(scores).sum(1, keepdims=True))
    return -(targets * (scores - log_z)).sum(1)


def one_hot(y):
    return np.eye(CLASSES)[y]


def gradient(loss, p: Params) -> Params:
    """dL/dp by the complex step, one parameter at a time."""
    grads = {}
    for key, value in p.items():
        g = np.zeros_like(value)
        for i in np.ndindex(value.shape):
            bumped = {k: v.astype(complex) for k, v in p.items()}
            bumped[key][i] += 1j * H
            g[i] = loss(bumped).imag / H
        grads[key] = g
    return grads


def sgd(p: Params, losses, lr: float) -> Params:
    """One plain gradient step for each loss."""
    for loss in losses:
        g = gradient(loss, p)
        p = {k: p[k] - lr * g[k] for k in p}
    return p


def batches(n: int, epochs: int, size: int, rng) -> list[np.ndarray]:
    """Index of each step's examples, from the client's stream of batches.

    A last batch of one joins the one before it.
    """
    g, steps = rng.torch("batches"), []
    for _ in range(epochs):
        order = torch.randperm(n, generator=g).numpy()
        cuts = list(range(size, n, size))
        if cuts and n - cuts[-1] == 1:
            cuts.pop()
        steps += np.split(order, cuts)
    return steps


def average(models: list[Params], sizes: list[int]) -> Params:
    """sum_i (n_i / n) y_i."""
    total = sum(sizes)
    return {k: sum(n / total * m[k] for n, m in zip(sizes, models, strict=True)) for k in models[0]}


def as_numpy(tree) -> Params:
    return {k: v.numpy().copy() for k, v in tree.items()}
