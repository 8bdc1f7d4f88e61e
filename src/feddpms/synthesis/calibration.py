"""The global classifier, trained on at the server by draws around the clients' noisy class means.

Clients that lack classes teach an averaged classifier to favour those that most of them hold much
of. The means that they released are codes of all classes; the classifier is trained on codes drawn
around them, as many of each class, and needs no decoder. Nothing but released values and the model
is looked at: post-processing. The idea of retraining the classifier on virtual codes is that of
CCVR (Luo et al., NeurIPS 2021), which releases exact means and covariances.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from feddpms.clock import clock
from feddpms.models import rebuilt
from feddpms.rng import Rng
from feddpms.synthesis.matching import Release
from feddpms.types import Task, Tree, settings

DRAWS = 16
"""codes of each class in a step"""


@settings
class Calibration:
    """How the global classifier is trained on codes drawn around released means."""

    steps: Annotated[int, Ge(0), Le(100_000)] = 100
    """of Adam, each on as many codes of every class; 0 leaves the classifier as it is averaged"""
    lr: Annotated[float, Gt(0)] = 1e-3
    """learning rate"""
    spread: Annotated[float, Ge(0)] = 0.2
    """public standard deviation of a draw around a class's mean"""


def calibrated(task: Task, model: Tree, releases: Mapping[int, Release], how: Calibration) -> Tree:
    """Entries of the classifier, trained from where the model has them.

    A classifier that is told of some classes forgets the others, so nothing is changed as long as
    nobody has released a mean of some class.

    Args:
        task: how the network is built, and the number of classes.
        model: the global model.
        releases: by client.
        how: steps, rate and spread.

    Returns:
        The trained entries by their names in the model; empty if nothing is changed.
    """
    means = pooled_means(releases, task.classes) if how.steps else None
    if means is None:
        return {}
    with clock.part("synthesis"):
        device = model["classifier.head.weight"].device
        net = rebuilt(task, model).to(device).eval()
        _train(net, means.to(device), how, Rng(0).torch("calibration", *sorted(releases)))
    return {f"classifier.{k}": v.detach() for k, v in net.classifier.state_dict().items()}


def pooled_means(releases: Mapping[int, Release], classes: int) -> Tensor | None:
    """Mean of each class [classes, latent] over the clients that released one, by noisy counts.

    None if there is a class that no client released.
    """
    trees = [releases[client] for client in sorted(releases)]
    if not trees:
        return None
    y = torch.cat([tree["classes"] for tree in trees])
    means = torch.cat([tree["means"] for tree in trees])
    weights = torch.cat([tree["counts"][tree["classes"]] for tree in trees]).to(means)
    total = means.new_zeros(classes).index_add(0, y, weights)
    if not (total > 0).all():
        return None
    sums = means.new_zeros(classes, means.shape[1]).index_add(0, y, weights.unsqueeze(1) * means)
    return sums / total.unsqueeze(1)


def _train(net, means: Tensor, how: Calibration, draws: torch.Generator) -> None:
    """Steps of Adam on the classifier alone, down the cross entropy of drawn codes."""
    optimizer = torch.optim.Adam(net.classifier.parameters(), how.lr)
    y = torch.arange(len(means), device=means.device).repeat_interleave(DRAWS)
    for _ in range(how.steps):
        noise = torch.randn(len(y), means.shape[1], generator=draws, dtype=means.dtype)
        z = (means[y] + how.spread * noise.to(means.device)).clamp(0, 1)
        optimizer.zero_grad()
        F.cross_entropy(net.classify(z), y).backward()
        optimizer.step()
