"""Amplitude windows: what is changed, what is not, and what is sent."""

import numpy as np
import pytest
import torch

from feddpms.errors import ConfigError
from feddpms.synthesis import amplitudes, interpolated, styled
from feddpms.types import Batch

SIZES = [(8, 8), (9, 7), (4, 12), (28, 28)]

every_size = pytest.mark.parametrize("size", SIZES)


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def images(size, n=5, channels=2, seed=0):
    return torch.rand(n, channels, *size, generator=stream(seed), dtype=torch.float64)


def centred(x):
    """The whole spectrum in NumPy, its zero frequency in the middle."""
    return np.fft.fftshift(np.fft.fft2(x.numpy()), axes=(-2, -1))


def inside(size, b):
    """Whether a frequency is in the window of this half-width."""
    rows, columns = (np.abs(np.arange(n) - n // 2) <= b for n in size)
    return rows[:, None] & columns[None, :]


def halves(n, value):
    return torch.full((n,), value, dtype=torch.float64)


@every_size
@pytest.mark.parametrize("window", [0.0, 0.1, 0.3, 0.42])
def test_own_amplitudes_give_the_image_back(size, window):
    x = images(size)
    got = interpolated(x, amplitudes(x, window), halves(5, 1.0))
    torch.testing.assert_close(got, x, rtol=0, atol=1e-14)


@every_size
@pytest.mark.parametrize("window", [0.0, 0.3])
def test_a_share_of_zero_gives_the_image_back(size, window):
    x, foreign = images(size), amplitudes(images(size, seed=1), window)
    got = interpolated(x, foreign, halves(5, 0.0))
    torch.testing.assert_close(got, x, rtol=0, atol=1e-14)


@every_size
@pytest.mark.parametrize("window", [0.0, 0.2, 0.3])
def test_the_window_takes_its_share_of_the_other_amplitude_and_nothing_else_changes(size, window):
    """By the whole spectrum in NumPy: inside, a mixture of amplitudes; outside, not a bit of it."""
    x, other = images(size), images(size, seed=1)
    lam = torch.rand(5, generator=stream(2), dtype=torch.float64)
    before, foreign = centred(x), centred(other)
    after = centred(interpolated(x, amplitudes(other, window), lam))
    window = inside(size, int(window * min(size)))
    share = lam.numpy()[:, None, None, None]
    want = np.where(window, (1 - share) * np.abs(before) + share * np.abs(foreign), np.abs(before))
    np.testing.assert_allclose(np.abs(after), want, atol=1e-11)
    assert np.abs(after - before)[..., window].max() > 0.1
    np.testing.assert_allclose(after[..., ~window], before[..., ~window], atol=1e-11)


@every_size
def test_the_phase_stays_before_clipping(size):
    x, foreign = images(size), amplitudes(images(size, seed=1), 0.3)
    before, after = centred(x), centred(interpolated(x, foreign, halves(5, 1.0)))
    turned = before * after.conj()
    np.testing.assert_allclose(np.angle(turned), 0, atol=1e-9)


@every_size
def test_a_window_of_zero_changes_only_the_mean_of_each_channel(size):
    x, other = images(size), images(size, seed=1)
    gap = interpolated(x, amplitudes(other, 0.0), halves(5, 0.25)) - x
    want = 0.25 * (other.mean((2, 3)) - x.mean((2, 3)))
    torch.testing.assert_close(gap, want[..., None, None].expand_as(gap), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("size", "window", "shape"),
    [
        ((8, 8), 0.1, (1, 1)),
        ((28, 28), 0.1, (5, 3)),
        ((32, 32), 0.1, (7, 4)),
        ((9, 7), 0.3, (5, 3)),
    ],
)
def test_half_the_window_is_sent_since_the_other_half_mirrors_it(size, window, shape):
    assert amplitudes(images(size), window).shape == (5, 2, *shape)


@pytest.mark.parametrize(
    ("size", "window"), [((1, 1), 0.1), ((1, 8), 0.1), ((3, 3), 0.4), ((5, 9), 0.45)]
)
def test_an_image_that_is_all_window_is_refused_in_one_line(size, window):
    with pytest.raises(ConfigError, match=r"larger images|method\.window") as told:
        amplitudes(images(size), window)
    assert "\n" not in str(told.value)


def brightness(net, batch):
    """A loss that tells what it was given: the mean brightness of the weighted images."""
    return (net * batch.weight * batch.x.mean((1, 2, 3))).mean()


def test_the_loss_is_that_of_the_images_and_that_of_them_in_other_styles():
    x, bank = images((8, 8)), amplitudes(images((8, 8), n=9, seed=1) + 0.4, 0.2)
    weight = torch.rand(5, generator=stream(4), dtype=torch.float64)
    batch = Batch(x, torch.zeros(5, dtype=torch.int64), weight, torch.arange(5))
    draws = stream(3)
    pick = torch.randint(9, (5,), generator=draws)
    lam = torch.rand(5, generator=draws, dtype=torch.float64)
    assert len(set(pick.tolist())) > 1
    mixed = interpolated(x, bank[pick], lam)
    assert mixed.max() > 1
    want = (2 * weight * (x.mean((1, 2, 3)) + 0.5 * mixed.clamp(0, 1).mean((1, 2, 3)))).mean()
    torch.testing.assert_close(
        styled(brightness, {"amplitudes": bank}, 0.5, stream(3))(2.0, batch), want
    )


def test_each_step_draws_anew():
    x, bank = images((8, 8)), amplitudes(images((8, 8), seed=1), 0.2)
    weight = torch.ones(5, dtype=torch.float64)
    batch = Batch(x, torch.zeros(5, dtype=torch.int64), weight, torch.arange(5))
    loss = styled(brightness, {"amplitudes": bank}, 1.0, stream(3))
    assert loss(1.0, batch) != loss(1.0, batch)
