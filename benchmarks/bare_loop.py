"""The engine against training loops written by hand, with the same network, images and batches.

Two loops train one model on all images: `limit` has all that torch offers (the network in
channels_last, a fused optimiser), `plain` is what torch does by default. The engine trains ten
clients with FedAvg, in one process. All evaluate the same images as often. Ratios are of seconds:
above 1 the engine is faster.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from common import in_turn, ratios, save, spread

from feddpms.algorithms import FedAvg, Training
from feddpms.engine import Crew, Engine, evaluate, simulate
from feddpms.models import NetSettings, build, trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

CLIENTS, ROUNDS, CLASSES = 10, 2, 10


def images(n: int, channels: int, seed: int) -> Shard:
    """Noise images with random labels; a step takes as long as on real ones."""
    side, g = 28 if channels == 1 else 32, torch.Generator().manual_seed(seed)
    x = torch.rand(n, channels, side, side, generator=g)
    return Shard(x, torch.randint(0, CLASSES, (n,), generator=g))


def network(shard: Shard) -> Any:
    """The default network for these images."""
    channels, height, width = shard.x.shape[1:]
    return build((channels, height, width), CLASSES, NetSettings(), Rng(0))


def loop(net: Any, train: Shard, test: Shard, batch: int, fused: bool) -> Callable[[], None]:
    """A loop over batches; as many as the engine's clients train on."""
    trained = [p for _, p in trunk(dict(net.named_parameters())).items()]

    def run() -> None:
        optimizer = torch.optim.Adam(trained, 1e-3, fused=fused)
        for epoch in range(ROUNDS):
            net.train()
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
            for index in order.split(batch):
                optimizer.zero_grad()
                F.cross_entropy(net(train.x[index]), train.y[index]).backward()
                optimizer.step()
            evaluate(net, test, CLASSES)

    return run


def engine(train: Shard, test: Shard, batch: int) -> Callable[[], None]:
    """FedAvg over clients that hold equal parts of the same images."""
    n = len(train) // CLIENTS
    shards = {c: Shard(train.x[c * n :][:n], train.y[c * n :][:n]) for c in range(CLIENTS)}
    net = network(train)
    task = Task(CLASSES, CLIENTS, ROUNDS, net.latent)
    local = Training(epochs=1, batch_size=batch)
    crew = Crew(FedAvg(), shards, test, net, task, local, Privacy(), Rng(0))
    return lambda: void(simulate(crew, Engine(), Ledger()))


def void(_: object) -> None:
    """Nothing."""


def main(
    batch: Annotated[int, typer.Option(help="Images in a step.")] = 64,
    channels: Annotated[int, typer.Option(help="1 for 28x28 grey, 3 for 32x32 colour.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of a client in a round.")] = 10,
    turns: Annotated[int, typer.Option(help="How often each side is measured.")] = 9,
    compiled: Annotated[bool, typer.Option(help="Also the limit with torch.compile.")] = False,
) -> None:
    """Measure, print the ratios, and write results/bare_loop-*.json."""
    torch.set_num_threads(1)
    train, test = images(CLIENTS * steps * batch, channels, 0), images(500, channels, 1)
    limit = network(train)
    plain = network(train).to(memory_format=torch.contiguous_format)
    sides = {
        "engine": engine(train, test, batch),
        "limit": loop(limit, train, test, batch, fused=True),
        "plain": loop(plain, train, test, batch, fused=False),
    }
    if compiled:
        sides["compiled"] = loop(torch.compile(network(train)), train, test, batch, fused=True)
    seconds = in_turn(sides, turns)
    found = {name: ratios(s, seconds["engine"]) for name, s in seconds.items() if name != "engine"}
    save(f"bare_loop-{channels}x{batch}", {"seconds": seconds, "ratios to engine": found})
    for name, values in found.items():
        print(f"{name} loop / engine: {spread(values)}")


if __name__ == "__main__":
    typer.run(main)
