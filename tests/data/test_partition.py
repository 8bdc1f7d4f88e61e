import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from feddpms.data import Partition, describe, effective_classes, split
from feddpms.data import counts as counted
from feddpms.data import partition as module
from feddpms.data.partition import shares, weights
from feddpms.errors import ConfigError, DataError
from feddpms.rng import Rng

KINDS = ("dirichlet", "dirichlet_client", "iid", "shards", "labels", "quantity")
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
light = settings(max_examples=60, deadline=None)


def made(kind, labels=LABELS, classes=10, seed=0, **more):
    return split(labels, classes, Partition(kind=kind, **more), Rng(seed))


@light
@given(
    kind=st.sampled_from(KINDS),
    labels=st.lists(st.integers(0, 4), min_size=60, max_size=300),
    clients=st.integers(1, 6),
    beta=st.sampled_from([0.5, 1.0, 100.0]),
    balance=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_example_goes_to_exactly_one_client(kind, labels, clients, beta, balance, seed):
    labels = np.array(labels)
    partition = Partition(
        kind=kind,
        clients=clients,
        beta=beta,
        balance=balance,
        min_size=1,
        labels_per_client=len(set(labels.tolist())),
    )
    parts = split(labels, 5, partition, Rng(seed))
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(map(len, parts)) >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_seed_decides(kind):
    one, same, other = made(kind), made(kind), made(kind, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_other_streams_of_the_run_do_not_matter():
    rng = Rng(0)
    rng.numpy("fraction").random(1000)
    np.random.random(10)  # noqa: NPY002 - the global generator must not matter
    again = split(LABELS, 10, Partition(), rng)
    assert all(np.array_equal(a, b) for a, b in zip(made("dirichlet"), again, strict=True))


proportions = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-300, 1.0)), min_size=1, max_size=30
).filter(any)


def whole_and_leak_free(cut, q, n):
    sizes = cut(q, n)
    return sizes.sum() == n and (sizes >= 0).all() and not sizes[q == 0].any()


@light
@given(q=proportions, n=st.integers(0, 60000))
def test_shares_are_whole_and_nearest_and_never_leak(q, n):
    q = np.array(q) / np.sum(q)
    assert whole_and_leak_free(shares, q, n)
    assert np.abs(shares(q, n) - q * n).max() < 1


def test_the_leak_of_the_usual_cut_would_be_seen():
    """Cutting at floor(cumsum(q) n) gives the masked last client what rounding leaves over."""

    def usual(q, n):
        cuts = (np.cumsum(q) * n).astype(int)[:-1]
        return np.diff(np.concatenate([[0], cuts, [n]]))

    rng = np.random.default_rng(0)
    leaks = {usual: 0, shares: 0}
    for _ in range(500):
        q = rng.dirichlet(np.full(10, 0.5))
        q[-1] = 0
        q /= q.sum()
        for cut in leaks:
            leaks[cut] += not whole_and_leak_free(cut, q, 5000)
    assert leaks[usual] > 50
    assert leaks[shares] == 0


@light
@given(
    seed=st.integers(0, 2**32),
    beta=st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e6]),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12),
)
def test_weights_are_proportions_and_nothing_for_the_full(seed, beta, sizes):
    sizes = np.array(sizes)
    q = weights(beta, sizes, 10.0, True, np.random.default_rng(seed))
    assert np.isfinite(q).all()
    assert q.min() >= 0
    assert q.sum() == pytest.approx(1)
    if (sizes < 10).any():
        assert not q[sizes >= 10].any()


def test_weights_when_all_are_full_or_balance_is_off():
    rng = np.random.default_rng(0)
    assert (weights(100.0, np.full(4, 10), 10.0, True, rng) > 0.1).all()
    assert (weights(100.0, np.array([10, 0]), 10.0, False, rng) > 0.1).all()


@pytest.mark.parametrize("drawn", [np.full(4, np.nan), np.zeros(4), np.array([1.0, 0, 0, 0])])
def test_weights_that_underflow_become_one_client_that_is_not_full(drawn):
    class Underflow:
        dirichlet = staticmethod(lambda _: drawn)
        choice = staticmethod(np.random.default_rng(0).choice)

    q = weights(1e-300, np.array([10, 0, 0, 0]), 10.0, True, Underflow())  # type: ignore[arg-type]
    assert sorted(q.tolist()) == [0, 0, 0, 1]
    assert q[0] == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_full_client_gets_nothing_of_later_classes(seed):
    held = counted(LABELS, made("dirichlet", seed=seed, beta=0.3), 10)
    before = np.cumsum(held, axis=1) - held
    share = len(LABELS) / 10
    full = before >= share
    some_open = ~full.all(axis=0)
    assert not held[:, some_open][full[:, some_open]].any()
    assert full.any(), "the case occurs"


