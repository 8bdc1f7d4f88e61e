"""Averages of images that clients exchange, and the loss that mixes them in (FedMix).

Yoon, Shin, Hwang, Yang, ICLR 2021. With v = (1 - lam) x and a pair (xbar, ybar) from the pool of
averages, the loss of an example is
(1 - lam) l(f(v), y) + lam l(f(v), ybar) + lam (1 - lam) <d l(f(v), y) / dv, xbar>,
the mixup loss to first order in lam xbar.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from feddpms.types import Loss, Shard, Tree


def averages(shard: Shard, classes: int, group_size: int, order: torch.Generator) -> Tree:
    """Mean images `x` [g, c, h, w] and mean labels `y` [g, classes] of random groups.

    The examples left over when `group_size` does not divide them are spread over the groups, so
    that no average holds fewer.
    """
    groups = torch.randperm(len(shard), generator=order).to(shard.y.device)
    groups = groups.tensor_split(max(1, len(shard) // group_size))
    labels = F.one_hot(shard.y, classes).to(shard.x.dtype)
    return {
        "x": torch.stack([shard.x[g].mean(0) for g in groups]),
        "y": torch.stack([labels[g].mean(0) for g in groups]),
    }


def pooled(by_client: Mapping[int, Tree]) -> Tree:
    """What every client shared as one tree, in the order of the clients; at least one of them."""
    ordered = [by_client[c] for c in sorted(by_client)]
    return {k: torch.cat([tree[k] for tree in ordered]) for k in ordered[0]}


def mixed(pool: Tree, lam: float, bounded: bool, draws: torch.Generator) -> Loss:
    """The mean over the batch of the three terms above.

    The first and the third are (1 - lam) times the loss of the mixed image, to first order. No loss
    is below 0, but the first-order one can be, without end: training then learns steep slopes in
    place of the classes.

    Args:
        pool: averages `x` and `y`.
        lam: share of an average in a mixture.
        bounded: stop that approximate loss at 0.
        draws: stream that picks an average for each example.
    """

    def loss(net, batch):
        pick = torch.randint(len(pool["x"]), (len(batch.y),), generator=draws).to(batch.y.device)
        x_bar, y_bar = pool["x"][pick], pool["y"][pick]
        v = ((1 - lam) * batch.x).requires_grad_()
        logits = net(v)
        own = F.cross_entropy(logits, batch.y, reduction="none")
        other = F.cross_entropy(logits, y_bar, reduction="none")
        # The sum: each example's derivative must not carry the batch's 1/b.
        # A net in which clients train together takes the derivatives of all in one pass.
        derivative = getattr(net, "derivative", None) or torch.autograd.grad
        (slope,) = derivative(own.sum(), v, create_graph=True)
        mixture = own + lam * (slope * x_bar).flatten(1).sum(1)
        if bounded:  # differs from the paper: see above
            mixture = mixture.clamp(min=0)
        return ((1 - lam) * mixture + lam * other).mean()

    return loss
