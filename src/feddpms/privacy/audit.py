"""Empirical lower bounds on the epsilon of a Gaussian release.

Call the release many times on two neighbouring datasets and see how well a fixed test tells the
outputs apart. An audit can refute a claim; it cannot prove one, and it sees only the pair of
datasets that it was given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom


@dataclass(frozen=True)
class ReleaseAudit:
    """What an audit found; the claim is refuted if `epsilon_lower` is above `claimed_epsilon`.

    Attributes:
        claimed_epsilon: the claim that was put to the test.
        delta: of the claim and of both lower bounds.
        pair_mu: how far apart the two datasets are under the claim, in standard deviations of the
            score; below the claim's own mu the pair is not the worst one and the audit is weaker.
        runs: calls of the release on each side.
        confidence: probability that `mu_lower` is below the truth, at least.
        true_positives: outputs with the record that the test called "with".
        false_positives: outputs without the record that the test called "with".
        non_finite: outputs on both sides whose score was not finite; each counts as "with". With
            any, do not read the bounds as a pass.
        mu_lower: lower bound on the mu of a Gaussian release; may be negative or -inf.
        epsilon_lower: the same as an epsilon at `delta`; 0 if `mu_lower` is not positive.
        epsilon_lower_assumption_free: lower bound on epsilon at `delta` for a release of any kind.
        doubled_mu_power: probability that a release of twice the claim's mu would be refuted.
        repeated_power: the same for sqrt(2) times the mu, which is a release drawn twice.
    """

    claimed_epsilon: float
    delta: float
    pair_mu: float
    runs: int
    confidence: float
    true_positives: int
    false_positives: int
    non_finite: int
    mu_lower: float
    epsilon_lower: float
    epsilon_lower_assumption_free: float
    doubled_mu_power: float
    repeated_power: float


def audit(
    draw: Callable[[bool], np.ndarray],
    base: ArrayLike,
    shift: ArrayLike,
    std: ArrayLike,
    runs: int,
    claimed_epsilon: float,
    delta: float,
    alpha: float = 0.01,
) -> ReleaseAudit:
    """Audit a release on one pair of neighbouring datasets.

    The score is the log likelihood ratio of the two datasets under the claim, scaled to variance 1:
    sum((x - base) * shift / std^2) / norm(shift / std).

    Args:
        draw: one fresh call of the release, on the dataset without (False) or with (True) the
            extra record; returns its output [d].
        base: output without noise and without the record [d].
        shift: what the record adds to the output without noise, as the claim has it [d].
        std: standard deviation of each coordinate's noise, as the claim has it [d], above 0.
        runs: calls on each side, at least 1.
        claimed_epsilon: above 0, finite.
        delta: in (0, 1).
        alpha: probability allowed for a wrong `mu_lower`, in (0, 1).

    Returns:
        The bounds, and the power that the audit had.

    Raises:
        ValueError: a shape or a number does not fit the above.
    """
    base, shift, std = (np.asarray(v, dtype=np.float64) for v in (base, shift, std))
    if base.ndim != 1 or not base.shape == shift.shape == std.shape:
        raise ValueError(
            f"expected base, shift and std [d], got {base.shape}, {shift.shape}, {std.shape}"
        )
    if not (std > 0).all() or not shift.any():
        raise ValueError("expected a std above 0 everywhere and a shift that is not all 0")
    pair_mu = float(np.linalg.norm(shift / std))
    direction = shift / std**2 / pair_mu

    def score(present: bool) -> float:
        x = np.asarray(draw(present), dtype=np.float64)
        if x.shape != base.shape:
            raise ValueError(f"expected an output of shape {base.shape}, got {x.shape}")
        with np.errstate(invalid="ignore", over="ignore"):  # a broken output is a finding
            return float(((x - base) * direction).sum())

    # The two sides take turns, so that a release that changes over time does not look like a leak.
    scores = np.array([(score(False), score(True)) for _ in range(runs)]).reshape(-1, 2)
    return audit_scores(scores[:, 0], scores[:, 1], pair_mu, claimed_epsilon, delta, alpha)


def audit_scores(
    absent: np.ndarray,
    present: np.ndarray,
    pair_mu: float,
    claimed_epsilon: float,
    delta: float,
    alpha: float = 0.01,
) -> ReleaseAudit:
    """Audit a release from the scores of its outputs.

    The test says "with" above half the claim's mu, which is fixed before any output is seen, and
    only in that direction. Each error rate has a one-sided Clopper-Pearson bound at alpha / 2.
    mu >= Phi^-1(TPR) - Phi^-1(FPR) holds for a Gaussian release (Nasr et al. 2023, "Tight auditing
    of differentially private machine learning"), epsilon >= ln((TPR - delta) / FPR) for any
    (Jagielski et al. 2020, "Auditing differentially private machine learning").

    Args:
        absent: scores without the record [runs], under the claim from N(0, 1).
        present: scores with it [runs], under the claim from N(pair_mu, 1).
        pair_mu: distance of the two datasets under the claim, above 0.
        claimed_epsilon: above 0, finite.
        delta: in (0, 1).
        alpha: probability allowed for a wrong `mu_lower`, in (0, 1).

    Returns:
        The bounds, and the power that the audit had.

    Raises:
        ValueError: no scores, two lengths, or a number out of range.
    """
    absent, present = np.asarray(absent), np.asarray(present)
    if absent.ndim != 1 or absent.shape != present.shape or not len(absent):
        raise ValueError(
            f"expected as many scores on each side, got {absent.shape}, {present.shape}"
        )
    runs, threshold = len(absent), _claimed_mu(claimed_epsilon, delta) / 2
    # An output that is not a number tells the datasets apart as well as a large score does.
    true, false = (int(((s > threshold) | ~np.isfinite(s)).sum()) for s in (present, absent))
    tpr, fpr = lower_limit(true, runs, alpha / 2), upper_limit(false, runs, alpha / 2)
    mu = float(ndtri(tpr) - ndtri(fpr))
    return ReleaseAudit(
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        pair_mu=pair_mu,
        runs=runs,
        confidence=1 - alpha,
        true_positives=true,
        false_positives=false,
        non_finite=int((~np.isfinite([absent, present])).sum()),
        mu_lower=mu,
        epsilon_lower=_epsilon(mu, delta),
        epsilon_lower_assumption_free=max(0.0, math.log((tpr - delta) / fpr))
        if tpr > delta
        else 0.0,
        doubled_mu_power=power(2.0, pair_mu, claimed_epsilon, delta, runs, alpha),
        repeated_power=power(math.sqrt(2), pair_mu, claimed_epsilon, delta, runs, alpha),
    )


@cache  # the same for every audit of a claim
def power(
    factor: float,
    pair_mu: float,
    claimed_epsilon: float,
    delta: float,
    runs: int,
    alpha: float = 0.01,
) -> float:
    """Probability that an audit refutes the claim of a release with `factor` times its mu.

    Exact: the two counts are binomial. The release is taken to have noise that is too small by the
    factor.

    Args:
        factor: true mu over claimed mu, above 0; 1 gives the rate of false alarms.
        pair_mu: distance of the two datasets under the claim, above 0.
        claimed_epsilon: above 0, finite.
        delta: in (0, 1).
        runs: calls on each side, at least 1.
        alpha: of the audit, in (0, 1).

    Returns:
        A probability.

    Raises:
        ValueError: a number is out of range.
    """
    if not (factor > 0 and 0 < pair_mu < math.inf and runs >= 1 and 0 < alpha < 1):
        raise ValueError(
            "expected factor and pair_mu above 0, runs of 1 or more, alpha in (0, 1), "
            f"got {factor}, {pair_mu}, {runs}, {alpha}"
        )
    mu = _claimed_mu(claimed_epsilon, delta)
    counts = np.arange(runs + 1)
    # For each count of false positives, the least count of true positives that refutes the claim.
    reached = ndtri(lower_limit(counts, runs, alpha / 2))
    needed = mu + ndtri(upper_limit(counts, runs, alpha / 2))
    least = np.searchsorted(reached, needed, side="right")
    fpr, tpr = ndtr(-factor * mu / 2), ndtr(factor * (pair_mu - mu / 2))
    return min(1.0, float(binom.pmf(counts, runs, fpr) @ binom.sf(least - 1, runs, tpr)))


def lower_limit(hits: ArrayLike, trials: int, alpha: float) -> np.ndarray:
    """One-sided lower limit of a proportion (Clopper and Pearson 1934).

    Args:
        hits: successes, 0..trials, any shape.
        trials: number of trials, at least 1.
        alpha: probability that the limit is above the truth, at most; in (0, 1).

    Returns:
        Limits in [0, 1), of the shape of `hits`.
    """
    hits = np.asarray(hits)
    some = np.where(hits > 0, hits, 1)
    return np.where(hits > 0, beta.ppf(alpha, some, trials - some + 1), 0.0)


def upper_limit(hits: ArrayLike, trials: int, alpha: float) -> np.ndarray:
    """One-sided upper limit of a proportion, mirror image of `lower_limit`."""
    return 1 - lower_limit(trials - np.asarray(hits), trials, alpha)


@cache
def _claimed_mu(epsilon: float, delta: float) -> float:
    """The mu of a Gaussian release that is exactly (epsilon, delta)-private."""
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise ValueError(f"expected epsilon above 0 and delta in (0, 1), got {epsilon}, {delta}")
    return 1 / get_sigma_gaussian(epsilon, delta)


def _epsilon(mu: float, delta: float) -> float:
    """The epsilon at delta of a Gaussian release; 0 if mu is not positive."""
    with np.errstate(divide="ignore"):  # the library takes the log of 0 where mu is tiny
        return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0
