"""Small data and a small network that every test can share."""

import torch

from feddpms.algorithms import Client, Training
from feddpms.models import NetSettings, Plan, build
from feddpms.privacy import Account, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

CLASSES = 3


def blobs(n: int, labels: list[int], seed: int) -> Shard:
    """Images 4x4 whose bright corner tells the class; n of them, labels taken in turn."""
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor([labels[i % len(labels)] for i in range(n)])
    x = 0.3 * torch.rand(n, 1, 4, 4, generator=g)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 2 * (c // 2) : 2 * (c // 2) + 2, 2 * (c % 2) : 2 * (c % 2) + 2] += 0.6
    return Shard(x, y)


def three_shards() -> list[Shard]:
    """Three clients of unequal size, each short of a class."""
    return [blobs(24, [0, 1], 1), blobs(40, [1, 2], 2), blobs(31, [2, 0, 2], 3)]


def unseen() -> Shard:
    return blobs(60, [0, 1, 2], 9)


PLAN = Plan((1, 4, 4), CLASSES, NetSettings(width=0.25, latent=6, hidden=8))
TASK = Task(classes=CLASSES, clients=3, rounds=5, latent=6, network=PLAN)


def small_net(seed: int = 0):
    """A small network with batch norm for 4x4 images."""
    return build(PLAN.shape, CLASSES, PLAN.settings, Rng(seed))


def small_mlp(seed: int = 0):
    """A small fully connected network for 4x4 images."""
    settings = NetSettings(kind="mlp", width=0.1, latent=6, hidden=8)
    return build((1, 4, 4), CLASSES, settings, Rng(seed))


def small_lenet(seed: int = 0):
    """A small LeNet for 16x16 images."""
    settings = NetSettings(kind="lenet", width=0.5, latent=6, hidden=8)
    return build((1, 16, 16), CLASSES, settings, Rng(seed))


LOOSE = Privacy(target_epsilon=50.0, count_noise_multiplier=0.5, min_class_count=3.0, l2_clip=1.0)
"""A release with little noise, so that small shards can share."""


GOES_ON = {"secondary": "train", "calibration": {"steps": 0}}
"""Settings of FedDPMS with the paper's phases, and nothing after them."""


def client(shard: Shard, net, round: int = 1, id: int = 0, **changes) -> Client:
    """A client as the engine would make it."""
    local = changes.pop("local", Training(epochs=2, batch_size=8, lr=0.01))
    values = {
        "id": id,
        "shard": shard,
        "net": net,
        "task": TASK,
        "local": local,
        "lr": local.lr_at(round),
        "privacy": LOOSE,
        "rng": Rng(0).at("client", id, round),
        "round": round,
    }
    values |= changes
    return Client(**{"account": Account(values["privacy"], id), **values})
