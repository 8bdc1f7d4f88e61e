"""Membership scores: AUC and TPR against brute force, intervals that cover, limits, distances."""

import math
import tracemalloc

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_sigma_gaussian
from scipy.spatial.distance import cdist
from scipy.stats import binomtest, norm

from feddpms.privacy.attack import auc_limit, membership, nearest, roc_auc


def gaussians(seed, n, m, gap=1.0, spread=1.0):
    rng = np.random.default_rng(seed)
    return gap + spread * rng.standard_normal(n), rng.standard_normal(m)


def test_the_auc_of_two_gaussians():
    members, others = gaussians(0, 40_000, 60_000)
    assert roc_auc(members, others) == pytest.approx(norm.cdf(1 / math.sqrt(2)), abs=0.004)
    assert roc_auc(others, members) == pytest.approx(1 - roc_auc(members, others))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (8, 3), (40, 70)])
@pytest.mark.parametrize("values", [2, 5, 10**9])
def test_the_auc_counts_pairs_and_ties_half(n, m, values):
    rng = np.random.default_rng(n + m)
    members, others = rng.integers(0, values, n), rng.integers(0, values, m)
    pairs = np.sign(members[:, None] - others).mean() / 2 + 0.5
    assert roc_auc(members, others) == pytest.approx(pairs)
    got = membership(members, others)
    assert got.auc == pytest.approx(pairs)
    assert 0 <= got.auc_low <= got.auc <= got.auc_high <= 1
    assert (got.members, got.others, got.confidence) == (n, m, 0.95)


def test_scores_that_are_all_equal_say_nothing():
    got = membership(np.zeros(50), np.zeros(200))
    assert got.auc == 0.5
    assert got.auc_low < 0.4 < 0.6 < got.auc_high
    assert got.tpr_at_1 == got.tpr_at_01 == got.tpr_at_1_low == 0


def test_few_scores_never_make_certain():
    """Three above three: 1 is the best guess, and 0.29 = 0.025^(1/3) cannot be ruled out."""
    got = membership([4, 5, 6], [1, 2, 3])
    assert (got.auc, got.auc_high) == (1, 1)
    assert got.auc_low == pytest.approx(0.025 ** (1 / 3))
    flipped = membership([1, 2, 3], [4, 5, 6])
    assert (flipped.auc, flipped.auc_low) == (0, 0)
    assert flipped.auc_high == pytest.approx(1 - 0.025 ** (1 / 3))
    one = membership([1.0], [0.0])
    assert (one.auc_low, one.auc_high) == (pytest.approx(0.025), 1)


@pytest.mark.parametrize(
    ("n", "m", "gap", "spread", "confidence"),
    [
        (300, 300, 0.0, 1, 0.95),
        (60, 240, 1.0, 3, 0.95),
        (40, 40, 1.0, 1, 0.95),
        (50, 50, 1, 1, 0.8),
    ],
)
def test_the_auc_interval_covers_the_truth_as_often_as_it_says(n, m, gap, spread, confidence):
    truth = norm.cdf(gap / math.hypot(1, spread))
    covered = 0
    for seed in range(400):
        got = membership(*gaussians(seed, n, m, gap, spread), confidence)
        covered += got.auc_low <= truth <= got.auc_high
    assert covered / 400 == pytest.approx(confidence, abs=0.035)


def test_the_auc_interval_agrees_with_a_bootstrap():
    members, others = (np.round(s, 1) for s in gaussians(3, 400, 250, 0.7))  # many ties
    rng = np.random.default_rng(0)
    again = [roc_auc(rng.choice(members, 400), rng.choice(others, 250)) for _ in range(500)]
    got = membership(members, others)
    assert np.quantile(again, [0.025, 0.975]) == pytest.approx(
        [got.auc_low, got.auc_high], abs=0.01
    )


