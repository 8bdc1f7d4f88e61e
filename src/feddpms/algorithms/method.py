"""The seam: what a method is, what a client rule may look at, and what a method says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import AfterValidator
from torch import Tensor

from feddpms.algorithms.training import Training
from feddpms.errors import ConfigError
from feddpms.privacy import Account, Privacy, Source, source
from feddpms.rng import Rng
from feddpms.types import Batch, Event, Loss, Memory, Message, Normals, Shard, Task, Tree


@dataclass(frozen=True)
class About:
    """What a method says of itself, for `feddpms methods` and the docs.

    Attributes:
        family: where it acts: `aggregation` at the server, `drift` control in local training,
            `data` enrichment (wraps another method), or a `bound` to compare with.
        paper: authors, title, venue.
        extra: what it sends beyond FedAvg's one model each way.
        client_state: what a client keeps between rounds.
        server_state: what the server keeps beside the global model.
        scope: whose model is measured: the global one (`federated`), each client's own (`local`),
            or one trained on the `pooled` data.
        generative: it uses the decoder and the log-variance head.
        per_example: its local loss is a mean over examples, so that training can be private.
        whole: clients are sent the global model, and not parts of another.
    """

    family: Literal["aggregation", "drift", "data", "bound"]
    paper: str
    extra: str = "nothing"
    client_state: str = "nothing"
    server_state: str = "nothing"
    scope: Literal["federated", "local", "pooled"] = "federated"
    generative: bool = False
    per_example: bool = True
    whole: bool = True


def cross_entropy(net: Any, batch: Batch) -> Tensor:
    """Cross entropy of the logits against the labels, mean by the examples' weights."""
    if batch.weight is None:
        return F.cross_entropy(net(batch.x), batch.y)
    each = F.cross_entropy(net(batch.x), batch.y, reduction="none")
    return (batch.weight * each).sum() / batch.weight.sum()


@dataclass(frozen=True)
class Client:
    """What a client rule may look at.

    Attributes:
        id: the client's number, 0..clients-1.
        shard: its own examples.
        net: a network to work with; its weights are overwritten.
        task: what everybody knows.
        local: how to train.
        lr: learning rate of this round.
        privacy: target of releases.
        rng: this client's random streams of this round.
        account: what it has released, and what it may still spend.
        round: number of the round, from 1.
        memory: what it kept.
        loss: base loss that a training method starts from.
        synthetic: further examples to train on, from a method that wraps this one.
        together: what trains in place of `fit`'s own loop, in step with other clients.
    """

    id: int
    shard: Shard
    net: Any
    task: Task
    local: Training
    lr: float
    privacy: Privacy
    rng: Rng
    account: Account
    round: int
    memory: Memory = field(default_factory=Memory)
    loss: Loss = cross_entropy
    synthetic: Shard | None = None
    together: Callable[..., tuple[Tree, int, float]] | None = None

    def noise(self, purpose: str) -> Source:
        """The source of noise for a purpose."""
        return source(self.privacy.noise, self.rng.numpy("privacy noise", purpose))

    def normals(self, purpose: str) -> Normals:
        """Standard normal numbers for training, which nobody else may know if noise is secure."""
        if self.privacy.noise == "secure":
            secret = self.noise(purpose)
            return lambda like: secret.floating(torch.zeros_like(like), 1.0)
        stream = self.rng.torch(purpose)
        return lambda like: torch.randn(like.shape, generator=stream, dtype=like.dtype).to(like)

    def clear(self, *channels: str) -> tuple[Event, ...]:
        """The events of values that leave this client in the clear."""
        return self.account.in_the_clear(self.round, *channels)


@dataclass(frozen=True)
class State:
    """What the server remembers: the global model."""

    model: Tree


@runtime_checkable
class Method(Protocol):
    """A federated method: four pure functions in the order of a round.

    An implementation is a `settings` class whose fields are its hyper-parameters. Nothing is
    mutated; randomness comes in as `me.rng`.
    """

    about: ClassVar[About]

    def start(self, model: Tree, task: Task) -> Any:
        """What the server remembers at first, given the initial weights."""
        ...

    def ask(self, state: Any, client: int, round: int) -> Message:
        """What to send this client, who is asked again after `share`; `rest` is not sent."""
        ...

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        """The client's reply, and what it remembers."""
        ...

    def server(self, state: Any, replies: Mapping[int, Message]) -> Any:
        """The next state, from the replies to one exchange; its `numbers`, if any, are logged."""
        ...


def chosen(method: Any) -> Any:
    """Refuse a class where an instance is due."""
    if isinstance(method, type):
        raise ValueError(f"should be a method such as {method.__name__}(), not the class")
    return method


Chosen = Annotated[Method, AfterValidator(chosen)]
"""The field of a method: an instance, whatever its class."""


def method_name(method: Method) -> str:
    """The name of a method as a user writes it, such as `feddpms+moon`; `+fedavg` is left out."""
    name = type(method).__name__.lower()
    inner = getattr(method, "inner", None)
    if inner is None or method_name(inner) == "fedavg":
        return name
    return f"{name}+{method_name(inner)}"


def require_training(outer: str, inner: Method, whole: bool = False) -> None:
    """Refuse an inner method that is not one to train with.

    Args:
        outer: name of the method that wraps it.
        inner: the method.
        whole: what clients are sent has to be the global model.

    Raises:
        ConfigError: the inner method enriches data itself, is a bound, or sends something else.
    """
    name = type(inner).__name__.lower()
    if inner.about.family not in ("aggregation", "drift"):
        raise ConfigError(
            f"{outer} wraps a training method such as fedavg, fedprox or moon, got {name}; choose "
            "one of them"
        )
    if whole and not inner.about.whole:
        raise ConfigError(
            f"{outer} changes the global model, which the clients of {name} are not sent; wrap a "
            "method that sends it, such as fedavg"
        )
