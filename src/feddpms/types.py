"""The nouns that every part shares: Shard, Batch, Net, Tree, Message, Event, Memory, Task.

Everything here is a plain frozen record; nothing here computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict
from torch import Tensor

T = TypeVar("T")
Tree = dict[str, Tensor]
"""Named tensors: weights, controls, latent means; anything that is sent or kept."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only dataclass whose fields are checked when it is built.

    Bounds are written as types (`Annotated[float, Gt(0)]`); unknown names, NaN and infinities are
    refused. Raises pydantic.ValidationError; `feddpms.config` turns it into one line.
    """
    config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )
    make: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)
    return make(cls)


@dataclass(frozen=True)
class Shard:
    """One client's examples.

    Attributes:
        x: images, float32 [n, channels, height, width] in [0, 1].
        y: labels, int64 [n] in 0..classes-1.
        weight: weight of these examples in the loss, relative to 1 for a client's own.
    """

    x: Tensor
    y: Tensor
    weight: float = 1.0

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.y)


@dataclass(frozen=True)
class Batch:
    """What one local step looks at.

    Attributes:
        x: images [b, channels, height, width].
        y: labels [b].
        weight: weight of each example in the loss [b], or None when all are 1.
        index: place of each example in the client's examples (own first, then synthetic) [b].
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None
    index: Tensor


class Net(Protocol):
    """A network: a torch module that also gives the representation before its last layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, channels, height, width]."""
        ...

    def features(self, x: Tensor) -> Tensor:
        """What enters the last linear layer [b, d]."""
        ...


class Blueprint(Protocol):
    """How to build the network, for whoever has only trees: plain values, to be sent and stored."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of an image."""
        ...

    def build(self) -> Any:
        """A network to work with; its weights are there to be overwritten."""
        ...


Loss = Callable[[Any, Batch], Tensor]
"""A loss: (net, batch) -> one number, the mean over the batch."""
Normals = Callable[[Tensor], Tensor]
"""Standard normal numbers of a tensor's shape and type, new ones at each call."""
Neighbours = Literal["add_remove", "replace_one"]
"""Which data sets are neighbours: one record added or removed, or one replaced by any other."""


@dataclass(frozen=True)
class Event:
    """One privacy event: what left a client, and what paid for it.

    Attributes:
        channel: what was released, such as "latent means" or "model".
        mechanism: "gaussian", or "none" for a value that left in the clear.
        noise_multiplier: noise standard deviation over l2_sensitivity (Gaussian only).
        l2_sensitivity: how far one record can move the un-noised value (Gaussian only).
        neighbours: relation under which the sensitivity holds (Gaussian only).
        times: how often the mechanism ran, each time with fresh noise.
        sample_rate: chance of a record to take part each time (Poisson sampling); 1 for always.
        simulated: the noise came from a seeded source, so this is no release of real data.
        digest: SHA-256 of the released bytes (Gaussian only), so that a second draw shows.
    """

    channel: str
    mechanism: Literal["gaussian", "none"]
    noise_multiplier: float | None = None
    l2_sensitivity: float | None = None
    neighbours: Neighbours | None = None
    times: int = 1
    sample_rate: float = 1.0
    simulated: bool = True
    digest: str = ""


@dataclass(frozen=True)
class Message:
    """What crosses the wire, in either direction.

    Attributes:
        kind: what is asked or answered: "train", or a method's phase such as "vae", "share".
        trees: named trees.
        numbers: named scalars.
        events: the privacy events of what a reply carries.
        inner: the message of the method that a data-enriching method wraps.
    """

    kind: str
    trees: Mapping[str, Tree] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    inner: "Message | None" = None


@dataclass(frozen=True)
class Memory:
    """What a client keeps between rounds; it never leaves the client.

    Attributes:
        trees: named trees.
        synthetic: examples that the method made for this client.
        inner: the memory of the method that a data-enriching method wraps.
    """

    trees: Mapping[str, Tree] = field(default_factory=dict)
    synthetic: Shard | None = None
    inner: "Memory | None" = None


@dataclass(frozen=True)
class Task:
    """What everybody knows about the run.

    Attributes:
        classes: number of classes of the data set (not of what a client holds).
        clients: number of clients.
        rounds: number of rounds.
        latent: latent length of the network.
        network: how to build the network; None where nobody but clients needs one.
    """

    classes: int
    clients: int
    rounds: int
    latent: int
    network: Blueprint | None = None
