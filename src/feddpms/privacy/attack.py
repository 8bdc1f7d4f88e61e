"""Membership inference: how well scores tell a model's training records from others.

An AUC near 1/2 proves nothing about epsilon. An attack with power shows a leak; a weak one shows
only that it is weak.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, logit, ndtr, ndtri
from scipy.stats import rankdata

from feddpms.privacy.audit import lower_limit, upper_limit


@dataclass(frozen=True)
class Membership:
    """How well an attack's scores separate members from others.

    The limits of each TPR are for its threshold as it fell; the chance in the others' scores, which
    set the threshold, is not in them.

    Attributes:
        auc: probability that a member scores higher than another record, ties counted half.
        auc_low: lower confidence limit of `auc`.
        auc_high: upper confidence limit of `auc`.
        tpr_at_1: share of members found where at most 1 % of the others are.
        tpr_at_1_low: lower confidence limit of `tpr_at_1`.
        tpr_at_1_high: upper confidence limit of `tpr_at_1`.
        tpr_at_01: share of members found where at most 0.1 % of the others are.
        tpr_at_01_low: lower confidence limit of `tpr_at_01`.
        tpr_at_01_high: upper confidence limit of `tpr_at_01`.
        members: number of members.
        others: number of other records; below 100 (1000) no other record at all is let through at
            1 % (0.1 %).
        confidence: of each interval, two-sided.
    """

    auc: float
    auc_low: float
    auc_high: float
    tpr_at_1: float
    tpr_at_1_low: float
    tpr_at_1_high: float
    tpr_at_01: float
    tpr_at_01_low: float
    tpr_at_01_high: float
    members: int
    others: int
    confidence: float


def membership(members: ArrayLike, others: ArrayLike, confidence: float = 0.95) -> Membership:
    """Judge an attack by its AUC and by its TPR at a low FPR (Carlini et al. 2022).

    Args:
        members: scores of training records [n], higher is more likely a member.
        others: scores of records from the same distribution that were not trained on [m].
        confidence: of each interval, in (0, 1).

    Returns:
        AUC with DeLong's interval, TPRs with Clopper-Pearson intervals.

    Raises:
        ValueError: no scores on a side, a score that is not a number, or a confidence out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence in (0, 1), got {confidence}")
    members, others = _checked(members), _checked(others)
    tail = (1 - confidence) / 2
    auc, auc_low, auc_high = _auc(members, others, tail)
    at_1, at_1_low, at_1_high = _tpr(members, others, 0.01, tail)
    at_01, at_01_low, at_01_high = _tpr(members, others, 0.001, tail)
    return Membership(
        auc=auc,
        auc_low=auc_low,
        auc_high=auc_high,
        tpr_at_1=at_1,
        tpr_at_1_low=at_1_low,
        tpr_at_1_high=at_1_high,
        tpr_at_01=at_01,
        tpr_at_01_low=at_01_low,
        tpr_at_01_high=at_01_high,
        members=len(members),
        others=len(others),
        confidence=confidence,
    )


def roc_auc(members: ArrayLike, others: ArrayLike) -> float:
    """Probability that a member scores higher than another record, ties counted half.

    Args:
        members: scores of members [n].
        others: scores of other records [m].

    Returns:
        The area under the ROC curve, in [0, 1].

    Raises:
        ValueError: no scores on a side, or a score that is not a number.
    """
    return float(_placements(_checked(members), _checked(others))[0].mean())


def auc_limit(mu: float) -> float:
    """Highest AUC of any attack on a Gaussian release: Phi(mu / sqrt 2).

    The area under the ROC curve Phi(mu + Phi^-1(FPR)) of Dong, Roth and Su (2022).

    Args:
        mu: of the release, at least 0.

    Returns:
        An AUC in [0.5, 1].
    """
    return float(ndtr(mu / math.sqrt(2)))