def test_balance_evens_sizes():
    def spread(balance):
        parts = [made("dirichlet", seed=s, beta=0.3, balance=balance) for s in range(20)]
        return np.mean([max(map(len, p)) / min(map(len, p)) for p in parts])

    assert spread(True) < 0.7 * spread(False)


def test_large_beta_is_even_and_small_beta_is_not():
    even = counted(LABELS, made("dirichlet", beta=1e6, balance=False), 10)
    assert np.abs(even - 10).max() <= 1
    skewed = [effective_classes(counted(LABELS, made("dirichlet", beta=b), 10)).mean()
              for b in (0.1, 0.5, 10.0)]  # fmt: skip
    assert skewed == sorted(skewed)
    assert skewed[0] < 4 < 8 < skewed[2]


def test_dirichlet_shares_follow_the_distribution():
    """One class, no mask: the variance of a share is (1/N)(1-1/N)/(N beta + 1)."""
    labels, clients, beta = np.zeros(2000, int), 4, 0.5
    first = [
        len(made("dirichlet", labels, 1, s, clients=clients, beta=beta, min_size=1, tries=1000)[0])
        for s in range(400)
    ]
    wanted = (1 / 4) * (3 / 4) / (4 * beta + 1)
    assert np.mean(first) / 2000 == pytest.approx(0.25, abs=0.05)
    assert np.var(first) / 2000**2 == pytest.approx(wanted, rel=0.25)


def test_tiny_beta_ends_with_a_line(refused):
    with refused(ConfigError, "100", "best of 5 tries", "raise partition.beta", "min_size"):
        made("dirichlet", clients=100, beta=1e-3, min_size=5, tries=5)
    with refused(ConfigError, "best of 3 tries", "raise partition.beta"):
        made("quantity", clients=20, beta=1e-3, tries=3)


def test_tries_are_enough_when_one_succeeds(monkeypatch):
    parts = [[np.arange(2), np.arange(8)], [np.arange(5), np.arange(5)]]
    partition = Partition(clients=2, min_size=5, tries=2)
    assert module._until_large_enough(lambda: parts.pop(0), partition)[0].size == 5


@pytest.mark.parametrize("beta", [1e-300, 0.05, 0.5, 1e6])
@pytest.mark.parametrize("n", [1000, 997])
def test_dirichlet_client_sizes_differ_by_at_most_one(beta, n):
    parts = made("dirichlet_client", LABELS[:n], clients=7, beta=beta)
    sizes = sorted(map(len, parts))
    assert sizes[-1] - sizes[0] <= 1
    assert sum(sizes) == n


@pytest.mark.parametrize(("beta", "near"), [(0.1, 0.7), (0.5, 0.4), (1.0, 0.3), (1e6, 0.5)])
def test_dirichlet_client_is_as_skewed_as_its_distribution(beta, near):
    """With many clients few classes run out early; with few, full cover evens clients out."""
    parts = made("dirichlet_client", np.tile(LABELS, 10), clients=100, beta=beta)
    q = np.random.default_rng(1).dirichlet(np.full(10, beta), 5000)
    alone = effective_classes(q).mean()
    got = effective_classes(counted(np.tile(LABELS, 10), parts, 10)).mean()
    assert got == pytest.approx(alone, abs=near)


def test_rounding_cannot_pick_a_class_without_weight():
    q = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.0, 0.8]])
    got = module._reach(q, np.array([3, 1, 0])).tolist()
    assert got == [[0.5, np.inf, np.inf], [0.75, np.inf, np.inf], [np.inf] * 3]


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(map(len, made("iid", clients=7))) == [142] + [143] * 6


def test_shards_hold_few_classes():
    held = counted(LABELS, made("shards", clients=10, shards_per_client=2), 10)
    assert (held.sum(1) == 100).all()
    assert np.count_nonzero(held, axis=1).max() <= 2
    assert np.count_nonzero(held, axis=1).max() == 2


