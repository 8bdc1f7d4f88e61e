"""A common network out of clients' networks whose hidden units are matched.

Layers are matched from the first to the last hidden one, each with its inputs in the order of the
layer before; an input that a client lacks counts as a weight of 0. What is matched is averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from feddpms.algorithms.chain import as_weight, columns, layers, part
from feddpms.algorithms.method import Client
from feddpms.algorithms.neurons import Array, Prior, match
from feddpms.algorithms.trees import BUFFERS, VARIANCE, empty, mean_of
from feddpms.privacy import histogram
from feddpms.types import Message, Tree


@dataclass(frozen=True)
class Matched:
    """What the server remembers.

    Attributes:
        model: the global model; it may have more hidden units than a client's.
        shared: as `model`, but each weight is the mean over those clients alone that have both of
            its units; a client is sent its part of this.
        common: the most used units of each hidden layer, as many as a client has.
        places: of those who replied last, the global number of each of their units, by layer.
        frozen: how many layers stand still.
    """

    model: Tree
    shared: Tree
    common: tuple[Tensor, ...]
    places: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    frozen: int = 0

    @property
    def numbers(self) -> dict[str, float]:
        """What the log says of the server."""
        hidden = layers(self.model)[:-1]
        return {"hidden_units": sum(len(self.model[keys[0]]) for keys in hidden)}

    def held(self, client: int) -> tuple[Tensor, ...]:
        """The units that a client is sent: its own, or the most used ones if it has none."""
        return self.places.get(client, self.common)


def unmatched(model: Tree) -> Matched:
    """The initial model, all of which every client is sent."""
    widths = [len(model[keys[0]]) for keys in layers(model)[:-1]]
    return Matched(model, model, tuple(map(torch.arange, widths)))


def with_counts(reply: Message, me: Client) -> Message:
    """The reply with the client's class counts [classes], exact or noisy as its weight is."""
    if me.privacy.weights == "exact":
        counts = torch.bincount(me.shard.y, minlength=me.task.classes).double()
        paid = me.clear("class counts")
    else:
        noise = (me.privacy, me.account, me.noise, me.round)
        counts, paid = histogram(me.shard.y, me.task.classes, *noise)
    trees = {**reply.trees, "counts": {"counts": counts}}
    return replace(reply, trees=trees, events=tuple(dict.fromkeys(reply.events + paid)))


def merge(
    state: Matched,
    replies: Mapping[int, Message],
    prior: Prior,
    frozen: int = 0,
    shrink: bool = False,
) -> Matched:
    """Match the hidden units of those who replied, and average what is matched.

    Layers that stood still keep their weights and places; only their batch-norm statistics are
    averaged. The last layer is averaged by class: row c by each client's share of the examples of
    class c, or by equal shares where nobody has any.

    Args:
        state: what these clients were asked with.
        replies: by client; each with the trees `model` and `counts`, and the number `examples`.
        prior: how units are matched.
        frozen: how many layers stand still from now on.
        shrink: take a unit's posterior mean, which is nearer to 0, for the mean.
    """
    clients, names = sorted(replies), layers(state.model)
    given = _given([replies[c] for c in clients], state, [state.held(c) for c in clients])
    ridge = (prior.sigma / prior.sigma0) ** 2 if shrink else 0.0
    first = given.trees[0][names[0][0]].shape[1]
    units, found = _Units([np.arange(first)] * len(clients), first, given.weights), list[_Units]()
    pairs: _Pairs = {}
    for i, keys in enumerate(names[:-1]):
        inputs, rows = units, [units.inputs(j, t[keys[0]]) for j, t in enumerate(given.trees)]
        if i < state.frozen:
            at, size = [h[i].numpy() for h in given.held], len(state.model[keys[0]])
        else:
            head = names[-1][0] if i == len(names) - 2 else ""
            at = match(*_vectors(given, keys, rows, head), prior)
            size = 1 + max(int(a.max()) for a in at)
        units = _Units(at, size, given.weights)
        pairs |= _hidden(given.trees, keys, rows, units, inputs, ridge, state.model)
        if i < state.frozen:
            still = [k for k in keys if not k.endswith(BUFFERS)]
            pairs |= {k: (state.model[k], state.shared[k]) for k in still}
        found.append(units)
    pairs |= _head(given, names[-1], units, ridge, shrink)
    model, shared = ({k: pair[i] for k, pair in pairs.items()} for i in (0, 1))
    own = {c: _places(found, j, frozen) for j, c in enumerate(clients)}
    return Matched(model, shared, tuple(u.most_used() for u in found), own, frozen)


