"""The release as the paper prints it, kept to compare with; it carries no sound guarantee.

Many noisy means of each class are drawn around the mean of m codes of the *local* encoder, each
coordinate with noise of standard deviation sigma / m; those that the *local* classifier calls by
their class are sent. Classes and counts go in the clear. The ledger says what all draws cost by
their vector sensitivity, and names what no epsilon covers.
"""

import torch

from feddpms.privacy import Account, Noise, Privacy
from feddpms.privacy.mechanism import CENTRE, PAPER, FixedMeans, event, gaussian
from feddpms.synthesis.means import encode
from feddpms.types import Event, Shard, Tree

UNCOVERED = (
    "class list and counts",
    "means encoded by the local model",
    "choice of means by the local classifier",
)


def paper_release(
    net,
    shard: Shard,
    classes: int,
    privacy: Privacy,
    top_n: int,
    account: Account,
    noise: Noise,
    round: int,
) -> tuple[Tree, tuple[Event, ...]]:
    """The paper's noisy means (section 3.3); unsound, and its events say so.

    Args:
        net: a network that holds the client's *local* weights.
        shard: the client's own examples.
        classes: number of classes of the data set.
        privacy: m, sigma, number of draws, adjacency.
        top_n: release at most this many classes, the most abundant ones; 0 for all.
        account: the client's.
        noise: source of the noise for a channel.
        round: 1..rounds.

    Returns:
        A tree with `classes` [r], several for a class, `means` [r, latent] and exact `counts`
        [classes]; and its events.
    """
    codes = encode(net, shard.x)
    counts = torch.bincount(shard.y, minlength=classes)
    order = counts.argsort(descending=True, stable=True)[: top_n or None]
    chosen = [int(c) for c in order.sort().values if counts[c] >= privacy.mean_size]
    statistic = FixedMeans(privacy.mean_size, codes.shape[1], privacy.adjacency)
    std = privacy.paper_sigma / privacy.mean_size
    multiplier, source = std / statistic.l2_sensitivity, noise(PAPER)

    def draw() -> Tree:
        exact = statistic.value(codes, shard.y, classes)
        kept, labels = [codes.new_zeros(0, codes.shape[1])], []
        for c in chosen:
            drawn = torch.stack(
                [
                    CENTRE + gaussian(exact[c], statistic, multiplier, source)
                    for _ in range(privacy.paper_draws)
                ]
            ).to(codes.dtype)
            with torch.no_grad():
                right = drawn[net.eval().classify(drawn).argmax(1) == c]
            kept.append(right)
            labels += [c] * len(right)
        return {
            "classes": torch.tensor(labels, dtype=torch.int64),
            "means": torch.cat(kept),
            "counts": counts.to(codes.dtype),
        }

    clear = account.in_the_clear(round, *UNCOVERED)
    tree, paid = account.release(
        round, event(PAPER, statistic, multiplier, source, times=privacy.paper_draws), draw
    )
    return tree, paid + clear
