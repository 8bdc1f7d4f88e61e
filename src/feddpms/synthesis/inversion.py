"""Images made of a model alone: it calls them by a label, and they have the statistics it knows.

Hao, El-Khamy, Lee, Zhang, Liang, Chen, Carin, CVPR Workshops 2021. The weights stand still, batch
normalisation is in eval mode, and images x = sigmoid(u) in [0, 1] go down

    CE(f(x), y) + beta * sum_l ( ||mu_l(x) - m_l||^2 + ||s_l(x) - s_l||^2 )

mu_l(x) and s_l(x) are mean and standard deviation by channel, over the batch, of what enters batch
normalisation l; m_l and s_l are those of its running statistics. Nothing here sees a client's data
but `scarce`, which sees its labels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor, nn

from feddpms.clock import clock
from feddpms.errors import ConfigError
from feddpms.types import Shard, Task, Tree, settings

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@settings
class Inversion:
    """How images are made of a model."""

    steps: Annotated[int, Ge(1)] = 50
    """steps of Adam on the images"""
    lr: Annotated[float, Gt(0)] = 0.1
    """its learning rate, in units of the logit of a pixel"""
    beta: Annotated[float, Ge(0)] = 1.0
    """weight of the statistics against the cross entropy"""


def require_inversion(name: str, model: Tree, wait: int, task: Task) -> None:
    """Refuse a model that remembers no statistics, and a run that ends before the first images.

    Args:
        name: the method's.
        model: what is trained.
        wait: rounds to wait, as set.
        task: how many rounds there are.

    Raises:
        ConfigError: the network has no batch normalisation, or no round is left.
    """
    if not any(key.endswith("running_var") for key in model):
        raise ConfigError(
            f"{name} makes images by the running statistics of batch normalisation, got a network "
            "that keeps none; set net.kind=conv and net.norm=batch"
        )
    if warm_up(wait, task) >= task.rounds:
        raise ConfigError(
            f"method.warm_up of {name} must be below rounds ({task.rounds}), got "
            f"{warm_up(wait, task)}; lower it or run more rounds"
        )


def warm_up(wait: int, task: Task) -> int:
    """Rounds before the first images: as set, or for 0 a fifth of all, at least one."""
    return wait or max(1, round(0.2 * task.rounds))


def scarce(y: Tensor, classes: int, scarce_below: float, per_class: int) -> Tensor:
    """Labels of the examples that a client lacks, in order.

    Args:
        y: the client's labels [n].
        classes: number of classes of the data set.
        scarce_below: a class is lacking below this fraction of the client's mean count.
        per_class: examples of a class at the most; it is filled up to the mean count.
    """
    counts = torch.bincount(y, minlength=classes).double()
    missing = (counts.mean() - counts).round().clamp(min=1).clamp(max=per_class)
    amount = torch.where(counts < scarce_below * counts.mean(), missing, 0).long()
    return torch.arange(classes, device=y.device).repeat_interleave(amount)


def invert(
    net, labels: Tensor, shape: tuple[int, ...], how: Inversion, draws: torch.Generator
) -> Shard:
    """Images that a network calls by these labels, with the statistics that it remembers.

    Args:
        net: the network; it is left as it was.
        labels: int64 [n].
        shape: of an image.
        how: number and size of the steps, and the weight of the statistics.
        draws: stream of the starting points.
    """
    was_training, like = net.training, next(net.parameters())
    start = torch.randn(len(labels), *shape, generator=draws, dtype=like.dtype)
    u = start.to(like.device).requires_grad_()
    optimizer = torch.optim.Adam([u], how.lr)
    with clock.part("synthesis"), watched(net.eval()) as gaps:
        for _ in range(how.steps if len(labels) else 0):
            gaps.clear()
            loss = F.cross_entropy(net(u.sigmoid()), labels) + how.beta * sum(gaps)
            (u.grad,) = torch.autograd.grad(loss, u)
            optimizer.step()
    net.train(was_training)
    return Shard(u.detach().sigmoid(), labels)


@contextmanager
def watched(net: nn.Module) -> Iterator[list[Tensor]]:
    """A list that each pass fills with the gap at every layer of batch normalisation."""
    gaps = list[Tensor]()

    def note(layer, given) -> None:
        gaps.append(statistics_gap(layer, given[0]))

    layers = [m for m in net.modules() if isinstance(m, NORMS) and m.track_running_stats]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def statistics_gap(layer, x: Tensor) -> Tensor:
    """Squared distance of a batch's mean and standard deviation, by channel, to a layer's own.

    Args:
        layer: a batch normalisation.
        x: what enters it [b, c, ...].
    """
    rows = x.movedim(1, -1).flatten(0, -2)
    mean = rows.mean(0)
    var = rows.var(0, correction=min(1, len(rows) - 1))  # unbiased, as the running one is
    # With the layer's own eps a channel that never varies has a slope too.
    spread = (var + layer.eps).sqrt() - (layer.running_var + layer.eps).sqrt()
    return (mean - layer.running_mean).square().sum() + spread.square().sum()


def fine_tune(net, shard: Shard, steps: int, lr: float) -> None:
    """Steps of Adam on the weights, down the cross entropy of all examples.

    Batch normalisation stays in eval mode: its statistics are those of real images.
    """
    net.eval()
    optimizer = torch.optim.Adam(net.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(shard.x), shard.y).backward()
        optimizer.step()
    optimizer.zero_grad()