@dataclass(frozen=True)
class _Given:
    """What clients replied: whole networks, places of still layers, class shares and weights."""

    trees: list[Tree]
    held: list[tuple[Tensor, ...]]
    shares: Array
    weights: Array


def _given(replies: list[Message], state: Matched, held: list[tuple[Tensor, ...]]) -> _Given:
    """The replies with what stood still, class shares [clients, classes], weights of mean 1."""
    sent = [part(state.shared, at) for at in held]
    trees = [{**s, **r.trees["model"]} for s, r in zip(sent, replies, strict=True)]
    counts = np.array([r.trees["counts"]["counts"].numpy() for r in replies]).clip(min=0)
    total = counts.sum(0)
    shares = np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / len(counts))
    sizes = np.array([r.numbers["examples"] for r in replies])
    return _Given(trees, held, shares, sizes / sizes.mean())


@dataclass(frozen=True)
class _Units:
    """A layer's units: the global number of each client's, how many there are, clients' weights."""

    at: Sequence[Array]
    size: int
    weights: Array

    def sum(self, values: Sequence[Array]) -> Array:
        """Weighted sum [size, ...] of what each client has for each of its units [L_j, ...]."""
        total = np.zeros((self.size, *values[0].shape[1:]))
        for at, value, weight in zip(self.at, values, self.weights, strict=True):
            total[at] += weight * value
        return total

    def owned(self) -> Array:
        """Weight of all clients that have a unit [size]."""
        return self.sum([np.ones(len(at)) for at in self.at])

    def most_used(self) -> Tensor:
        """The units of most weight, as many as a client has, in order."""
        order = np.argsort(-self.owned(), kind="stable")[: min(map(len, self.at))]
        return torch.from_numpy(np.sort(order))

    def has(self, j: int) -> Array:
        """Whether a client has a unit, 0 or 1 [size]."""
        return np.isin(np.arange(self.size), self.at[j]).astype(float)

    def inputs(self, j: int, weight: Tensor) -> Array:
        """A client's weight with an input from each of these units [out, taps, size]."""
        own = columns(weight, len(self.at[j])).double().numpy()
        filled = np.zeros((*own.shape[:2], self.size))
        filled[..., self.at[j]] = own
        return filled


def _vectors(
    given: _Given, keys: Sequence[str], rows: Sequence[Array], head: str
) -> tuple[list[Array], list[Array]]:
    """What each client's units are matched by [L_j, d], and the weight of each entry [d].

    It is all that is trained of a unit; in the last hidden layer, its weights to the logits too.
    """
    vectors, entries = [], []
    for tree, row, weight, share in zip(
        given.trees, rows, given.weights, given.shares, strict=True
    ):
        parts = [tree[k].double().numpy()[:, None] for k in keys[1:] if not k.endswith(BUFFERS)]
        vector = np.hstack([row.reshape(len(row), -1), *parts])
        entry = np.full(vector.shape[1], weight)
        if head:
            out = columns(tree[head], len(row)).double().numpy()  # [classes, taps, L_j]
            vector = np.hstack([vector, out.reshape(-1, len(row)).T])
            entry = np.concatenate([entry, share.repeat(out.shape[1])])
        vectors.append(vector)
        entries.append(entry)
    return vectors, entries


