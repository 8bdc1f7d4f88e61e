"""Low-frequency amplitudes that clients exchange, and images in other clients' styles (FedDG).

Liu, Chen, Qin, Dou, Heng, CVPR 2021. With F(x) = A exp(i P), the two-dimensional Fourier transform
of a channel, and M = 1 for frequencies of at most b either way, b = floor(L * min(h, w)), else 0:

    A_mix = A (1 - M) + [ (1 - lam) A + lam A_n ] M,    x_mix = F^-1( A_mix exp(i P) )

An image is real, so its spectrum at -k mirrors that at k: half of a window tells all of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddpms.errors import ConfigError
from feddpms.types import Loss, Shard, Task, Tree


def require_window(task: Task, window: float) -> None:
    """Complain before any round if the window covers the images."""
    if task.network:
        _half_width(task.network.shape, window)


def amplitudes(x: Tensor, window: float) -> Tensor:
    """The amplitudes of images inside the window.

    Args:
        x: images [n, c, h, w].
        window: L, in [0, 0.5).

    Returns:
        [n, c, 2 b + 1, b + 1]: rows of frequencies -b..b, columns 0..b.

    Raises:
        ConfigError: the window covers the images.
    """
    b = _half_width(x.shape, window)
    return torch.fft.rfft2(x)[..., _rows(b), : b + 1].abs()


def spectra(shard: Shard, share: float, window: float, order: torch.Generator) -> Tree:
    """What a client sends: `amplitudes` of a random share of its images, at least of one."""
    some = torch.randperm(len(shard), generator=order)[: max(1, int(share * len(shard)))]
    return {"amplitudes": amplitudes(shard.x[some.to(shard.x.device)], window)}


def interpolated(x: Tensor, foreign: Tensor, lam: Tensor) -> Tensor:
    """Images whose amplitudes in the window are moved towards foreign ones; not clipped.

    Args:
        x: images [n, c, h, w].
        foreign: what `amplitudes` made of others [n, c, 2 b + 1, b + 1].
        lam: share of the foreign amplitude for each image [n], in [0, 1].
    """
    spectrum, b = torch.fft.rfft2(x), foreign.shape[-1] - 1
    low = spectrum[..., _rows(b), : b + 1]
    mixed = torch.lerp(low.abs(), foreign, lam.view(-1, 1, 1, 1))
    spectrum[..., _rows(b), : b + 1] = torch.polar(mixed, low.angle())
    return torch.fft.irfft2(spectrum, s=x.shape[-2:])


def styled(base: Loss, bank: Tree | None, weight: float, draws: torch.Generator) -> Loss:
    """Base loss of the images + weight * base loss of the same images in styles of the bank.

    Args:
        base: the loss of images in any style.
        bank: foreign `amplitudes` [m, c, 2 b + 1, b + 1]; None gives the base loss.
        weight: of the second part; 0 gives the base loss.
        draws: stream that picks a style, and how much of it, for each example and step.
    """
    if bank is None or not weight:
        return base
    foreign = bank["amplitudes"]

    def loss(net, batch):
        n = len(batch.y)
        pick = torch.randint(len(foreign), (n,), generator=draws).to(batch.x.device)
        lam = torch.rand(n, generator=draws, dtype=batch.x.dtype).to(batch.x.device)
        mixed = interpolated(batch.x, foreign[pick], lam).clamp(0, 1)
        return base(net, batch) + weight * base(net, replace(batch, x=mixed))

    return loss


def _half_width(shape: Sequence[int], window: float) -> int:
    """b, of images [..., h, w]; a window of 2 b + 1 either way must leave frequencies outside."""
    height, width = shape[-2:]
    b = int(window * min(height, width))
    if 2 * b + 1 >= min(height, width):
        remedy = "lower method.window or take larger images" if b else "take larger images"
        raise ConfigError(
            f"feddg needs images larger both ways than its window of {2 * b + 1}x{2 * b + 1}, got "
            f"images of {height}x{width}; {remedy}"
        )
    return b


def _rows(b: int) -> Tensor:
    """Where frequencies -b..b lie: those below zero at the end."""
    return torch.arange(-b, b + 1)
