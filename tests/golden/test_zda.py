"""Images made of a model, at the clients and at the server, against their formulas in NumPy."""

import numpy as np
import torch
from normed import BUFFERS, Normed, Plan, made_of, merge, scores_of, train
from reference import CLASSES, LATENT, as_numpy, batches, cross_entropies, one_hot
from test_methods import (
    BATCH,
    EPOCHS,
    LR,
    PRIVACY,
    SIZES,
    TRAINING,
    adam,
    arrays,
    make_shards,
    stream,
)

from feddpms.algorithms import Zdac, Zdas
from feddpms.engine import Crew, Engine, simulate
from feddpms.privacy import Ledger
from feddpms.rng import Rng
from feddpms.synthesis import Inversion
from feddpms.types import Task

HOW = Inversion(steps=4, lr=0.2, beta=0.3)
ROUNDS = 4
AMOUNT = 2
"""examples of the class that a client lacks: its mean count is above 1.5, and two are the most"""


def run(method):
    """The global model after each round, and what the clients keep."""
    models, clients = [], dict(enumerate(make_shards()))
    task = Task(CLASSES, 3, ROUNDS, LATENT, Plan())
    crew = Crew(method, clients, clients[0], Normed(), task, TRAINING, PRIVACY, Rng(0))
    outcome = simulate(
        crew, Engine(), Ledger(), lambda _, progress: models.append(progress.state.model)
    )
    return models, outcome


def started():
    tree = as_numpy(Normed().state_dict())
    kept = {k: tree.pop(k) for k in BUFFERS}
    tree.pop("norm.num_batches_tracked")
    return tree, kept


def steps_of(k, t, extra=None):
    """The local steps of a client: own examples, and synthetic ones that ride along."""
    x, y = arrays(make_shards()[k])
    own = batches(len(y), EPOCHS, BATCH, stream(k, t))
    if extra is None:
        return [(x[i], y[i], np.ones(len(i))) for i in own]
    (xs, ys, weight), per_epoch = extra, len(own) // EPOCHS
    x, y = np.concatenate([x, xs]), np.concatenate([y, ys])
    v = np.array([1.0] * SIZES[k] + [weight] * len(ys))
    further, steps = stream(k, t).torch("synthetic batches"), []
    ride = -(-len(ys) // per_epoch)
    for e in range(EPOCHS):
        order = torch.randperm(len(ys), generator=further).numpy() + SIZES[k]
        for s in range(per_epoch):
            i = np.concatenate([own[e * per_epoch + s], order[s * ride : (s + 1) * ride]])
            steps.append((x[i], y[i], v[i]))
    return steps


def expect(got, p, kept):
    for key, value in {**p, **kept}.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-6, atol=1e-9, err_msg=key)


def test_zdac():
    """Made in rounds 2 and 4, and kept in between."""
    models, outcome = run(Zdac(warm_up=1, period=2, per_class=AMOUNT, weight=0.5, inversion=HOW))
    p, kept = started()
    extra: list = [None, None, None]
    for t in range(1, ROUNDS + 1):
        trained = []
        for k in range(3):
            if t in (2, 4):
                ys, draws = np.full(AMOUNT, k), stream(k, t).torch("inversion")
                extra[k] = made_of(p, kept, ys, HOW, draws, adam), ys, 0.5
            trained.append(train(p, kept, steps_of(k, t, extra[k]), LR))
        p, kept = merge(trained, SIZES)
        expect(models[t - 1], p, kept)
    for k in range(3):
        made = outcome.memories[k].synthetic
        assert made.y.tolist() == [k] * AMOUNT
        np.testing.assert_allclose(made.x.flatten(1), extra[k][0], rtol=1e-6)


def test_zdas():
    """From round 2 on, the average is trained on images made of it."""
    method = Zdas(warm_up=1, per_class=2, steps=3, lr=0.05, inversion=HOW)
    models, _ = run(method)
    p, kept = started()
    rng = method.start(Normed().state_dict(), Task(CLASSES, 3, ROUNDS, LATENT, Plan())).rng
    y = np.repeat(np.arange(CLASSES), 2)
    for t in range(1, ROUNDS + 1):
        p, kept = merge([train(p, kept, steps_of(k, t), LR) for k in range(3)], SIZES)
        if t > 1:
            x = made_of(p, kept, y, HOW, rng.torch("inversion", t), adam)

            def loss(p, x=x, kept=kept):
                return cross_entropies(scores_of(p, kept, x), one_hot(y)).mean()

            before, p = p, adam(p, [loss] * 3, 0.05)
            assert abs(p["head.weight"] - before["head.weight"]).max() > 0.05
        expect(models[t - 1], p, kept)
