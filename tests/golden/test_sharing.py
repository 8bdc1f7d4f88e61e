"""Sharing against plain NumPy: who sends, is sent and draws what, and what becomes of the model."""

import numpy as np
import torch
from reference import (
    CLASSES,
    LATENT,
    Tiny,
    as_numpy,
    average,
    batches,
    cross_entropies,
    logits,
    one_hot,
    sgd,
)
from test_methods import BATCH, EPOCHS, LR, TRAINING, arrays, expect_equal, stream

from feddpms.algorithms import Sharing
from feddpms.engine import Crew, Engine, InProcess, simulate
from feddpms.models import trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

COUNTS = np.array([[1, 9, 8], [2, 0, 8], [1, 6, 0], [4, 0, 1]])
"""examples of each class at each client"""
WANTED = np.array([[4, 0, 0], [0, 3, 0], [1, 0, 2], [0, 2, 0]])
"""by hand: to the mean count or MOST, of classes under half of it; client 0 waits for client 3"""
ROUNDS, FIRST, MOST, WEIGHT = 5, 1, 4, 0.5
AWAY = {(3, 1), (3, 2), (0, 3)}
"""client and round: client 3 comes late, and client 0 misses that round"""
PIXELS, LABEL = 4 * 8, 8
"""bytes"""


def make_shards() -> list[Shard]:
    g, made = torch.Generator().manual_seed(11), []
    for k, counts in enumerate(COUNTS):
        y = torch.arange(CLASSES).repeat_interleave(torch.tensor(counts))
        y = y[torch.randperm(len(y), generator=g)]
        x = torch.rand(len(y), 1, 2, 2, generator=g, dtype=torch.float64)
        made.append(Shard((x + 0.1 * k).clamp(0, 1), y))
    return made


def drawn(y, most, draws):
    """Places of up to so many examples of each class, class by class."""
    order = torch.randperm(len(y), generator=draws).numpy()
    return np.concatenate([order[y[order] == c][: most[c]] for c in range(CLASSES)])


def train(w, k, t, others):
    """A client's round on its own examples and on those of others, which ride along."""
    (x, y), (xs, ys) = arrays(make_shards()[k]), others
    own = batches(len(y), EPOCHS, BATCH, stream(k, t))
    further, losses, per_epoch = stream(k, t).torch("synthetic batches"), [], len(own) // EPOCHS
    x_all, y_all = np.concatenate([x, xs]), np.concatenate([y, ys])
    weight, ride = (
        np.array([1.0] * len(y) + [WEIGHT] * len(ys)),
        min(BATCH, -(-len(ys) // per_epoch)),
    )
    for e in range(EPOCHS):
        order = torch.randperm(len(ys), generator=further).numpy() + len(y)
        for s in range(per_epoch):
            i = np.concatenate([own[e * per_epoch + s], order[s * ride : (s + 1) * ride]])

            def loss(p, x=x_all[i], y=y_all[i], v=weight[i]):
                return (v * cross_entropies(logits(p, x), one_hot(y))).sum() / v.sum()

            losses.append(loss)
    return sgd(w, losses, LR)


def test_sharing(monkeypatch):
    shards, seen = make_shards(), []
    monkeypatch.setattr(InProcess, "_silent", lambda _, client, round: (client, round) in AWAY)
    method = Sharing(preliminary_rounds=FIRST, per_class=MOST, weight=WEIGHT)
    task, clients = Task(CLASSES, len(shards), ROUNDS, LATENT), dict(enumerate(shards))
    crew = Crew(method, clients, shards[0], Tiny(), task, TRAINING, Privacy(), Rng(0))
    outcome = simulate(crew, Engine(), Ledger(), lambda *told: seen.append(told))

    w = trunk(as_numpy(Tiny().state_dict()))
    size = sum(v.nbytes for v in w.values())
    bank, known = {}, {k: {k} for k in clients}
    held = {k: (np.empty((0, 4)), np.empty(0, int)) for k in clients}
    for t in range(1, ROUNDS + 1):
        here = [k for k in clients if (k, t) not in AWAY]
        up, down, moved, models = 0, 0, 0, []
        for k in here if t > FIRST else ():
            if k not in bank:
                x, y = arrays(shards[k])
                places = drawn(y, [MOST] * CLASSES, stream(k, t).torch("shared"))
                bank[k] = x[places], y[places]
                up += len(places) * (PIXELS + LABEL) + CLASSES * 8
        for k in clients:
            if t > FIRST and k in bank:
                missing = WANTED[k] - np.bincount(held[k][1], minlength=CLASSES)
                new = [zip(*bank[j], strict=True) for j in sorted(set(bank) - known[k])]
                new = [(x, y) for rows in new for x, y in rows if missing[y] > 0]
                down += len(new) * (PIXELS + LABEL)
                if k in here and new:
                    x, y = (np.array(v) for v in zip(*new, strict=True))
                    places = drawn(y, missing, stream(k, t).torch("drawn"))
                    both = zip(held[k], (x[places], y[places]), strict=True)
                    held[k] = tuple(np.concatenate(v) for v in both)
                    moved += len(places)
                    up += 8
                if k in here:
                    known[k] |= set(bank)
            if t <= FIRST or k in bank:
                down += size
            if k in here:
                models.append(train(w, k, t, held[k]))
                up += size + 3 * 8
        w = average(models, [len(shards[k]) for k in here])
        record, progress = seen[t - 1]
        expect_equal(progress.state.model, w)
        assert (record.bytes_up, record.bytes_down) == (up, down)
        assert record.numbers.get("shared_drawn", 0) == moved
        gets = [np.bincount(y, minlength=CLASSES).tolist() for _, y in held.values()]
        if t == 2:
            assert gets == [[3, 0, 0], [0, 3, 0], [1, 0, 2], [0, 0, 0]]
    np.testing.assert_array_equal(gets, WANTED)
    for k, (x, y) in held.items():
        got = outcome.memories[k].trees["others"]
        assert got["y"].tolist() == y.tolist()
        np.testing.assert_array_equal(got["x"].flatten(1), x)
