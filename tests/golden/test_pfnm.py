"""PFNM against the paper's formulas in NumPy, every assignment found by trying all."""

import numpy as np
import pytest
from matched import Beliefs, match, merge, view
from reference import CLASSES, HIDDEN, LATENT, Tiny, as_numpy, batches, sgd
from test_methods import (
    BATCH,
    EPOCHS,
    LR,
    ROUNDS,
    SIZES,
    arrays,
    make_shards,
    plain,
    run,
    stream,
)

from feddpms.algorithms import PFNM
from feddpms.algorithms.neurons import Prior
from feddpms.algorithms.neurons import match as found
from feddpms.models import trunk

COUNTS = np.array([np.bincount(arrays(s)[1], minlength=CLASSES) for s in make_shards()])
BELIEFS = {
    "alike": Beliefs(1.0, 1.0, 1.0, 5),
    "some are new": Beliefs(0.25, 1.5, 2.0, 2),
    "all are new": Beliefs(0.01, 1.0, 1.0, 1),
}


def prior(beliefs: Beliefs) -> Prior:
    return Prior(**vars(beliefs))


@pytest.mark.parametrize("posterior", ["mean", "map"])
@pytest.mark.parametrize("name", BELIEFS)
def test_pfnm(name, posterior):
    beliefs = BELIEFS[name]
    models, outcome = run(PFNM(prior=prior(beliefs), posterior=posterior))
    shards, starts = make_shards(), [trunk(as_numpy(Tiny().state_dict()))] * 3
    for t in range(1, ROUNDS + 1):
        nets = []
        for k, shard in enumerate(shards):
            x, y = arrays(shard)
            steps = batches(len(y), EPOCHS, BATCH, stream(k, t))
            losses = [lambda p, i=i, x=x, y=y, k=k: plain(p, None, k, x[i], y[i], 0) for i in steps]
            nets.append(sgd(starts[k], losses, LR))
        world = merge(nets, SIZES, COUNTS, beliefs, posterior == "map")
        widths = [len(world.owners[layer]) for layer in ("mean", "body")]
        assert models[t - 1]["mean.bias"].shape == (widths[0],)
        for key, value in world.model.items():
            np.testing.assert_allclose(models[t - 1][key], value, rtol=1e-7, atol=1e-9, err_msg=key)
        assert outcome.rounds[t - 1].numbers["hidden_units"] == sum(widths)
        order = [{h: sorted(world.order(h, k)) for h in ("mean", "body")} for k in range(3)]
        starts = [view(world.shared, order[k]) for k in range(3)]
    least, most = LATENT + HIDDEN, 3 * (LATENT + HIDDEN)
    assert {"alike": sum(widths) == least, "all are new": sum(widths) == most}.get(
        name, least < sum(widths) < most
    )
    moved = world.model["head.bias"] - as_numpy(Tiny().state_dict())["head.bias"]
    assert abs(moved).max() > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_the_matching_is_the_most_likely_one_of_each_client(seed):
    """Random neurons, unequal numbers, weights by entry, against trying all assignments."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(5, 4))
    sizes = [(3, 3, 3), (2, 3, 1), (3, 2, 2)][seed % 3]
    vectors = [centres[rng.permutation(5)[:n]] + 0.4 * rng.normal(size=(n, 4)) for n in sizes]
    weights = [rng.uniform(0.3, 2, size=4) for _ in sizes]
    beliefs = Beliefs(0.5, 2.0, (1.0, 4.0)[seed % 2], seed % 3)
    owners = match(vectors, weights, beliefs)
    got = found(vectors, weights, prior(beliefs))
    for j, at in enumerate(got):
        assert [owners.index(o) for n in range(len(at)) for o in owners if o.get(j) == n] == [*at]
    assert max(sizes) <= len(owners) <= sum(sizes)
