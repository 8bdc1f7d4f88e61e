"""Floating-point operations a second in training, against a large matrix product on that core."""

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from bare_loop import images, network
from common import in_turn, ratios, save, spread
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

    def run() -> None:
        fit(me, start)

    return run


def operations(train: Shard, batch: int) -> int:
    """Floating-point operations of a pass, both ways: those of convolutions and linear layers."""
    net = network(train).train()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(train.x[:batch]), train.y[:batch]).backward()
    return counter.get_total_flops() * (len(train) // batch)


def main(
    batch: Annotated[int, typer.Option(help="Images in a step.")] = 64,
    channels: Annotated[int, typer.Option(help="1 for 28x28 grey, 3 for 32x32 colour.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps in a turn.")] = 50,
    turns: Annotated[int, typer.Option(help="How often each side is measured.")] = 9,
) -> None:
    """Measure, print the share, and write results/roofline-*.json."""
    torch.set_num_threads(1)
    train = images(steps * batch, channels, 0)
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
    save(f"roofline-{channels}x{batch}", {"GFLOP/s": rates, "share": share})
    for name, values in rates.items():
        print(f"{name}: {spread(values)} GFLOP/s")
    print(f"training / product: {spread(share)}")


if __name__ == "__main__":
    typer.run(main)