def nearest(points: ArrayLike, pool: ArrayLike, chunk: int = 1024) -> np.ndarray:
    """Euclidean distance of each point to the nearest row of a pool.

    Works in blocks of at most `chunk` x `chunk` pairs: 200 MB are enough for 1024 x 3072 blocks.

    Args:
        points: [n, d], finite.
        pool: [m, d], finite, m at least 1.
        chunk: rows of a block, at least 1.

    Returns:
        Distances [n] in float64.

    Raises:
        ValueError: shapes that do not fit, or an empty pool.
    """
    points, pool = np.asarray(points), np.asarray(pool)
    if points.ndim != 2 or pool.ndim != 2 or points.shape[1] != pool.shape[1] or not len(pool):
        raise ValueError(
            f"expected points [n, d] and a pool [m, d], got {points.shape}, {pool.shape}"
        )
    distances = np.full(len(points), np.inf)
    for i in range(0, len(points), chunk):
        some = points[i : i + chunk]
        for j in range(0, len(pool), chunk):
            rows = pool[j : j + chunk].astype(np.float64)
            gaps = some - rows[_closest(some, rows)]
            here = distances[i : i + chunk]
            np.minimum(here, np.sqrt(np.einsum("ij,ij->i", gaps, gaps)), out=here)
    return distances


def _closest(points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The index of the row nearest to each point [n].

    |a - b|^2 = |a|^2 - 2 ab + |b|^2 is one fast matrix product but loses digits, so it only chooses
    the row. Centring keeps a common offset from costing more of them.
    """
    centre = rows.mean(axis=0)
    rows = rows - centre
    gaps = (-2 * (points - centre)) @ rows.T
    gaps += np.einsum("ij,ij->i", rows, rows)
    return gaps.argmin(axis=1)


def _checked(scores: ArrayLike) -> np.ndarray:
    """The scores as float64, refused if there are none or one is not a number."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or np.isnan(scores).any():
        raise ValueError(f"expected scores [n] without NaN, n at least 1, got shape {scores.shape}")
    return scores


def _placements(members: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of others below each member [n], share of members above each other [m]; ties half."""
    ranks = rankdata(np.concatenate([members, others]))
    above = (ranks[: len(members)] - rankdata(members)) / len(others)
    below = 1 - (ranks[len(members) :] - rankdata(others)) / len(members)
    return above, below


def _auc(members: np.ndarray, others: np.ndarray, tail: float) -> tuple[float, float, float]:
    """AUC and its limits, from DeLong's variance on the logit scale.

    DeLong, DeLong and Clarke-Pearson (1988), by ranks as in Sun and Xu (2014). Not a bootstrap: it
    agrees with one, needs no random numbers, and costs one sort. In simulation a 95 % interval
    holds the truth 95 to 97 % of the time, but 91 % at 40 scores a side and an AUC of 0.96.
    """
    above, below = _placements(members, others)
    auc, pairs = float(above.mean()), min(len(members), len(others))
    variance = (
        above.var(ddof=1) / len(members) + below.var(ddof=1) / len(others) if pairs > 1 else 0
    )
    if variance == 0:
        # All scores equal, or all members above all others: DeLong would claim certainty. Disjoint
        # pairs are independent trials with success probability AUC, so they bound it as a rate.
        hits = auc * pairs
        return auc, float(lower_limit(hits, pairs, tail)), float(upper_limit(hits, pairs, tail))
    half = -ndtri(tail) * math.sqrt(variance) / (auc * (1 - auc))
    return auc, float(expit(logit(auc) - half)), float(expit(logit(auc) + half))


def _tpr(
    members: np.ndarray, others: np.ndarray, fpr: float, tail: float
) -> tuple[float, float, float]:
    """TPR and its limits at the lowest threshold that at most a share `fpr` of the others pass."""
    passing = int(fpr * len(others))
    # Only scores strictly above the threshold pass, so ties with it can but lower the FPR.
    threshold = np.sort(others)[-1 - passing]
    hits, n = int((members > threshold).sum()), len(members)
    return hits / n, float(lower_limit(hits, n, tail)), float(upper_limit(hits, n, tail))
