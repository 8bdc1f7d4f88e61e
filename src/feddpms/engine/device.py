"""Where tensors live while clients train: on this processor, or on one GPU.

What the server knows, what clients keep, and all random streams stay on the processor: a client's
ask and memory are moved to the device, and its reply and new memory back. So the numbers drawn are
the same on every device, and results differ by rounding alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from feddpms.types import Memory, Message, Shard

T = TypeVar("T", Message, Memory, Shard)


def moved(value: T, device: torch.device | str) -> T:
    """Examples on a device; or a message or a memory, with those inside it."""
    if isinstance(value, Shard):
        return replace(value, x=value.x.to(device), y=value.y.to(device))
    trees = {name: {k: v.to(device) for k, v in tree.items()} for name, tree in value.trees.items()}
    inner = moved(value.inner, device) if value.inner else None
    value = replace(value, trees=trees, inner=inner)
    if isinstance(value, Memory) and value.synthetic is not None:
        return replace(value, synthetic=moved(value.synthetic, device))
    return value


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Convolutions on a GPU in full precision, and the same bits each time."""
    if device == "cpu":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
