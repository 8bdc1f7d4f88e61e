"""A client's release: which classes it has, and one noisy latent mean for each.

Only `noisy_class_sums` looks at the records; all that follows it is post-processing.
"""

import torch
from torch import Tensor

from feddpms.privacy import Privacy, calibrate, noisy_class_sums
from feddpms.privacy.mechanism import CENTRE
from feddpms.types import Event, Shard, Tree


def encode(net, x: Tensor, size: int = 500) -> Tensor:
    """Latent means [n, latent] of images, in eval mode, so that no record touches another's."""
    was_training = net.training
    net.eval()
    with torch.no_grad():
        codes = torch.cat([net.code(part) for part in x.split(size)])
    net.train(was_training)
    return codes


def release(
    net, shard: Shard, classes: int, privacy: Privacy, top_n: int, noise: torch.Generator
) -> tuple[Tree, tuple[Event, ...]]:
    """Draw a client's noisy class means and histogram.

    Guarantee: that of `noisy_class_sums` at the calibrated noise; the choice of classes and the
    division use noisy counts alone. Each call draws anew and costs anew: call it once for a client.

    Args:
        net: a network that holds the *broadcast* global weights, never the local ones.
        shard: the client's own examples.
        classes: number of classes of the data set.
        privacy: target and clip.
        top_n: release at most this many classes, the most abundant ones; 0 for all.
        noise: source of the noise.

    Returns:
        A tree with `classes` int64 [r], `means` [r, latent] in [0, 1] and `counts` [classes]; and
        the events that paid for it.
    """
    multipliers = calibrate(privacy)
    noisy = noisy_class_sums(
        encode(net, shard.x),
        shard.y,
        classes,
        privacy.l2_clip,
        multipliers.latent,
        multipliers.counts,
        noise,
    )
    return class_means(noisy.sums, noisy.counts, privacy.min_class_count, top_n), noisy.events


def class_means(sums: Tensor, counts: Tensor, min_class_count: float, top_n: int) -> Tree:
    """Means of the classes whose noisy count is large enough (post-processing).

    Args:
        sums: noisy sums of centred codes [classes, latent].
        counts: noisy counts [classes].
        min_class_count: least noisy count of a released class, and least divisor.
        top_n: at most this many classes; 0 for all.

    Returns:
        A tree with `classes` [r], `means` [r, latent] and `counts` [classes].
    """
    order = counts.argsort(descending=True, stable=True)[: top_n or None]
    chosen = order[counts[order] >= min_class_count].sort().values
    divisor = counts[chosen].clamp(min=min_class_count).unsqueeze(1)
    means = (CENTRE + sums[chosen] / divisor).clamp(0, 1)
    return {"classes": chosen, "means": means, "counts": counts}
