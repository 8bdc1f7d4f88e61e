"""What the golden tests of matched averaging compare with: one number at a time, slow and obvious.

A network is `mean`, `body`, `head`; each has a weight and a bias. Clients' hidden layers have as
many neurons each, the global ones as many as are found.
"""

from dataclasses import dataclass, field
from itertools import permutations
from math import log

import numpy as np

HIDDEN = ("mean", "body")


@dataclass
class Beliefs:
    sigma: float
    sigma0: float
    gamma: float
    sweeps: int


def match(vectors, weights, beliefs: Beliefs):
    """The most likely assignment, each client in turn by trying all; vectors[j][l] is a neuron."""
    clients, owners = len(vectors), []  # of each global neuron, which neuron each client has for it
    for _ in range(1 + beliefs.sweeps):
        for j in range(clients):
            for owner in owners:
                owner.pop(j, None)
            owners = [owner for owner in owners if owner]
            score = scores(j, vectors, weights, owners, beliefs)
            neurons, columns = score.shape
            best = max(
                permutations(range(columns), neurons),
                key=lambda at: sum(score[n, i] for n, i in enumerate(at)),
            )
            known = len(owners)
            for n, i in enumerate(best):
                if i < known:
                    owners[i][j] = n
                else:
                    owners.append({j: n})
    return owners


def scores(j, vectors, weights, owners, beliefs):
    """Of each neuron of client j: with each existing global neuron, then with the k-th new one."""
    ground, clients = 1 / beliefs.sigma0**2, len(vectors)
    rows = []
    for v in vectors[j]:
        p, row = weights[j] / beliefs.sigma**2, []
        for owner in owners:
            s = sum(weights[i] / beliefs.sigma**2 * vectors[i][n] for i, n in owner.items())
            q = sum(weights[i] / beliefs.sigma**2 for i in owner)
            fit = ((s + p * v) ** 2 / (ground + q + p)).sum() - (s**2 / (ground + q)).sum()
            row.append(fit + 2 * log(len(owner) / (clients - len(owner))))
        new = ((p * v) ** 2 / (ground + p)).sum() + 2 * log(beliefs.gamma / clients)
        rows.append(row + [new - 2 * log(k) for k in range(1, len(vectors[j]) + 1)])
    return np.array(rows)


@dataclass
class World:
    """The global model, what is shared of it, and who has which of its neurons."""

    model: dict
    shared: dict
    owners: dict = field(default_factory=dict)

    def order(self, layer, client):
        """Global numbers of a client's neurons, in its own order."""
        at = {o[client]: i for i, o in enumerate(self.owners[layer]) if client in o}
        return [at[n] for n in range(len(at))]


def view(shared, places):
    """A client's network: some neurons of each hidden layer, in an order."""
    a, b = places["mean"], places["body"]
    return {
        "mean.weight": shared["mean.weight"][a],
        "mean.bias": shared["mean.bias"][a],
        "body.weight": shared["body.weight"][np.ix_(b, a)],
        "body.bias": shared["body.bias"][b],
        "head.weight": shared["head.weight"][:, b],
        "head.bias": shared["head.bias"],
    }


def merge(
    nets, sizes, counts, beliefs: Beliefs, shrink: bool, fixed: World | None = None, still=()
):
    """The world after matching; layers in `still` keep the weights and owners that they have."""
    clients = range(len(nets))
    w = [n / np.mean(sizes) for n in sizes]
    share = counts / counts.sum(0)
    ridge = (beliefs.sigma / beliefs.sigma0) ** 2 if shrink else 0.0
    world, inputs = World({}, {}), None
    for layer in HIDDEN:
        filled = [placed(nets[j][f"{layer}.weight"], inputs, j) for j in clients]
        bias = [nets[j][f"{layer}.bias"] for j in clients]
        if layer in still:
            owners = fixed.owners[layer]
            for key in (f"{layer}.weight", f"{layer}.bias"):
                world.model[key], world.shared[key] = fixed.model[key], fixed.shared[key]
        else:
            vectors = [np.column_stack([filled[j], bias[j]]) for j in clients]
            weights = [np.full(vectors[j].shape[1], w[j]) for j in clients]
            if layer == "body":
                vectors = [np.column_stack([vectors[j], nets[j]["head.weight"].T]) for j in clients]
                weights = [np.concatenate([weights[j], share[j]]) for j in clients]
            owners = match(vectors, weights, beliefs)
            rows, own, biases = [], [], []
            for owner in owners:
                have = sum(w[j] for j in owner)
                total = sum(w[j] * filled[j][n] for j, n in owner.items())
                rows.append(total / (ridge + have))
                both = sum(w[j] * has(inputs, j, total) for j in owner)
                own.append(np.where(both > 0, total / np.where(both > 0, ridge + both, 1), 0))
                biases.append(sum(w[j] * bias[j][n] for j, n in owner.items()) / (ridge + have))
            world.model[f"{layer}.weight"], world.shared[f"{layer}.weight"] = map(
                np.array, (rows, own)
            )
            world.model[f"{layer}.bias"] = world.shared[f"{layer}.bias"] = np.array(biases)
        world.owners[layer] = inputs = owners
    heads = [placed(nets[j]["head.weight"], inputs, j) for j in clients]
    total = sum(share[j][:, None] * heads[j] for j in clients)
    have = sum(share[j][:, None] * has(inputs, j, total[0]) for j in clients)
    some = np.where(ridge + have > 0, ridge + have, 1)
    world.shared["head.weight"] = total / some
    world.model["head.weight"] = total / some if shrink else total
    bias = sum(share[j] * nets[j]["head.bias"] for j in clients) / (ridge + 1)
    world.model["head.bias"] = world.shared["head.bias"] = bias
    return world


def placed(weight, inputs, j):
    """Columns in the global order of the layer before, 0 where the client has none."""
    if inputs is None:
        return weight
    columns = [weight[:, o[j]] if j in o else np.zeros(len(weight)) for o in inputs]
    return np.column_stack(columns)


def has(inputs, j, like):
    """1 for each input that a client has."""
    return np.ones_like(like) if inputs is None else np.array([float(j in o) for o in inputs])
