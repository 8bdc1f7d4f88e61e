"""A client's release: which classes it has, and noisy latent means for them.

Only `histogram` and `class_statistics` look at the records; all that follows is post-processing.
The paper's own release, which is not, stands apart in `synthesis.paper`.
"""

import torch
from torch import Tensor

from feddpms.privacy import Account, Noise, Privacy, class_statistics, histogram
from feddpms.privacy.mechanism import CENTRE
from feddpms.types import Event, Shard, Tree

LEAST_VARIANCE = 1e-4
"""floor of a released variance, which noise can make negative"""


def encode(net, x: Tensor) -> Tensor:
    """Latent means [n, latent] of images, in eval mode and one by one.

    So no record touches another's code, not even its last bit, as the rounding of a batch does: a
    steep enough network would make a whole code of that bit.
    """
    was_training = net.training
    net.eval()
    with torch.no_grad():
        codes = torch.cat([net.code(part) for part in x.split(1)])
    net.train(was_training)
    return codes


def release(
    net,
    shard: Shard,
    classes: int,
    privacy: Privacy,
    top_n: int,
    second_moments: bool,
    account: Account,
    noise: Noise,
    round: int,
) -> tuple[Tree, tuple[Event, ...]]:
    """A client's noisy class means and histogram; drawn the first time, the same after that.

    Guarantee: that of `histogram` and `class_statistics` together; the choice of classes and the
    division use noisy counts alone.

    Args:
        net: a network that holds the *broadcast* global weights, never the local ones.
        shard: the client's own examples.
        classes: number of classes of the data set.
        privacy: target and shape.
        top_n: release at most this many classes, the most abundant ones; 0 for all.
        second_moments: release each coordinate's spread as well (class_sum only).
        account: the client's.
        noise: source of the noise for a channel.
        round: 1..rounds.

    Returns:
        A tree with `classes` int64 [r], `means` [r, latent] in [0, 1], `counts` [classes] and, with
        second moments, `spreads` [r, latent]; and the events that paid for it.
    """
    counts, paid = histogram(shard.y, classes, privacy, account, noise, round)
    codes = encode(net, shard.x)
    values, more = class_statistics(
        codes, shard.y, classes, privacy, second_moments, account, noise, round
    )
    if privacy.release == "fixed_m_mean":
        tree = fixed_means(values, counts, max(privacy.min_class_count, privacy.mean_size), top_n)
    else:
        clip = privacy.l2_clip if second_moments else None
        tree = class_means(values, counts, privacy.min_class_count, top_n, clip)
    floats = {k: v if k == "classes" else v.to(codes.dtype) for k, v in tree.items()}
    return floats, tuple(dict.fromkeys(paid + more))


def class_means(
    sums: Tensor, counts: Tensor, min_class_count: float, top_n: int, l2_clip: float | None = None
) -> Tree:
    """Means of the classes whose noisy count is large enough (post-processing).

    Args:
        sums: noisy sums of centred codes [classes, latent]; then their squares over `l2_clip`.
        counts: noisy counts [classes].
        min_class_count: least noisy count of a released class, and least divisor.
        top_n: at most this many classes; 0 for all.
        l2_clip: R, if the squares were summed too.

    Returns:
        A tree with `classes` [r], `means` [r, latent], `counts` [classes] and, with squares,
        `spreads` [r, latent].
    """
    chosen = _large(counts, min_class_count, top_n)
    values = sums[chosen] / counts[chosen].clamp(min=min_class_count).unsqueeze(1)
    tree = {"classes": chosen, "counts": counts}
    if l2_clip is None:
        return {**tree, "means": (CENTRE + values).clamp(0, 1)}
    first, second = values.chunk(2, dim=1)
    variance = l2_clip * second - first.square()
    spreads = variance.clamp(min=LEAST_VARIANCE).sqrt()
    return {**tree, "means": (CENTRE + first).clamp(0, 1), "spreads": spreads}


def fixed_means(values: Tensor, counts: Tensor, min_class_count: float, top_n: int) -> Tree:
    """Means of m records of each class whose noisy count is large enough (post-processing).

    Args:
        values: noisy centred means [classes, latent].
        counts: noisy counts [classes].
        min_class_count: least noisy count of a released class.
        top_n: at most this many classes; 0 for all.
    """
    chosen = _large(counts, min_class_count, top_n)
    return {"classes": chosen, "counts": counts, "means": (CENTRE + values[chosen]).clamp(0, 1)}


def _large(counts: Tensor, least: float, top_n: int) -> Tensor:
    """The classes with a large enough count, the most abundant ones, in order."""
    order = counts.argsort(descending=True, stable=True)[: top_n or None]
    return order[counts[order] >= least].sort().values
