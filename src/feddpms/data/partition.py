"""Splitting one training set over clients: who holds which examples.

`dirichlet` is the split by class of PFNM (Yurochkin et al., 2019) and NIID-Bench (Li et al., 2022):
for each class, q ~ Dir(beta 1_N) says which part of it goes to which client. `dirichlet_client` is
the split by client of FedDyn (Acar et al., 2021): each client draws its own label distribution. The
values of beta of the two are not comparable.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from feddpms.data import indexfile
from feddpms.errors import ConfigError
from feddpms.rng import Rng
from feddpms.types import settings

Kind = Literal["dirichlet", "dirichlet_client", "iid", "shards", "labels", "quantity", "file"]


@settings
class Partition:
    """How the training set is split over the clients."""

    kind: Kind = "dirichlet"
    """Way of splitting: by class (dirichlet), by client (dirichlet_client), evenly (iid), sorted by
    label (shards), a few classes each (labels), uneven sizes (quantity), or as a file says."""
    clients: Annotated[int, Ge(1)] = 10
    """Number of clients, at least 1."""
    beta: Annotated[float, Gt(0), Le(1e6)] = 0.5
    """Dirichlet concentration, above 0: the smaller, the more clients differ."""
    min_size: Annotated[int, Ge(1)] = 10
    """Fewest examples that a client may hold, at least 1; not for kind=file."""
    balance: bool = True
    """For dirichlet: a client that holds its share of all examples gets none of later classes."""
    tries: Annotated[int, Ge(1)] = 100
    """For dirichlet and quantity: draws until every client holds min_size, at least 1."""
    shards_per_client: Annotated[int, Ge(1)] = 2
    """For shards: pieces of the sorted examples that each client gets, at least 1."""
    labels_per_client: Annotated[int, Ge(1)] = 2
    """For labels: classes that each client gets, at least 1."""
    path: str = ""
    """For file: a JSON file {"clients": [[row, ...], ...]}; rows count from 0 in the training set
    after data.fraction is taken."""


def split(labels: np.ndarray, classes: int, partition: Partition, rng: Rng) -> list[np.ndarray]:
    """Split examples over clients.

    Every example goes to exactly one client; except that `labels` leaves out classes that no
    client got (clients x labels_per_client below the number of classes), and `file` what the file
    leaves out.

    Args:
        labels: labels [n] in 0..classes-1.
        classes: number of classes of the data set.
        partition: how to split.
        rng: the run's random streams; "partition" is used.

    Returns:
        One int64 array of row numbers for each client, ascending, disjoint.

    Raises:
        ConfigError: the settings do not fit the data, or no draw gave every client min_size.
        DataError: the index file is missing or broken.
    """
    labels = np.asarray(labels)
    if partition.kind == "file":
        return indexfile.read(partition.path, len(labels), partition.clients)
    _check_sizes(len(labels), partition)
    parts = KINDS[partition.kind](labels, classes, partition, rng.numpy("partition"))
    smallest = min(map(len, parts))
    if smallest < partition.min_size:
        raise ConfigError(
            f"partition.kind={partition.kind}: expected every client to hold at least "
            f"{partition.min_size} examples, got a client with {smallest}; use fewer clients or "
            "lower partition.min_size"
        )
    return [np.sort(part).astype(np.int64) for part in parts]


def describe(partition: Partition) -> str:
    """The split in a few words, such as "dirichlet, beta=0.5"."""
    details = {
        "dirichlet": f", beta={partition.beta:g}" + ("" if partition.balance else ", unbalanced"),
        "dirichlet_client": f", beta={partition.beta:g}",
        "quantity": f", beta={partition.beta:g}",
        "shards": f", {partition.shards_per_client} a client",
        "labels": f", {partition.labels_per_client} a client",
        "file": f", {partition.path}",
    }
    return partition.kind + details.get(partition.kind, "")


def _check_sizes(n: int, partition: Partition) -> None:
    """Whether there can be a split at all."""
    clients, least = partition.clients, partition.min_size
    if clients > n:
        raise ConfigError(
            f"partition.clients: expected at most {n}, one for each training example, got "
            f"{clients}; use fewer clients or raise data.fraction"
        )
    if clients * least > n:
        raise ConfigError(
            f"partition.min_size: expected clients x min_size of at most {n} training examples, "
            f"got {clients} x {least}; use fewer clients, lower partition.min_size or raise "
            "data.fraction"
        )


def _until_large_enough(
    draw: Callable[[], list[np.ndarray]], partition: Partition
) -> list[np.ndarray]:
    """Draw until every client holds min_size; the size is looked at when all classes are dealt."""
    smallest = 0
    for _ in range(partition.tries):
        parts = draw()
        smallest = max(smallest, min(map(len, parts)))
        if smallest >= partition.min_size:
            return parts
    raise ConfigError(
        f"partition.kind={partition.kind}: expected every client to hold at least "
        f"{partition.min_size} examples, got a smallest client of {smallest} in the best of "
        f"{partition.tries} tries; raise partition.beta ({partition.beta:g}), use fewer clients "
        f"({partition.clients}) or lower partition.min_size"
    )


def weights(
    beta: float, sizes: np.ndarray, share: float, balance: bool, rng: np.random.Generator
) -> np.ndarray:
    """How one class is shared: q ~ Dir(beta 1_N), without the clients that are full.

    Args:
        beta: concentration, above 0.
        sizes: examples that each client holds already [N].
        share: size from which on a client is full, n/N.
        balance: whether full clients get nothing; ignored if all are full.
        rng: random numbers.

    Returns:
        q [N], at least 0, sum 1; 0 for full clients.
    """
    full = sizes >= share
    if not balance or full.all():
        full = np.zeros(len(sizes), bool)
    q = np.where(full, 0.0, rng.dirichlet(np.full(len(sizes), beta)))
    total = q.sum()
    if total > 0 and np.isfinite(total):
        return q / total
    # A tiny beta can put all mass on a full client or underflow; the limit of Dir(beta) for
    # beta -> 0 is all mass on one client at random.
    lone = np.zeros(len(sizes))
    lone[rng.choice(np.flatnonzero(~full))] = 1.0
    return lone


def shares(q: np.ndarray, n: int) -> np.ndarray:
    """Whole numbers in the proportions of q (largest remainders).

    Cutting at floor(cumsum(q) n) would hand the last client what rounding leaves over, even if its
    weight is 0.

    Args:
        q: weights [N], at least 0, sum 1.
        n: what the result sums to.

    Returns:
        int64 [N]; 0 where q is 0.
    """
    exact = q * n
    whole = np.floor(exact).astype(np.int64)
    # What is left is at most the number of fractions above 0, and these come first.
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: n - whole.sum()]] += 1
    return whole


def _cut(rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of these sizes."""
    return np.split(rows, np.cumsum(sizes)[:-1])


