"""The one release of FedDPMS: noisy class sums of clipped latent codes, and a noisy histogram.

A value computed from a client's records leaves the client as the output of `noisy_class_sums`,
with the events that paid for it, or with an event from `in_the_clear`.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from feddpms.types import Event, settings

CENTRE = 0.5
"""Public centre of the latent cube [0, 1]^latent."""
MEANS = "latent means"
COUNTS = "class histogram"


@settings
class Privacy:
    """Target and shape of a client's one release."""

    target_epsilon: Annotated[float, Gt(0)] = 2.0
    """epsilon of the release (latent means and histogram together), per record, add/remove"""
    target_delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """delta of the release"""
    l2_clip: Annotated[float, Gt(0)] = 2.0
    """radius R to which each latent code is clipped around 1/2; public, never tuned on the data"""
    count_noise_multiplier: Annotated[float, Gt(0)] = 10.0
    """standard deviation of the noise on each class count, in records"""
    min_class_count: Annotated[float, Gt(0)] = 20.0
    """a class is released if its noisy count is at least this; also the least divisor of a mean"""


@dataclass(frozen=True)
class ClassSums:
    """What a client releases.

    Attributes:
        sums: noisy sums of centred, clipped codes [classes, latent].
        counts: noisy class counts [classes].
        events: what paid for both.
    """

    sums: Tensor
    counts: Tensor
    events: tuple[Event, ...]


def noisy_class_sums(
    codes: Tensor,
    labels: Tensor,
    classes: int,
    l2_clip: float,
    noise_multiplier: float,
    count_noise_multiplier: float,
    noise: torch.Generator,
) -> ClassSums:
    """Sum the clipped codes of each class, count each class, and add Gaussian noise once.

    Guarantee: for a fixed encoder, adding or removing one record moves the stacked sums by at most
    `l2_clip` in l2 norm (a record is in one class) and the histogram by at most 1. Non-finite
    codes count as the centre, so they move the sums by 0. What does not hold: nothing is said about
    how the encoder was trained; and the noise here is drawn in floating point from a seeded
    generator, which makes this a simulation, not a release of real data.

    Args:
        codes: latent means of all the client's records under the broadcast model [n, latent].
        labels: class of each record [n], 0..classes-1.
        classes: number of classes of the data set.
        l2_clip: clip radius R around 1/2.
        noise_multiplier: standard deviation of the sums' noise over R; 0 in tests only.
        count_noise_multiplier: standard deviation of the counts' noise; 0 in tests only.
        noise: source of the noise.

    Returns:
        The noisy sums and counts with their two events.
    """
    centred = torch.where(codes.isfinite().all(1, keepdim=True), codes - CENTRE, 0.0)
    norms = centred.norm(dim=1, keepdim=True)
    clipped = centred * (l2_clip / norms.clamp(min=l2_clip))
    sums = codes.new_zeros(classes, codes.shape[1]).index_add(0, labels, clipped)
    counts = torch.bincount(labels, minlength=classes).to(codes.dtype)
    noisy_sums = _add_noise(sums, noise_multiplier * l2_clip, noise)
    noisy_counts = _add_noise(counts, count_noise_multiplier, noise)
    return ClassSums(
        sums=noisy_sums,
        counts=noisy_counts,
        events=(
            _gaussian(MEANS, noise_multiplier, l2_clip, noisy_sums),
            _gaussian(COUNTS, count_noise_multiplier, 1.0, noisy_counts),
        ),
    )


def in_the_clear(*channels: str) -> tuple[Event, ...]:
    """The events of values that leave a client without any protection."""
    return tuple(Event(channel, "none") for channel in channels)


def _add_noise(value: Tensor, std: float, noise: torch.Generator) -> Tensor:
    """The value with independent Gaussian noise on every coordinate."""
    return value + std * torch.randn(value.shape, generator=noise, dtype=value.dtype)


def _gaussian(channel: str, multiplier: float, l2_sensitivity: float, released: Tensor) -> Event:
    """The event of one Gaussian release from a simulated source, bound to what was released."""
    digest = hashlib.sha256(released.numpy().tobytes()).hexdigest()
    return Event(channel, "gaussian", multiplier, l2_sensitivity, "add_remove", True, digest)