@pytest.mark.parametrize("m", [1, 99, 100, 101, 199, 200, 1000, 2900])
@pytest.mark.parametrize("values", [3, 60, 10**9])
def test_the_tpr_is_the_best_that_the_fpr_allows(m, values):
    """Against every threshold in turn; with ties the FPR may have to stay below its limit."""
    rng = np.random.default_rng(m)
    members = rng.integers(0, values, 250) + values // 20
    others = rng.integers(0, values, m)
    got = membership(members, others, 0.9)
    for fpr, tpr, low, high in [
        (0.01, got.tpr_at_1, got.tpr_at_1_low, got.tpr_at_1_high),
        (0.001, got.tpr_at_01, got.tpr_at_01_low, got.tpr_at_01_high),
    ]:
        allowed = [t for t in np.unique(others) if (others > t).sum() * 1000 <= fpr * 1000 * m]
        hits = max(int((members > t).sum()) for t in allowed)
        assert tpr == hits / 250
        exact = binomtest(hits, 250).proportion_ci(0.9)
        assert (low, high) == pytest.approx((exact.low, exact.high))


def test_the_tpr_of_two_gaussians():
    got = membership(*gaussians(4, 60_000, 60_000, 2.0))
    assert got.tpr_at_1 == pytest.approx(norm.cdf(2 + norm.ppf(0.01)), abs=0.02)
    assert got.tpr_at_01 == pytest.approx(norm.cdf(2 + norm.ppf(0.001)), abs=0.03)


def test_infinite_scores_are_ranked():
    got = membership([math.inf, 1.0, 2.0], [-math.inf, 0.0, 1.5])
    assert got.auc == pytest.approx(8 / 9)
    assert got.tpr_at_1 == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [[], [0.0, math.nan], [[0.0, 1.0]], 0.0])
def test_what_cannot_be_ranked_is_refused(bad):
    for call in (roc_auc, membership):
        for pair in ((bad, [0.0]), ([0.0], bad)):
            with pytest.raises(ValueError, match="expected scores"):
                call(*pair)
    with pytest.raises(ValueError, match="expected a confidence"):
        membership([0.0], [0.0], 1.0)


@pytest.mark.parametrize(
    ("epsilon", "limit"), [(0.5, 0.5400), (1, 0.5752), (2, 0.6386), (4, 0.7435), (8, 0.8806)]
)
def test_auc_limits_at_delta_1e_5(epsilon, limit):
    assert auc_limit(1 / get_sigma_gaussian(epsilon, 1e-5)) == pytest.approx(limit, abs=5e-5)


def test_the_limit_holds_with_equality_for_the_best_attack():
    """The likelihood ratio of a Gaussian release with mu 1 reaches its AUC."""
    members, others = gaussians(6, 60_000, 60_000, 1.0)
    got = membership(members, others)
    assert got.auc_low < auc_limit(1.0) < got.auc_high
    assert auc_limit(0.0) == 0.5


@pytest.mark.parametrize("chunk", [1, 7, 20, 1024])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.uint8])
def test_nearest_is_the_least_of_all_distances(chunk, dtype):
    rng = np.random.default_rng(9)
    points = (200 * rng.random((20, 5))).astype(dtype)
    pool = (200 * rng.random((33, 5))).astype(dtype)
    want = cdist(points.astype(float), pool.astype(float)).min(axis=1)
    got = nearest(points, pool, chunk)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_copy_is_at_distance_0_wherever_the_pool_lies():
    rng = np.random.default_rng(10)
    pool = 1e8 + rng.random((500, 30))
    points = pool[::7] + np.where(np.arange(72) % 2, 1e-3, 0.0)[:, None]
    got = nearest(points, pool, 64)
    assert (got[::2] == 0).all()
    np.testing.assert_allclose(got[1::2], 1e-3 * math.sqrt(30), rtol=1e-4)
    assert nearest(pool[:0], pool).shape == (0,)


def test_memory_for_distances_stays_bounded():
    """All pairs at once would take 512 MB."""
    points, pool = np.zeros((8000, 8), np.float32), np.ones((8000, 8), np.float32)
    tracemalloc.start()
    nearest(points, pool)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6


@pytest.mark.parametrize(
    ("points", "pool"),
    [(np.zeros((2, 3)), np.zeros((0, 3))), (np.zeros((2, 3)), np.zeros((2, 4))), ([1.0], [1.0])],
)
def test_distances_need_a_pool_of_the_same_width(points, pool):
    with pytest.raises(ValueError, match="expected points"):
        nearest(points, pool)