def _dirichlet(
    labels: np.ndarray, classes: int, partition: Partition, rng: np.random.Generator
) -> list[np.ndarray]:
    """Each class is shared over the clients as Dir(beta) says."""
    n, clients = len(labels), partition.clients

    def draw() -> list[np.ndarray]:
        sizes = np.zeros(clients, np.int64)
        pieces: list[list[np.ndarray]] = []
        for k in range(classes):
            rows = rng.permutation(np.flatnonzero(labels == k))
            q = weights(partition.beta, sizes, n / clients, partition.balance, rng)
            pieces.append(_cut(rows, shares(q, len(rows))))
            sizes += [len(piece) for piece in pieces[-1]]
        return [np.concatenate(own) for own in zip(*pieces, strict=True)]

    return _until_large_enough(draw, partition)


def _dirichlet_client(
    labels: np.ndarray, classes: int, partition: Partition, rng: np.random.Generator
) -> list[np.ndarray]:
    """Each client draws a label distribution; sizes differ by at most 1.

    Clients take turns in random order, one example at a time, so that the last ones to choose are
    not left with what nobody wanted. A class that has run out drops out of all distributions: with
    few clients this makes them less skewed than beta says (10 clients, 10 classes, beta 0.1: 4.3
    effective classes a client where the distribution alone gives 2.5; 100 clients: 2.9).
    """
    n, clients = len(labels), partition.clients
    pools = [rng.permutation(np.flatnonzero(labels == k)).tolist() for k in range(classes)]
    q = rng.dirichlet(np.full(classes, partition.beta), clients)
    q = np.where(np.isfinite(q), q, 0.0)
    turns = rng.permutation(np.repeat(np.arange(clients), _even(n, clients)))
    left = np.array([len(pool) for pool in pools])
    reach = _reach(q, left)
    taken: list[list[int]] = [[] for _ in range(clients)]
    for client, u in zip(turns.tolist(), rng.random(n).tolist(), strict=True):
        k = int(np.searchsorted(reach[client], u, side="right"))
        taken[client].append(pools[k].pop())
        left[k] -= 1
        if not left[k]:
            reach = _reach(q, left)
    return [np.array(rows) for rows in taken]


