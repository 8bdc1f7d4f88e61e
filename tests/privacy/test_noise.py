"""Where noise comes from: its size and shape, its grid, and that nobody can repeat or guess it."""

import itertools
import os
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from feddpms.errors import ConfigError, PrivacyError
from feddpms.privacy import Privacy, source
from feddpms.privacy.mechanism import ClassSums, GradientSum, Histogram, gaussian
from feddpms.privacy.noise import GRID_LOG2, Secure, Seeded
from feddpms.rng import Rng
from small import client, small_net, three_shards

STD = 0.2256
"""what the default release has on the mean of a class of 200"""
ROWS, COLUMNS = 200, 320


@pytest.fixture(scope="module")
def secure():
    pytest.importorskip("opendp")
    return Secure()


@pytest.fixture(scope="module")
def drawn(secure):
    """Discrete noise around a value that is on no grid, less that value [ROWS, COLUMNS]."""
    value = torch.full((COLUMNS,), np.pi / 10, dtype=torch.float64)
    return torch.stack([secure.discrete(value, STD) for _ in range(ROWS)]).numpy() - np.pi / 10


@pytest.fixture
def measurements(secure, monkeypatch):
    """Every measurement that OpenDP is asked for, with the arguments."""
    from opendp import measurements

    made, make = [], measurements.make_gaussian

    def spy(*args, **more):
        made.append(make(*args, **more))
        return made[-1]

    monkeypatch.setattr(measurements, "make_gaussian", spy)
    monkeypatch.setattr(secure._dp.m, "make_gaussian", spy)
    return made


def seeded(seed=0) -> Seeded:
    return Seeded(np.random.default_rng(seed))


def is_gaussian(values, std) -> bool:
    """The size by a chi-square test, the shape by Kolmogorov and Smirnov's, each at 1e-6."""
    values = np.asarray(values, dtype=np.float64).ravel()
    tail = stats.chi2(len(values)).cdf(((values / std) ** 2).sum())
    shape = stats.kstest(values / std, "norm").pvalue
    return bool(1e-6 < tail < 1 - 1e-6 and shape > 1e-6)


def correlated(rows) -> float:
    """The largest correlation between two rows, in standard errors."""
    rows = np.asarray(rows)
    return float(
        np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() * np.sqrt(rows.shape[1]),
    )


# Discrete noise


