"""Floating-point operations a second in training, against a large matrix product on that core."""

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from bare_loop import images, network
from common import Batch, Images, Record, Steps, Turns, in_turn, ratios, run, save, spread
from torch.utils.flop_counter import FlopCounterMode

from feddpms.algorithms import Training
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import Client
from feddpms.models import trunk
from feddpms.privacy import Account, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

SIDE, PRODUCTS = 1024, 20


def training(train: Shard, batch: int) -> Callable[[], None]:
    """One client's pass over its examples."""
    net, privacy = network(train), Privacy()
    start = trunk({k: v.clone() for k, v in net.state_dict().items()})
    local, task = Training(epochs=1, batch_size=batch), Task(10, 1, 1, net.latent)
    me = Client(0, train, net, task, local, 1e-3, privacy, Rng(0), Account(privacy), 1)

    def one_pass() -> None:
        fit(me, start)

    return one_pass


def operations(train: Shard, batch: int) -> int:
    """Floating-point operations of a pass, both ways: those of convolutions and linear layers."""
    net = network(train).train()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(train.x[:batch]), train.y[:batch]).backward()
    return counter.get_total_flops() * (len(train) // batch)


def main(
    batch: Batch = 64,
    kind: Annotated[Images, typer.Option("--images")] = Images.grey,
    steps: Steps = 50,
    turns: Turns = 7,
    record: Record = False,
) -> None:
    """Print operations a second, and the share of the product's."""
    torch.set_num_threads(1)
    train = images(steps * batch, kind, 0)
    a = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0))

    def products() -> None:
        for _ in range(PRODUCTS):
            a @ a

    seconds = in_turn({"training": training(train, batch), "product": products}, turns)
    done, peak = operations(train, batch), 2 * SIDE**3 * PRODUCTS
    rates = {
        "training": [done / s / 1e9 for s in seconds["training"]],
        "product": [peak / s / 1e9 for s in seconds["product"]],
    }
    share = ratios(rates["training"], rates["product"])
    if record:
        save(f"roofline-{kind}-{batch}", {"GFLOP/s": rates, "share": share})
    for name, values in rates.items():
        print(f"{name}: {spread(values)} GFLOP/s")
    print(f"training / product: {spread(share)}")


if __name__ == "__main__":
    run(main)
