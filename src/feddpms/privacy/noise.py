"""Where noise comes from: the run's seed (a simulation), or the operating system (a release)."""

import os
from typing import Literal, Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from feddpms.errors import ConfigError, PrivacyError

GRID_LOG2 = -32
"""released values are multiples of 2 to this power"""


class Source(Protocol):
    """A source of noise and of secret choices."""

    simulated: bool

    def discrete(self, value: Tensor, std: float) -> Tensor:
        """The value with independent Gaussian noise on every coordinate, for a release."""
        ...

    def floating(self, value: Tensor, std: float) -> Tensor:
        """The same in floating point, for the many coordinates of a gradient."""
        ...

    def uniform(self, n: int) -> Tensor:
        """Independent uniform numbers in (0, 1), float64 [n]."""
        ...


class Seeded:
    """Noise that anyone who knows the run's seed can subtract: for simulations alone."""

    simulated = True

    def __init__(self, stream: np.random.Generator):
        # NumPy's: torch's generators take 32 bits of a seed, too few for streams that never meet.
        self._stream = stream

    def discrete(self, value: Tensor, std: float) -> Tensor:
        """Floating-point noise; a simulation keeps no secret."""
        return self.floating(value, std)

    def floating(self, value: Tensor, std: float) -> Tensor:
        """Value + std * N(0, I)."""
        normals = torch.from_numpy(self._stream.standard_normal(value.numel()))
        return value + std * normals.view(value.shape).to(value)

    def uniform(self, n: int) -> Tensor:
        """N uniform numbers."""
        return torch.from_numpy(self._stream.random(n))


class Secure:
    """Noise from the operating system's source, which no seed repeats.

    `discrete` is OpenDP's discrete Gaussian (Canonne, Kamath, Steinke 2020): exact sampling, on a
    grid that is the same for all data. `floating` is for gradients, where exact sampling would
    take seconds a step: sums of four normals from 53 random bits each, which hide the holes of
    one floating-point normal (Holohan and Braghin 2021) but are no exact sampling.
    """

    simulated = False

    def __init__(self):
        try:
            import opendp.prelude as opendp
            from opendp.mod import enable_features
        except ImportError:
            raise ConfigError(
                'privacy.noise="secure" needs OpenDP; pip install "feddpms[secure]"'
            ) from None
        enable_features("contrib")  # its vector Gaussian is not yet marked as proven
        self._dp = opendp

    def discrete(self, value: Tensor, std: float) -> Tensor:
        """Value + discrete Gaussian noise, on multiples of 2^GRID_LOG2.

        Raises:
            PrivacyError: a value is not finite, which OpenDP would take for another number.
        """
        dp, flat = self._dp, value.double().flatten().tolist()
        domain = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=len(flat))
        if not value.isfinite().all() or not domain.member(flat):
            raise PrivacyError("expected finite values to release, got others; nothing was drawn")
        draw = dp.m.make_gaussian(domain, dp.l2_distance(T=float), scale=std, k=GRID_LOG2)
        return torch.tensor(draw(flat), dtype=torch.float64, device=value.device).view(value.shape)

    def floating(self, value: Tensor, std: float) -> Tensor:
        """Value + std * N(0, I), from operating-system randomness."""
        normals = sum(ndtri(_uniform(value.numel())) for _ in range(4)) / 2
        return value + std * torch.from_numpy(normals).view(value.shape).to(value)

    def uniform(self, n: int) -> Tensor:
        """N uniform numbers from operating-system randomness."""
        return torch.from_numpy(_uniform(n))


def source(kind: Literal["seeded", "secure"], stream: np.random.Generator) -> Source:
    """The source of a kind; a secure one ignores the stream.

    Raises:
        ConfigError: a secure source lacks its library.
    """
    return Secure() if kind == "secure" else Seeded(stream)


def _uniform(n: int) -> np.ndarray:
    """N uniform numbers in (0, 1) with 53 random bits each."""
    bits = np.frombuffer(os.urandom(8 * n), dtype=np.uint64) >> np.uint64(11)
    return (bits + 0.5) * 2.0**-53
