"""What is released: each statistic with its own sensitivity, and the one way to add noise to it.

A statistic has `value`, the exact statistic of a client's records, and `l2_sensitivity`, which
follows from its clip and from who counts as neighbours; nobody passes a sensitivity in. A noisy
value leaves a client only through `gaussian`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from feddpms.privacy.noise import GRID_LOG2, Source
from feddpms.types import Event, Neighbours

CENTRE = 0.5
"""Public centre of the latent cube [0, 1]^latent."""
RESOLUTION = 2.0**GRID_LOG2
"""Clipped codes are cut to multiples of this, so that sums of them have no rounding error."""
MEANS = "latent means"
COUNTS = "class histogram"
UPDATES = "model updates"
PAPER = "latent means as in the paper"
"""noise of a known cost on something that no cost covers: see `synthesis.paper`"""
TUNED = "settings tuned on private records"
"""nothing that is sent, but what voids every finite claim"""


@dataclass(frozen=True)
class ClassSums:
    """Sums of the clipped codes of each class, over all classes of the data set.

    Guarantee: for a fixed encoder, one record moves the stack of all sums by at most
    `l2_sensitivity` in l2 norm: a record is in one class, and its clipped code has norm at most R.
    Replacing it by another record moves one sum by at most 2R, or two sums by R each.

    Attributes:
        l2_clip: R, around the centre of the cube.
        adjacency: who counts as neighbours.
        second_moments: append the clipped squares of the centred codes, over R; code and squares
            are clipped together, so the sensitivity stays that of R.
    """

    l2_clip: float
    adjacency: Neighbours = "add_remove"
    second_moments: bool = False

    @property
    def l2_sensitivity(self) -> float:
        """R, or 2R if a record may be replaced."""
        return self.l2_clip * (1 if self.adjacency == "add_remove" else 2)

    def value(self, codes: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Exact sums, float64 [classes, latent], or [classes, 2 latent] with second moments.

        Args:
            codes: latent means of all the client's records under the broadcast model [n, latent];
                a code that is not finite counts as the centre.
            labels: class of each record [n], 0..classes-1.
            classes: number of classes of the data set.
        """
        rows = _in_cube(codes) - CENTRE
        if self.second_moments:
            rows = torch.cat([rows, rows.square() / self.l2_clip], 1)
        norms = rows.norm(dim=1, keepdim=True)
        rows = rows * (self.l2_clip / norms.clamp(min=self.l2_clip))
        rows = (rows / RESOLUTION).trunc() * RESOLUTION  # towards 0, so no norm grows
        return rows.new_zeros(classes, rows.shape[1]).index_add(0, labels, rows)


@dataclass(frozen=True)
class FixedMeans:
    """Means of the first m records of each class; places that a small class leaves count as 1/2.

    Guarantee: for a fixed encoder, one record more or less changes at most one of the m places, by
    at most the diagonal of the cube, sqrt(latent). A record that is replaced by one of another
    class changes one place in each of two classes.

    Attributes:
        size: m, public.
        latent: latent length.
        adjacency: who counts as neighbours.
    """

    size: int
    latent: int
    adjacency: Neighbours = "add_remove"

    @property
    def l2_sensitivity(self) -> float:
        """sqrt(latent) / m; sqrt(2) times that if a record may be replaced, label included."""
        both = 1 if self.adjacency == "add_remove" else 2
        return math.sqrt(both * self.latent) / self.size

    def value(self, codes: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Exact centred means, float64 [classes, latent]; arguments as for `ClassSums`."""
        rows = _in_cube(codes) - CENTRE
        chosen = [rows[labels == c][: self.size].sum(0) for c in range(classes)]
        return torch.stack(chosen) / self.size


@dataclass(frozen=True)
class Histogram:
    """Number of records of each class, over all classes of the data set.

    Guarantee: one record more or less changes one count by 1; one replaced, two counts by 1 each.
    """

    adjacency: Neighbours = "add_remove"

    @property
    def l2_sensitivity(self) -> float:
        """1, or sqrt(2) if a record may be replaced."""
        return 1.0 if self.adjacency == "add_remove" else math.sqrt(2)

    def value(self, labels: Tensor, classes: int) -> Tensor:
        """Exact counts, float64 [classes]."""
        return torch.bincount(labels, minlength=classes).double()


@dataclass(frozen=True)
class GradientSum:
    """Sum of the clipped gradients of a batch's examples.

    Attributes:
        l2_clip: C, bound on the norm of one example's gradient.
        adjacency: who counts as neighbours.
    """

    l2_clip: float
    adjacency: Neighbours = "add_remove"

    @property
    def l2_sensitivity(self) -> float:
        """C, or 2C if a record may be replaced."""
        return self.l2_clip * (1 if self.adjacency == "add_remove" else 2)


Statistic = ClassSums | FixedMeans | Histogram | GradientSum


def gaussian(
    value: Tensor, statistic: Statistic, noise_multiplier: float, source: Source
) -> Tensor:
    """Add Gaussian noise to every coordinate of a statistic, once.

    Guarantee: with mu = 1 / noise_multiplier, the output is exactly mu-Gaussian differentially
    private for the statistic's neighbours (Dong, Roth, Su 2022), and so are all functions of it.
    What does not hold: gradients, and everything in a simulation, get floating-point noise, whose
    lowest bits can tell more than the theory allows.

    Args:
        value: the exact statistic.
        statistic: what it is, and so how far one record can move it.
        noise_multiplier: standard deviation over the statistic's sensitivity.
        source: where the noise comes from.
    """
    std = noise_multiplier * statistic.l2_sensitivity
    if isinstance(statistic, GradientSum):
        return source.floating(value, std)
    return source.discrete(value, std)


def event(
    channel: str,
    statistic: Statistic,
    noise_multiplier: float,
    source: Source,
    times: int = 1,
    sample_rate: float = 1.0,
) -> Event:
    """The event that `times` calls of `gaussian` are paid with."""
    return Event(
        channel=channel,
        mechanism="gaussian",
        noise_multiplier=noise_multiplier,
        l2_sensitivity=statistic.l2_sensitivity,
        neighbours=statistic.adjacency,
        times=times,
        sample_rate=sample_rate,
        simulated=source.simulated,
    )


def _in_cube(codes: Tensor) -> Tensor:
    """The codes in [0, 1], float64; one with an entry that is not finite becomes the centre."""
    codes = codes.double()
    return torch.where(codes.isfinite().all(1, keepdim=True), codes, CENTRE).clamp(0, 1)
