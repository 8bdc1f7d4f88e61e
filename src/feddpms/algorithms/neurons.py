"""Which hidden neurons of several clients are one and the same: a Beta-Bernoulli process.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, "Bayesian Nonparametric Federated Learning
of Neural Networks", ICML 2019. A client's neuron v ~ N(theta_i, sigma^2) is a copy of a global one,
theta_i ~ N(0, sigma0^2). Given who is matched to whom at all other clients, the most likely match
of one client maximises a sum of scores: it is a linear assignment. With S and Q the sums of v p and
of p over the others that have neuron i, p = 1/sigma^2, m their number, J that of all clients:

    existing i    |S + v p|^2 / (1/sigma0^2 + Q + p) - |S|^2 / (1/sigma0^2 + Q) + 2 log(m / (J - m))
    k-th new one  |v p|^2 / (1/sigma0^2 + p) + 2 log(gamma / J) - 2 log k
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from scipy.optimize import linear_sum_assignment

from feddpms.types import settings

Array = np.ndarray


@settings
class Prior:
    """What is believed of neurons before any is seen, and how long is searched."""

    sigma: Annotated[float, Ge(1e-6), Le(1e6)] = 1.0
    """standard deviation of a client's weights around those of the global neuron"""
    sigma0: Annotated[float, Ge(1e-6), Le(1e6)] = 1.0
    """standard deviation of a global neuron's weights around 0"""
    gamma: Annotated[float, Ge(1e-12), Le(1e12)] = 1.0
    """mass of the process; the larger, the more of a client's neurons count as new ones"""
    sweeps: Annotated[int, Ge(0)] = 5
    """how often every client is matched again, with all others held fixed"""


def match(rows: Sequence[Array], weights: Sequence[Array], prior: Prior) -> list[Array]:
    """The global neuron of each client's neurons.

    Args:
        rows: each client's neurons [L_j, d].
        weights: of each client's entries [d], times 1/sigma^2 for their precision.
        prior: what is believed of neurons.

    Returns:
        For each client int64 [L_j], all different, in 0..L-1; each of the L has a client.
    """
    pool = _Pool(rows, weights, prior)
    for _ in range(1 + prior.sweeps):
        before = pool.found
        for j in range(len(rows)):
            pool.assign(j)
        if all(map(np.array_equal, before, pool.found)):
            break
    return pool.found


class _Pool:
    """The global neurons: sums over the clients that have each, and which client has which."""

    def __init__(self, rows: Sequence[Array], weights: Sequence[Array], prior: Prior):
        self.rows, self.prior, d = rows, prior, rows[0].shape[1]
        self.precisions = [w / prior.sigma**2 for w in weights]
        self.total, self.sure, self.count = np.zeros((0, d)), np.zeros((0, d)), np.zeros(0)
        self.found = [np.zeros(0, dtype=np.int64)] * len(rows)

    def assign(self, j: int) -> None:
        """Match one client, given all others."""
        self._add(j, -1)
        keep = self.count > 0
        self.total, self.sure, self.count = self.total[keep], self.sure[keep], self.count[keep]
        self.found = [(np.cumsum(keep) - 1)[at] for at in self.found]
        _, chosen = linear_sum_assignment(self._scores(j), maximize=True)
        fresh = chosen >= len(self.count)  # numbered in the order of the client's own
        chosen[fresh] = len(self.count) + np.arange(fresh.sum())
        more = [(0, int(fresh.sum())), (0, 0)]
        self.total, self.sure = np.pad(self.total, more), np.pad(self.sure, more)
        self.count = np.pad(self.count, more[0])
        self.found[j] = chosen
        self._add(j, 1)

    def _add(self, j: int, sign: int) -> None:
        """Count a client's neurons, or take them out."""
        at, p = self.found[j], self.precisions[j]
        self.total[at] += sign * p * self.rows[j][: len(at)]
        self.sure[at] += sign * p
        self.count[at] += sign

    def _scores(self, j: int) -> Array:
        """Of each of a client's neurons, with each existing and each possible new one."""
        p, ground, clients = self.precisions[j], 1 / self.prior.sigma0**2, len(self.rows)
        pv, after = self.rows[j] * p, 1 / (ground + self.sure + p)
        # |S + v p|^2 multiplied out, so that it is two matrix products
        old = pv**2 @ after.T + 2 * pv @ (self.total * after).T
        old += (self.total**2 * (after - 1 / (ground + self.sure))).sum(1)
        old += 2 * np.log(self.count / (clients - self.count))
        new = (pv**2 / (ground + p)).sum(1, keepdims=True) + 2 * np.log(self.prior.gamma / clients)
        return np.hstack([old, new - 2 * np.log(np.arange(1, len(pv) + 1))])
