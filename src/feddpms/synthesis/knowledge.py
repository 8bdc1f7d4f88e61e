"""What devices tell one another of their decoders, class by class, in place of weights (FedDA).

Wen, Wu, Li, Duan, "Communication-Efficient Federated Data Augmentation on Non-IID Data", CVPR
Workshops 2022. A device's knowledge k_c in R^q is the mean, over codes of class c, of what its
decoder's linear layer hands to the transposed convolution. The server fuses K_c = sum_i a_ic k_ic
with attention over the devices i that have the class, and a device's decoder is drawn to K_c.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from feddpms.clock import clock
from feddpms.errors import ConfigError
from feddpms.types import Batch, Loss, Normals, Shard, Task, Tree, settings

DRAWS, READ = 16, 256
"""codes of a class that its knowledge is read from: in each step of training, and to be sent"""


@settings
class Guidance:
    """How knowledge is fused, and how much it weighs."""

    gamma: Annotated[float, Ge(0)] = 30.0
    """weight of the divergence from the fused knowledge in the auto-encoder's loss"""
    reference: Literal["self", "mean"] = "self"
    """who asks in the attention: each device that has the class, or their mean"""


@settings
class Filling:
    """How many synthetic examples a device makes for itself."""

    per_class: Annotated[int, Ge(0), Le(100_000)] = 100
    """synthetic examples of a class, at the most; 0 is the inner method"""
    weight: Annotated[float, Gt(0)] = 1.0
    """weight of a synthetic example in the loss"""


def knowledge_rounds(chosen: int, task: Task) -> int:
    """Rounds of knowledge of a run; `chosen` 0 takes 20 %, and at least 2.

    Raises:
        ConfigError: there is one alone, which nobody learns from, or no round comes after them.
    """
    left = chosen or max(2, round(0.2 * task.rounds))
    if 2 <= left < task.rounds:
        return left
    raise ConfigError(
        f"method.preliminary_rounds must be at least 2 and below rounds ({task.rounds}), got "
        f"{left}; change it, or run 3 rounds or more"
    )


def class_knowledge(net: Any, means: Tensor, draws: int, eps: Normals) -> Tensor:
    """What a decoder knows of classes [r, q]: its mean features over draws of their priors.

    It is read from the weights alone; no example is looked at.

    Args:
        net: an auto-encoder with `features`.
        means: the classes' prior means [r, latent].
        draws: codes of each class.
        eps: the noise of the draws.
    """
    centres = means.repeat_interleave(draws, 0)
    return net.features(centres + eps(centres)).unflatten(0, (-1, draws)).mean(1)


def told(net: Any, y: Tensor, eps: Normals) -> Tree:
    """What a device tells others: its decoder's knowledge of the classes that it has.

    The decoder learned from its examples, and the list of classes is exact: whatever sends this
    notes an event.

    Args:
        net: its auto-encoder, with `features` and `means`.
        y: the labels of its examples.
        eps: the noise of the draws.

    Returns:
        A tree with `classes` int64 [r], in order, and `means` [r, q].
    """
    classes = y.unique()
    with torch.no_grad():
        k = [class_knowledge(net, mean, READ, eps) for mean in net.means[classes].split(1)]
    return {"classes": classes, "means": torch.cat(k)}


def fuse(sent: Mapping[int, Tree], guidance: Guidance) -> Tree:
    """Fused knowledge of every class that some device has.

    Args:
        sent: what `told` gave, by device.
        guidance: who asks in the attention.

    Returns:
        A tree with `classes` int64 [r], in order, and `means` [r, q]; empty if nothing was sent.
    """
    trees = [sent[i] for i in sorted(sent)]
    if not trees:
        return {}
    classes = torch.cat([tree["classes"] for tree in trees]).unique()
    k = trees[0]["means"].new_zeros(len(trees), len(classes), trees[0]["means"].shape[1])
    held = torch.zeros(k.shape[:2], dtype=torch.bool)
    for i, tree in enumerate(trees):
        places = torch.searchsorted(classes, tree["classes"])
        k[i, places], held[i, places] = tree["means"], True
    weights = attention(k, held, guidance.reference)
    return {"classes": classes, "means": (weights.unsqueeze(2) * k).sum(0)}