def _reach(q: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Cumulative label distributions over the classes that are left [clients, classes].

    They end at infinity from the last class with weight on, so rounding can pick no other. A client
    none of whose classes are left takes the rest as it comes.
    """
    q = np.where(left > 0, q, 0.0)
    q[q.sum(1) == 0] = left
    if not left.any():
        return q
    reach = np.cumsum(q / q.sum(1, keepdims=True), axis=1)
    last = q.shape[1] - 1 - np.argmax(q[:, ::-1] > 0, axis=1)
    reach[np.arange(q.shape[1]) >= last[:, None]] = np.inf
    return reach


def _even(n: int, clients: int) -> np.ndarray:
    """Sizes [clients] that sum to n and differ by at most 1."""
    return n // clients + (np.arange(clients) < n % clients)


def _iid(
    labels: np.ndarray, classes: int, partition: Partition, rng: np.random.Generator
) -> list[np.ndarray]:
    """Equal sizes, labels by chance."""
    return _cut(rng.permutation(len(labels)), _even(len(labels), partition.clients))


def _shards(
    labels: np.ndarray, classes: int, partition: Partition, rng: np.random.Generator
) -> list[np.ndarray]:
    """Examples sorted by label are cut into pieces, and each client is dealt a few."""
    n, pieces = len(labels), partition.clients * partition.shards_per_client
    if pieces > n:
        raise ConfigError(
            f"partition.shards_per_client: expected clients x shards_per_client of at most {n} "
            f"training examples, got {partition.clients} x {partition.shards_per_client}; lower one"
        )
    rows = rng.permutation(n)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    cuts = _cut(rows, _even(n, pieces))
    hands = rng.permutation(pieces).reshape(partition.clients, -1)
    return [np.concatenate([cuts[i] for i in hand]) for hand in hands]


def _labels(
    labels: np.ndarray, classes: int, partition: Partition, rng: np.random.Generator
) -> list[np.ndarray]:
    """Each client gets a few classes, and shares each equally with the others that got it.

    Clients choose in turn, each among the classes with the fewest owners so far.
    """
    present = np.unique(labels)
    each = partition.labels_per_client
    if each > len(present):
        raise ConfigError(
            f"partition.labels_per_client: expected at most {len(present)}, the classes that occur "
            f"in the training data, got {each}; lower it"
        )
    owners: dict[int, list[int]] = {int(k): [] for k in present}
    for client in rng.permutation(partition.clients).tolist():
        order = sorted(rng.permutation(present).tolist(), key=lambda k: len(owners[k]))
        for k in order[:each]:
            owners[k].append(client)
    parts: list[list[np.ndarray]] = [[] for _ in range(partition.clients)]
    for k, clients in owners.items():
        if clients:
            rows = rng.permutation(np.flatnonzero(labels == k))
            pieces = _cut(rows, _even(len(rows), len(clients)))
            for client, piece in zip(clients, pieces, strict=True):
                parts[client].append(piece)
    return [np.concatenate(own) for own in parts]


def _quantity(
    labels: np.ndarray, classes: int, partition: Partition, rng: np.random.Generator
) -> list[np.ndarray]:
    """Sizes as Dir(beta) says, labels by chance."""
    n, empty = len(labels), np.zeros(partition.clients)

    def draw() -> list[np.ndarray]:
        q = weights(partition.beta, empty, 1.0, False, rng)
        return _cut(rng.permutation(n), shares(q, n))

    return _until_large_enough(draw, partition)


KINDS: dict[str, Callable[..., list[np.ndarray]]] = {
    "dirichlet": _dirichlet,
    "dirichlet_client": _dirichlet_client,
    "iid": _iid,
    "shards": _shards,
    "labels": _labels,
    "quantity": _quantity,
}