_Pairs = dict[str, tuple[Tensor, Tensor]]
"""entries of the global model, each with what is shared in its place"""


def _hidden(
    trees: Sequence[Tree],
    keys: Sequence[str],
    rows: Sequence[Array],
    units: _Units,
    inputs: _Units,
    ridge: float,
    old: Tree,
) -> _Pairs:
    """The averages of a hidden layer's entries, for the global model and for what is shared."""
    owned, total = units.owned(), units.sum(rows)
    both = units.sum([np.tile(inputs.has(j), (len(at), 1)) for j, at in enumerate(units.at)])
    denominators = (ridge + owned)[:, None, None], (ridge + both)[:, None]
    found = {keys[0]: _pair([_divided(total, d) for d in denominators], trees[0][keys[0]])}
    for key in keys[1:]:
        if not trees[0][key].ndim:
            mean = np.max([_numbers(t, key) for t in trees], 0)
        else:
            ground = owned if key.endswith(BUFFERS) else ridge + owned
            mean = _divided(units.sum([_numbers(t, key) for t in trees]), ground)
            if key.endswith(VARIANCE):  # pooled, as in `trees.mean`
                centres = [_numbers(t, mean_of(key)) for t in trees]
                mean = (mean - _divided(units.sum(centres), owned) ** 2).clip(min=0)
            if not owned.all():  # of a layer that stands still, no owner of a unit replied
                mean = np.where(owned > 0, mean, old[key].double().numpy())
        found[key] = _pair([mean, mean], trees[0][key])
    return found


def _head(given: _Given, keys: Sequence[str], inputs: _Units, ridge: float, shrink: bool) -> _Pairs:
    """The last layer's averages by class shares."""
    trees, shares = given.trees, given.shares
    rows = [inputs.inputs(j, t[keys[0]]) for j, t in enumerate(trees)]
    total = np.sum([s[:, None, None] * r for s, r in zip(shares, rows, strict=True)], 0)
    owned = np.sum([s[:, None] * inputs.has(j) for j, s in enumerate(shares)], 0)[:, None]
    # The posterior is that of a unit's owners; a mean takes in those without it, as weights of 0.
    whole = owned if shrink else shares.sum(0)[:, None, None]
    pair = [_divided(total, ridge + d) for d in (whole, owned)]
    found = {keys[0]: _pair(pair, trees[0][keys[0]])}
    for key in keys[1:]:
        total = np.sum([s * _numbers(t, key) for s, t in zip(shares, trees, strict=True)], 0)
        mean = total / (ridge + shares.sum(0))
        found[key] = _pair([mean, mean], trees[0][key])
    return found


def _numbers(tree: Tree, key: str) -> Array:
    """An entry in float64; of a variance, the mean square that goes with it, which adds up."""
    value = tree[key].double().numpy()
    return value + _numbers(tree, mean_of(key)) ** 2 if key.endswith(VARIANCE) else value


def _divided(total: Array, by: Array) -> Array:
    """A quotient that is 0 where nobody has anything."""
    return total / np.where(by > 0, by, 1)


def _pair(values: Sequence[Array], like: Tensor) -> tuple[Tensor, Tensor]:
    """Two averages as entries of a tree."""
    whole, own = (torch.from_numpy(np.asarray(v)) for v in values)
    if like.ndim > 1:
        whole, own = as_weight(whole, like), as_weight(own, like)
    return empty(like, whole.shape).copy_(whole), empty(like, own.shape).copy_(own)


def _places(layers: Sequence[_Units], j: int, frozen: int) -> tuple[Tensor, ...]:
    """A client's units: of layers that stand still in its own order, of others in the global."""
    own = [units.at[j] for units in layers]
    return tuple(torch.from_numpy(at if i < frozen else np.sort(at)) for i, at in enumerate(own))
