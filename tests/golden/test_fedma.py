"""FedMA against its rule in NumPy: a cycle, layer by layer, and the beginning of the next one."""

import numpy as np
import pytest
import test_methods
from matched import HIDDEN, merge, view
from reference import Tiny, as_numpy, batches, gradient
from test_methods import BATCH, EPOCHS, LR, SIZES, arrays, make_shards, plain, stream
from test_pfnm import BELIEFS, COUNTS, prior

from feddpms.algorithms import FedMA
from feddpms.models import trunk
from feddpms.types import Task

CYCLE = 3


def trained(start, shard, k, t, still):
    """Local training of what does not stand still."""
    x, y = arrays(shard)
    moving = {key: v for key, v in start.items() if key.split(".")[0] not in still}
    for i in batches(len(y), EPOCHS, BATCH, stream(k, t)):
        g = gradient(lambda q, i=i: plain({**start, **q}, None, k, x[i], y[i], 0), moving)
        moving = {key: v - LR * g[key] for key, v in moving.items()}
    return {**start, **moving}


@pytest.mark.parametrize("name", BELIEFS)
def test_fedma(name, monkeypatch):
    beliefs, rounds = BELIEFS[name], CYCLE + 2
    monkeypatch.setattr(test_methods, "TASK", Task(3, 3, rounds, 3))
    models, _ = test_methods.run(FedMA(prior=prior(beliefs)))
    shards, nets = make_shards(), [trunk(as_numpy(Tiny().state_dict()))] * 3
    world = None
    for t in range(1, rounds + 1):
        still = HIDDEN[: (t - 1) % CYCLE]
        nets = [trained(nets[k], s, k, t, still) for k, s in enumerate(shards)]
        world = merge(nets, SIZES, COUNTS, beliefs, False, world, still)
        for key, value in world.model.items():
            np.testing.assert_allclose(models[t - 1][key], value, rtol=1e-7, atol=1e-9, err_msg=key)
        order = [{h: world.order(h, k) for h in HIDDEN} for k in range(3)]
        if t % CYCLE:  # one more layer stands still; the others stay the client's own
            last = HIDDEN[t % CYCLE - 1]
            shown = [view(world.shared, order[k]) for k in range(3)]
            news = [{key: v for key, v in s.items() if key.startswith(last)} for s in shown]
            nets = [{**nets[k], **news[k]} for k in range(3)]
        else:
            nets = [view(world.shared, {h: sorted(o[h]) for h in HIDDEN}) for o in order]
    widths = [len(world.owners[h]) for h in HIDDEN]
    assert {"alike": max(widths) == 3, "all are new": min(widths) == 9}.get(
        name, 6 < sum(widths) < 18
    )
