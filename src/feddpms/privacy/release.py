"""The releases of a client: its class histogram, and its latent class statistics.

Each passes the account, so it is reserved, drawn once, stored, and from then on sent again.
"""

from collections.abc import Callable

from torch import Tensor

from feddpms.privacy.account import Account
from feddpms.privacy.calibrate import calibrate
from feddpms.privacy.mechanism import (
    COUNTS,
    MEANS,
    ClassSums,
    FixedMeans,
    Histogram,
    event,
    gaussian,
)
from feddpms.privacy.noise import Source
from feddpms.privacy.settings import Privacy
from feddpms.types import Event, Tree

Noise = Callable[[str], Source]
"""Where the noise for a channel comes from."""


def histogram(
    labels: Tensor, classes: int, privacy: Privacy, account: Account, noise: Noise, round: int
) -> tuple[Tensor, tuple[Event, ...]]:
    """The client's noisy class counts; drawn the first time, stored after that.

    Guarantee: that of `gaussian` at `count_noise_multiplier`.

    Args:
        labels: class of each record [n], 0..classes-1.
        classes: number of classes of the data set.
        privacy: target and adjacency.
        account: the client's.
        noise: source of the noise for a channel.
        round: 1..rounds.

    Returns:
        Counts, float64 [classes], and what paid for them.
    """
    statistic, multiplier = Histogram(privacy.adjacency), privacy.count_noise_multiplier
    source = noise(COUNTS)

    def draw() -> Tree:
        exact = statistic.value(labels, classes)
        return {"counts": gaussian(exact, statistic, multiplier, source)}

    tree, events = account.release(round, event(COUNTS, statistic, multiplier, source), draw)
    return tree["counts"], events


def class_statistics(
    codes: Tensor,
    labels: Tensor,
    classes: int,
    privacy: Privacy,
    second_moments: bool,
    account: Account,
    noise: Noise,
    round: int,
) -> tuple[Tensor, tuple[Event, ...]]:
    """The client's noisy class sums, or noisy means of m records; drawn once.

    Guarantee: that of `gaussian` at the calibrated multiplier, for any encoder that was fixed
    before it saw these records. Nothing is said about how the encoder was trained.

    Args:
        codes: latent means of all the client's records under the broadcast model [n, latent].
        labels: class of each record [n], 0..classes-1.
        classes: number of classes of the data set.
        privacy: target, shape, clip and adjacency.
        second_moments: sum the squares as well (class_sum only).
        account: the client's.
        noise: source of the noise for a channel.
        round: 1..rounds.

    Returns:
        Centred sums or means, float64 [classes, latent (or 2 latent)], and what paid for them.
    """
    statistic = shape(privacy, codes.shape[1], second_moments)
    multiplier, source = calibrate(privacy).latent, noise(MEANS)

    def draw() -> Tree:
        exact = statistic.value(codes, labels, classes)
        return {"values": gaussian(exact, statistic, multiplier, source)}

    tree, events = account.release(round, event(MEANS, statistic, multiplier, source), draw)
    return tree["values"], events


def shape(privacy: Privacy, latent: int, second_moments: bool = False) -> ClassSums | FixedMeans:
    """The statistic that a release computes."""
    if privacy.release == "class_sum":
        return ClassSums(privacy.l2_clip, privacy.adjacency, second_moments)
    return FixedMeans(privacy.mean_size, latent, privacy.adjacency)
