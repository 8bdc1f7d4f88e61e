"""What each local step looks at: shuffled batches, or Poisson samples for private training."""

from collections.abc import Iterator

import torch
from torch import Tensor

from feddpms.algorithms.method import Client
from feddpms.types import Batch


def examples(me: Client) -> tuple[Tensor, Tensor, Tensor | None]:
    """Images, labels and loss weights of a client's own examples, then of the synthetic ones."""
    own, extra = me.shard, me.synthetic
    if extra is None or not len(extra):
        return own.x, own.y, None
    weight = torch.cat([own.x.new_full((len(s),), s.weight) for s in (own, extra)])
    return torch.cat([own.x, extra.x]), torch.cat([own.y, extra.y]), weight


def epochs(me: Client) -> int:
    """How many local epochs the client's round has; of a range, its own draw."""
    if not me.local.epochs_range:
        return me.local.epochs
    low, high = me.local.epochs_range
    return int(me.rng.numpy("epochs").integers(low, high, endpoint=True))


def shuffled(me: Client) -> Iterator[Batch]:
    """The batches of all local epochs; a last batch of one joins the one before it.

    The number of steps follows from the client's own examples and epochs alone, so every method
    takes the same number; synthetic examples ride along in the same steps, at most as many as
    real ones fit in a batch.
    """
    x, y, weight = examples(me)
    own, size = me.rng.torch("batches"), me.local.batch_size
    extra = me.rng.torch("synthetic batches")
    n = len(me.shard)
    for _ in range(epochs(me)):
        parts = list(torch.randperm(n, generator=own).to(x.device).split(size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        riders = _riders(len(y) - n, len(parts), size, n, extra, x.device)
        for part, rider in zip(parts, riders, strict=True):
            index = torch.cat([part, rider])
            w = None if weight is None else weight[index]
            yield Batch(x[index], y[index], w, index)


def poisson(me: Client) -> Iterator[tuple[Batch, Batch]]:
    """The steps of all local epochs of private training: own examples, and synthetic ones.

    Each of a client's own examples is in a step's batch by a coin of its own; how many steps there
    are, and how many synthetic examples ride along, are public.
    """
    x, y, _ = examples(me)
    training, n = me.privacy.training, len(me.shard)
    coins, extra = me.noise("batches"), me.rng.torch("synthetic batches")
    steps, size = training.steps_per_epoch, training.expected_batch_size
    for _ in range(me.local.epochs):
        for rider in _riders(len(y) - n, steps, size, n, extra, x.device):
            own = (coins.uniform(n) < training.sample_rate).nonzero().flatten().to(x.device)
            yield Batch(x[own], y[own], None, own), Batch(x[rider], y[rider], None, rider)


def _riders(
    synthetic: int, steps: int, size: int, first: int, stream: torch.Generator, device: torch.device
) -> list[Tensor]:
    """Which synthetic examples, whose places start at `first`, ride along in each step."""
    further = torch.randperm(synthetic, generator=stream).to(device) + first
    ride = min(size, -(-len(further) // steps))
    return [further[i * ride : (i + 1) * ride] for i in range(steps)]
