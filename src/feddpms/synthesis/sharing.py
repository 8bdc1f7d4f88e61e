"""Real examples that clients send in the clear, and which of them another client draws.

Zhao, Li, Lai, Suda, Civin, Chandra, "Federated Learning with Non-IID Data", 2018. Who wants what is
the rule of `scarce`, by exact counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from feddpms.synthesis.inversion import scarce
from feddpms.types import Shard, Tree


@dataclass(frozen=True)
class Pool:
    """What the server remembers.

    Attributes:
        inner: what the training method remembers.
        left: preliminary rounds to come.
        bank: what `shared` gave, by client.
        sent: who was in the bank when a client was last sent to, by client.
    """

    inner: Any
    left: int
    bank: Mapping[int, Tree] = field(default_factory=dict)
    sent: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def model(self) -> Tree:
        """The global model."""
        return self.inner.model


def shared(shard: Shard, classes: int, per_class: int, draws: torch.Generator) -> Tree:
    """What a client sends: up to `per_class` examples of each class, and how many it has.

    Args:
        shard: its examples.
        classes: number of classes of the data set.
        per_class: examples of a class, at the most.
        draws: stream that picks them.

    Returns:
        `x` and `y` in the order of the classes, and `counts` int64 [classes] of all that it has.
    """
    counts = torch.bincount(shard.y, minlength=classes)
    some = _drawn({"x": shard.x, "y": shard.y}, counts.clamp(max=per_class), draws)
    return {**some, "counts": counts}


def wanted(y: Tensor, classes: int, scarce_below: float, per_class: int) -> Tensor:
    """How many examples of each class a client wants of others, int64 [classes].

    Args:
        y: labels of its own examples [n].
        classes: number of classes of the data set.
        scarce_below: as for `scarce`.
        per_class: as for `scarce`.
    """
    return torch.bincount(scarce(y, classes, scarce_below, per_class), minlength=classes)


def candidates(pool: Pool, client: int, scarce_below: float, per_class: int) -> Tree:
    """Examples of clients that are new to a client, of the classes of which it has too few.

    Of those it knew it has drawn as many of a class as it wants, or else all: see `completed`.

    Args:
        pool: what clients shared, and who knows of whom.
        client: the client's number; it has shared.
        scarce_below: as for `scarce`.
        per_class: as for `scarce`.

    Returns:
        `x` and `y` in the order of the clients; empty if there is nothing to send.
    """
    counts = pool.bank[client]["counts"]
    classes = len(counts)
    known = pool.sent.get(client, frozenset()) - {client}
    offered = [torch.bincount(pool.bank[j]["y"], minlength=classes) for j in known]
    own = torch.arange(classes).repeat_interleave(counts)
    need = wanted(own, classes, scarce_below, per_class)
    short = sum(offered, start=torch.zeros_like(counts)) < need
    new = [pool.bank[j] for j in sorted(pool.bank.keys() - known - {client})]
    rows = [short[tree["y"]] for tree in new]
    if not any(row.any() for row in rows):
        return {}
    return {k: torch.cat([t[k][row] for t, row in zip(new, rows, strict=True)]) for k in ("x", "y")}


def completed(held: Tree, found: Tree, wanted: Tensor, draws: torch.Generator) -> Tree:
    """What a client holds of others' examples, once it has drawn what it still wants.

    Args:
        held: `x` and `y` of those that it drew before; may be empty.
        found: what `candidates` gave; if empty, nothing changes.
        wanted: how many of each class it wants in all [classes].
        draws: stream that picks them, without replacement.
    """
    if not held or not found:
        return _drawn(found, wanted, draws) if found else held
    missing = wanted - torch.bincount(held["y"], minlength=len(wanted))
    more = _drawn(found, missing, draws)
    return {key: torch.cat([held[key], more[key]]) for key in more}


def _drawn(tree: Tree, most: Tensor, draws: torch.Generator) -> Tree:
    """Up to so many examples of each class, in the order of the classes."""
    order = torch.randperm(len(tree["y"]), generator=draws).to(tree["y"].device)
    labels = tree["y"][order]
    places = torch.cat([order[labels == c][:n] for c, n in enumerate(most.tolist())])
    return {"x": tree["x"][places], "y": tree["y"][places]}
