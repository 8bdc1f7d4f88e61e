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
from common import Batch, Images, Record, Steps, Turns, in_turn, ratios, run, save, spread

from feddpms.algorithms import FedAvg, Training
from feddpms.engine import Crew, Engine, evaluate, simulate
from feddpms.models import NetSettings, build, trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

CLIENTS, ROUNDS, CLASSES = 10, 2, 10


def images(n: int, kind: Images, seed: int) -> Shard:
    """Noise images with random labels; a step takes as long as on real ones.

    Args:
        n: how many.
        kind: grey ones are 28x28, colour ones 32x32.
        seed: of pixels and labels.
    """
    channels, side = (1, 28) if kind == Images.grey else (3, 32)
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, channels, side, side, generator=g)
    return Shard(x, torch.randint(0, CLASSES, (n,), generator=g))


def network(shard: Shard) -> Any:
    """The default network for these images."""
    channels, height, width = shard.x.shape[1:]
    return build((channels, height, width), CLASSES, NetSettings(), Rng(0))


def loop(net: Any, train: Shard, test: Shard, batch: int, fused: bool) -> Callable[[], None]:
    """A loop over batches; as many as the engine's clients train on."""
    trained = [p for _, p in trunk(dict(net.named_parameters())).items()]

    def train_all() -> None:
        optimizer = torch.optim.Adam(trained, 1e-3, fused=fused)
        for epoch in range(ROUNDS):
            net.train()
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
            for index in order.split(batch):
                optimizer.zero_grad()
                F.cross_entropy(net(train.x[index]), train.y[index]).backward()
                optimizer.step()
            evaluate(net, test, CLASSES)

    return train_all


def engine(train: Shard, test: Shard, batch: int) -> Callable[[], None]:
    """FedAvg over clients that hold equal parts of the same images."""
    n = len(train) // CLIENTS
    shards = {c: Shard(train.x[c * n :][:n], train.y[c * n :][:n]) for c in range(CLIENTS)}
    net = network(train)
    task = Task(CLASSES, CLIENTS, ROUNDS, net.latent)
    local = Training(epochs=1, batch_size=batch)
    crew = Crew(FedAvg(), shards, test, net, task, local, Privacy(), Rng(0))

    def rounds() -> None:
        simulate(crew, Engine(), Ledger())

    return rounds


def main(
    batch: Batch = 64,
    kind: Annotated[Images, typer.Option("--images")] = Images.grey,
    steps: Steps = 10,
    turns: Turns = 7,
    compiled: Annotated[bool, typer.Option(help="Also the limit with torch.compile.")] = False,
    record: Record = False,
) -> None:
    """Print the ratios of seconds: a loop's over the engine's."""
    torch.set_num_threads(1)
    train, test = images(CLIENTS * steps * batch, kind, 0), images(500, kind, 1)
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
    if record:
        name = "-".join(["bare_loop", kind, str(batch), *["compiled"] * compiled])
        save(name, {"seconds": seconds, "ratios to engine": found})
    for name, values in found.items():
        print(f"{name} loop / engine: {spread(values)}")


if __name__ == "__main__":
    run(main)