@light
@given(clients=st.integers(1, 12), each=st.integers(1, 10), seed=st.integers(0, 1000))
def test_labels_gives_each_client_its_classes_and_each_class_an_owner(clients, each, seed):
    parts = made("labels", clients=clients, labels_per_client=each, min_size=1, seed=seed)
    held = counted(LABELS, parts, 10)
    assert (np.count_nonzero(held, axis=1) == each).all()
    owners = np.count_nonzero(held, axis=0)
    assert owners.max() - owners.min() <= 1
    if clients * each >= 10:
        assert held.sum() == len(LABELS)
        owned = np.where(held > 0, held, 1000)
        assert (held.max(0) - owned.min(0) <= 1).all(), "owners share a class equally"


def test_labels_deals_only_classes_that_occur(refused):
    parts = made("labels", LABELS[LABELS < 3], clients=3, labels_per_client=1)
    assert sorted(map(len, parts)) == [100] * 3
    with refused(ConfigError, "at most 3", "got 4"):
        made("labels", LABELS[LABELS < 3], clients=3, labels_per_client=4)


def test_quantity_varies_sizes_only():
    held = counted(LABELS, made("quantity", clients=4, beta=1.0, seed=2), 10)
    assert held.sum(1).max() > 1.5 * held.sum(1).min()
    assert effective_classes(held).min() > 8


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_sizes_are_refused(kind, refused):
    with refused(ConfigError, "partition.clients", "at most 9", "got 10"):
        made(kind, LABELS[:9])
    with refused(ConfigError, "partition.min_size", "at most 99", "10 x 10"):
        made(kind, LABELS[:99])


def test_too_small_a_client_is_refused(refused):
    with refused(ConfigError, "kind=labels", "at least 10", "a client with 5"):
        made("labels", np.repeat([0, 1], [5, 95]), 2, clients=2, labels_per_client=1)
    with refused(ConfigError, "shards_per_client", "at most 100", "10 x 11"):
        made("shards", LABELS[:100], shards_per_client=11)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "even"},
        {"clients": 0},
        {"beta": 0.0},
        {"beta": float("nan")},
        {"beta": 1e7},
        {"min_size": 0},
        {"tries": 0},
        {"shards_per_client": 0},
        {"labels_per_client": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        Partition(**wrong)


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (Partition(), "dirichlet, beta=0.5"),
        (Partition(balance=False, beta=0.1), "dirichlet, beta=0.1, unbalanced"),
        (Partition(kind="dirichlet_client"), "dirichlet_client, beta=0.5"),
        (Partition(kind="iid"), "iid"),
        (Partition(kind="shards"), "shards, 2 a client"),
        (Partition(kind="labels", labels_per_client=3), "labels, 3 a client"),
        (Partition(kind="quantity"), "quantity, beta=0.5"),
        (Partition(kind="file", path="sites.json"), "file, sites.json"),
    ],
)
def test_describe(partition, words):
    assert describe(partition) == words


@pytest.fixture
def from_file(tmp_path):
    def write_and_split(content, clients=2):
        path = tmp_path / "split.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return made("file", LABELS[:20], clients=clients, path=str(path))

    return write_and_split


def test_file_says_who_holds_what(from_file):
    parts = from_file({"clients": [[19, 0, 3], [7]]})
    assert [part.tolist() for part in parts] == [[0, 3, 19], [7]]
    assert parts[0].dtype == np.int64


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("expected JSON",)),
        ("[[1], [2]]", ('{"clients"',)),
        ({"clients": []}, ('{"clients"',)),
        ({"clients": [[0], []]}, ("client 1", "an empty one")),
        ({"clients": [[0], 3]}, ("client 1", "int")),
        ({"clients": [[0], [20]]}, ("rows 0..19", "20 for client 1", "after data.fraction")),
        ({"clients": [[-1], [0]]}, ("-1 for client 0",)),
        ({"clients": [[0], [1.5]]}, ("1.5 for client 1",)),
        ({"clients": [[0], [True]]}, ("True for client 1",)),
        ({"clients": [[0, 4], [4]]}, ("row 4 more than once",)),
        ({"clients": [[5, 5], [4]]}, ("row 5 more than once",)),
    ],
)
def test_wrong_files_are_refused(from_file, refused, content, words):
    with refused(DataError, "split.json", *words):
        from_file(content)


def test_file_needs_a_path_and_the_right_number_of_clients(from_file, refused, tmp_path):
    with refused(ConfigError, "partition.path"):
        made("file")
    with refused(ConfigError, "expected 10 clients, got 2", "partition.clients to 2"):
        from_file({"clients": [[0], [1]]}, clients=10)
    with refused(DataError, "no such file", "nowhere.json"):
        made("file", path=str(tmp_path / "nowhere.json"))