@pytest.mark.parametrize("value", [0.0, 0.01, 0.5, np.pi, -1e3 / 3, 1e-40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_released_values_are_on_one_grid_whatever_the_data(secure, value, dtype):
    out = secure.discrete(torch.full((3, 40), value, dtype=dtype), STD)
    assert (out.shape, out.dtype) == ((3, 40), torch.float64)
    assert not (out * 2.0**-GRID_LOG2 % 1).any()
    assert (out * 2.0 ** (-GRID_LOG2 - 1) % 1).any()  # and on no coarser one
    assert abs(float(out.mean()) - value) < 6 * STD / np.sqrt(120)
    assert len(out.unique()) == 120


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_and_nothing_is_drawn(secure, measurements, bad):
    value = torch.zeros(4, 3, dtype=torch.float64)
    secure.discrete(value, STD)
    assert len(measurements) == 1
    value[2, 1] = bad
    with pytest.raises(PrivacyError, match="expected finite values to release") as caught:
        secure.discrete(value, STD)
    assert "\n" not in str(caught.value)
    assert len(measurements) == 1


def test_discrete_noise_has_the_size_and_shape_that_was_asked_for(drawn):
    """Over 64,000 values: 4 % too little or too much is caught, but once in 10^12."""
    assert drawn.size >= 64_000
    assert is_gaussian(drawn, STD)
    assert not is_gaussian(drawn, STD * 1.04)
    assert not is_gaussian(drawn, STD * 0.96)


def test_discrete_noise_is_fresh_on_every_coordinate_of_every_draw(drawn):
    assert correlated(drawn) < 6.5
    assert correlated(drawn.T) < 6.5
    assert correlated([drawn.ravel()[1:], drawn.ravel()[:-1]]) < 5
    assert np.unique(drawn).size > drawn.size - 10


def finest(values) -> np.ndarray:
    """The place of the lowest set bit of each value, as a power of 2."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    whole = np.abs(mantissa * 2**53).astype(np.int64)
    return np.log2(whole & -whole).astype(int) + exponent - 53


def told_apart(a, b) -> float:
    """Share of the values in a whose lowest bit is finer than any in b has."""
    return float((finest(a) < finest(b).min()).mean())


def test_the_lowest_bits_do_not_tell_the_data_apart(secure):
    """Naive floating-point noise betrays a mean of 0 against 0.01 in one coordinate of a hundred.

    Every value that it can give lies on a grid as fine as the largest part of the sum allows.
    """
    n = 16_000
    zero = torch.zeros(n, dtype=torch.float64)
    at_0, at_1 = secure.discrete(zero, STD), secure.discrete(zero + 0.01, STD)
    assert told_apart(at_0, at_1) < 1e-3
    assert told_apart(at_1, at_0) < 1e-3
    bits = range(GRID_LOG2, GRID_LOG2 + 8)
    table = [[(finest(x) == bit).sum() for bit in bits] for x in (at_0, at_1)]
    assert stats.chi2_contingency(table).pvalue > 1e-6
    assert (at_0 == 0).sum() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_bits_of_a_simulation_do(dtype):
    """So the test above can fail, and a simulation is no release."""
    zero, noise = torch.zeros(200_000, dtype=dtype), seeded()
    at_0 = noise.discrete(zero, STD)
    at_1 = noise.discrete(zero + 0.01, STD)
    at_0 = at_0[at_0 != 0]
    assert told_apart(at_0, at_1) > 0.004


@pytest.mark.parametrize("statistic", [ClassSums(2.0), Histogram(), Histogram("replace_one")])
def test_opendp_agrees_with_what_a_release_costs(secure, measurements, statistic):
    """Its privacy map, rho of zero-concentrated privacy, is mu^2 / 2 of the multiplier paid for."""
    multiplier = 2.0
    gaussian(torch.zeros(10, 32, dtype=torch.float64), statistic, multiplier, secure)
    (measurement,) = measurements
    assert "ZeroConcentratedDivergence" in str(measurement.output_measure)
    rho = measurement.map(statistic.l2_sensitivity)
    assert rho == pytest.approx(1 / (2 * multiplier**2), rel=1e-6)


# Nobody can repeat it


def everything(secure) -> list[float]:
    """A few numbers from each kind of noise."""
    zero = torch.zeros(3, dtype=torch.float64)
    parts = secure.discrete(zero, 1.0), secure.floating(zero, 1.0), secure.uniform(3)
    return torch.cat(parts).tolist()


def test_no_seed_repeats_secure_noise(secure):
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    out = []
    for _ in range(2):
        torch.manual_seed(0)  # noqa: TID251
        np.random.seed(0)  # noqa: NPY002, TID251
        random.seed(0)  # noqa: TID251
        out += everything(secure)
        out += everything(client(three_shards()[0], small_net(), privacy=SECURE).noise("x"))
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    random.setstate(state[2])
    assert len(set(out)) == len(out) == 36


SECURE = Privacy(noise="secure")


def test_forked_processes_draw_different_noise(secure):
    everything(secure)  # whatever it keeps between draws is there before the fork
    out = []
    for _ in range(3):
        read, write = os.pipe()
        with warnings.catch_warnings():  # a fork beside other threads; the child starts none
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            try:
                os.write(write, repr(everything(secure)).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as file:
            out += eval(file.read())
        os.waitpid(child, 0)
    out += everything(secure)
    assert len(set(out)) == len(out) == 36


def test_a_secure_source_looks_at_no_stream(secure):
    stream = Rng(0).torch("privacy noise")
    before = stream.get_state()
    noise = source("secure", stream)
    everything(noise)
    assert not noise.simulated
    assert torch.equal(stream.get_state(), before)
    assert source("seeded", stream).simulated


# Floating-point noise, and coins


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_secure_floating_noise_has_the_size_and_shape_that_was_asked_for(secure, dtype):
    value = torch.full((400, 200), 3.0, dtype=dtype)
    out = secure.floating(value, STD)
    assert (out.shape, out.dtype) == (value.shape, dtype)
    noise = out.double() - 3
    assert is_gaussian(noise, STD)
    assert not is_gaussian(noise, STD * 1.04)
    assert not is_gaussian(noise, STD * 0.96)
    assert correlated(noise[:200]) < 6.5
    assert correlated([noise.ravel()[1:], noise.ravel()[:-1]]) < 5
    assert value.eq(3).all()


def test_gradients_get_floating_noise_and_statistics_discrete_noise(secure, measurements):
    zero = torch.zeros(50, dtype=torch.float64)
    gradient = gaussian(zero, GradientSum(1.0), 1.0, secure)
    assert not measurements
    assert (gradient * 2.0**-GRID_LOG2 % 1).any()
    gaussian(zero, ClassSums(1.0), 1.0, secure)
    assert len(measurements) == 1


def test_coins_are_uniform_and_independent(secure):
    for noise in (secure, seeded()):
        coins = noise.uniform(100_000)
        assert (coins.shape, coins.dtype) == ((100_000,), torch.float64)
        assert stats.kstest(coins.numpy(), "uniform").pvalue > 1e-6
        assert correlated([coins[1:], coins[:-1]]) < 5
    coins = secure.uniform(100_000)
    assert coins.min() > 0
    assert coins.max() < 1
    assert len(coins.unique()) == len(coins)
    assert secure.uniform(0).shape == (0,)


# Seeded noise


def test_seeded_noise_is_the_same_for_the_same_seed_and_fresh_in_every_call():
    value = torch.zeros(100, dtype=torch.float64)
    first, again, other = seeded(1), seeded(1), seeded(2)
    a, b = first.discrete(value, STD), first.discrete(value, STD)
    assert torch.equal(a, again.discrete(value, STD))
    assert torch.equal(b, again.discrete(value, STD))
    assert not (a == b).any()
    assert not (a == other.discrete(value, STD)).any()
    assert torch.equal(first.uniform(9), again.uniform(9))
    assert seeded().floating(value.float(), STD).dtype == torch.float32
    assert is_gaussian(seeded(3).floating(torch.zeros(80_000), STD), STD)


def test_clients_rounds_and_purposes_share_no_noise():
    """Equal noise in two places would cancel in their difference."""
    net, shard = small_net(), three_shards()[0]
    rows, value = [], torch.zeros(4000, dtype=torch.float64)
    for id, round, purpose in itertools.product((0, 1, 2), (1, 2, 3), ("release", "training", "b")):
        me = client(shard, net, round, id, rng=Rng(0).at("client", id, round))
        rows.append(me.noise(purpose).discrete(value, STD).numpy())
        assert np.array_equal(rows[-1], me.noise(purpose).discrete(value, STD).numpy())
    assert len(rows) == 27
    assert correlated(rows) < 5.5


# Without OpenDP


def test_without_opendp_one_line_says_what_to_install(monkeypatch):
    for module in ("opendp", "opendp.prelude", "opendp.mod"):
        monkeypatch.setitem(sys.modules, module, None)
    line = r'^privacy.noise="secure" needs OpenDP; pip install "feddpms\[secure\]"$'
    with pytest.raises(ConfigError, match=line):
        Secure()
    with pytest.raises(ConfigError, match=line):
        client(three_shards()[0], small_net(), privacy=SECURE).noise("release")