def attention(k: Tensor, held: Tensor, reference: str) -> Tensor:
    """Weight of each device in each class's fused knowledge: a softmax of <query, k_ic> / sqrt(q).

    Args:
        k: knowledge [devices, classes, q]; what is not held is not looked at.
        held: which classes each device has [devices, classes].
        reference: `self`: every device that has the class asks, and the weight is the mean over
            their answers (self-attention); `mean`: the devices' mean knowledge asks.

    Returns:
        Weights [devices, classes], not negative: of sum 1 over the devices that have a class, and 0
        for the others.
    """
    k = k.masked_fill(~held.unsqueeze(2), 0) / len(k[0, 0]) ** 0.25
    owners = held.sum(0).clamp(min=1)
    if reference == "mean":
        scores = (k * (k.sum(0) / owners.unsqueeze(1))).sum(2)
        return _masked_softmax(scores, held)
    scores = torch.einsum("icq,jcq->jic", k, k)
    answers = _masked_softmax(scores, held.unsqueeze(1).expand_as(scores))
    return (answers * held).sum(1) / owners


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax along the first axis over what the mask shows; 0 for the rest."""
    return scores.masked_fill(~mask, -math.inf).softmax(0).masked_fill(~mask, 0)


def divergence(k: Tensor, fused: Tensor) -> Tensor:
    """sum_c KL( softmax(k_c) || softmax(K_c) ) in nats of knowledge [r, q], over its numbers."""
    log_k, log_fused = k.log_softmax(1), fused.log_softmax(1)
    return (log_k.exp() * (log_k - log_fused)).sum()


def guided(base: Loss, fused: Tree, gamma: float, means: Tensor, eps: Normals) -> Loss:
    """Base loss + gamma * the divergence of the decoder's knowledge from what was fused.

    A decoder is told of all classes that somebody has, since it has to draw those that the device
    lacks.

    Args:
        base: the auto-encoder's own loss.
        fused: what `fuse` gave; may be empty.
        gamma: weight of the divergence.
        means: the classes' prior means [classes, latent].
        eps: the noise of the draws.
    """
    if not fused or gamma == 0:
        return base

    def loss(net: Any, batch: Batch) -> Tensor:
        k = class_knowledge(net, means[fused["classes"]], DRAWS, eps)
        return base(net, batch) + gamma * divergence(k, fused["means"])

    return loss


def lacking(y: Tensor, heard: Tensor, classes: int, most: int) -> Tensor:
    """How many examples of each class to make [classes], so that all are as many as the largest.

    Args:
        y: labels of the device's own examples.
        heard: classes that it was sent the fused knowledge of.
        classes: number of classes of the data set.
        most: examples of a class, at the most.
    """
    counts = torch.bincount(y, minlength=classes)
    known = counts > 0
    known[heard] = True
    return (counts.max() - counts).clamp(max=most) * known


def balanced(net: Any, amounts: Tensor, weight: float, eps: Normals) -> Shard | None:
    """Decoded draws from the classes' priors, in the order of the classes; None if none are due.

    Args:
        net: an auto-encoder with `decode` and `means`.
        amounts: how many of each class [classes].
        weight: of an example in the loss.
        eps: the noise of the draws.
    """
    y = torch.arange(len(amounts), device=amounts.device).repeat_interleave(amounts)
    if not len(y):
        return None
    with clock.part("synthesis"), torch.no_grad():
        z = net.means[y] + eps(net.means[y])
        return Shard(torch.cat([net.decode(part) for part in z.split(500)]), y, weight)
