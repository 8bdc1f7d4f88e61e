"""Who carries messages between server and clients."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

from torch import Tensor

from feddpms.types import Message, Shard


class Grid(Protocol):
    """Carries asks to clients and replies back."""

    def ask_all(self, asks: Mapping[int, Message], round: int) -> dict[int, Message]:
        """Send each client its ask and return the replies that came.

        Args:
            asks: by client.
            round: 1..rounds.
        """
        ...


def size(message: Message) -> int:
    """Bytes of a message's payload: its tensors, 8 a number, and its inner message."""
    numbers = sum(len(m.numbers) for m in unfold(message))
    return sum(t.nbytes for t in tensors(message)) + 8 * numbers


def stored(value: Any) -> int:
    """Bytes of the tensors in a server's state or a client's memory, at any depth.

    Synthetic examples do not count: how many a client made can tell how many it holds of a class.
    """
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Shard):
        return 0
    if is_dataclass(value):
        return sum(stored(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, Mapping):
        return sum(map(stored, value.values()))
    return sum(map(stored, value)) if isinstance(value, list | tuple) else 0


def tensors(message: Message) -> list[Tensor]:
    """All tensors of a message and of its inner message."""
    return [t for m in unfold(message) for tree in m.trees.values() for t in tree.values()]


def unfold(message: Message) -> list[Message]:
    """A message and the messages inside it, outermost first."""
    return [message, *(unfold(message.inner) if message.inner else [])]
