import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpms.synthesis import Matching, match
from feddpms.synthesis.matching import cover, pair, scarce

CLASSES = 5
NOTHING: frozenset[int] = frozenset()


def released(classes, counts=None, client=0):
    """A release whose mean of class c at client j is [j, c]."""
    return {
        "classes": torch.tensor(classes, dtype=torch.int64),
        "means": torch.tensor([[float(client), float(c)] for c in classes]).view(-1, 2),
        "counts": torch.tensor(counts or [50.0] * CLASSES),
    }


def bank_of(*classes):
    return {j: released(own, client=j) for j, own in enumerate(classes)}


def need(*classes):
    return frozenset(classes)


def test_pair_takes_the_client_with_the_largest_overlap():
    bank = bank_of([0, 1], [2], [2, 3], [0, 1, 4])
    assert pair(need(2, 3, 4), 0, bank) == {2: [2], 3: [2]}


def test_pair_breaks_ties_by_the_lowest_number():
    bank = bank_of([0], [4], [1], [2])
    backwards = dict(reversed(bank.items()))
    assert pair(need(1, 2), 0, bank) == pair(need(1, 2), 0, backwards) == {1: [2]}


@pytest.mark.parametrize("rule", [pair, cover])
@pytest.mark.parametrize("others", [[], [[0]], [[0], []]])
def test_without_overlap_there_is_nothing(rule, others):
    assert rule(need(2, 3), 0, bank_of([2, 3], *others)) == {}


@pytest.mark.parametrize("rule", [pair, cover])
def test_a_client_never_helps_itself(rule):
    assert rule(need(1), 1, bank_of([0], [1, 2], [1])) == {1: [2]}


@pytest.mark.parametrize("rule", [pair, cover])
def test_only_needed_classes_are_sent(rule):
    assert rule(need(3), 0, bank_of([0], [1, 2, 3])) == {3: [1]}


def test_cover_takes_the_union_with_every_source_in_order():
    bank = bank_of([0], [3, 1], [2], [1])
    assert cover(need(1, 2, 3), 0, bank) == {1: [1, 3], 2: [2], 3: [1]}
    assert list(cover(need(1, 2, 3), 0, bank)) == [1, 2, 3]


def test_a_match_carries_the_mean_of_each_source():
    bank = bank_of([0], [1, 2], [2])
    bank[0]["counts"] = torch.tensor([90.0, 0.0, -3.0, 90.0, 90.0])
    got = match(Matching(), 0, bank, NOTHING)
    assert got["classes"].dtype == torch.int64
    assert got["classes"].tolist() == [1, 2, 2]
    assert got["means"].tolist() == [[1, 1], [1, 2], [2, 2]]


def test_a_match_says_how_many_examples_a_client_lacks_to_its_mean_count():
    bank = bank_of([0], [1, 2], [2])
    bank[0]["counts"] = torch.tensor([90.0, 0.0, -30.0, 90.6, 20.0])  # the mean is 40.12
    got = match(Matching(), 0, bank, NOTHING)
    assert got["deficits"].tolist() == [40, 40, 40]
    bank[0]["counts"] = torch.tensor([90.0, 11.0, 14.6, 90.0, 20.0])  # the mean is 45.12
    assert match(Matching(), 0, bank, NOTHING)["deficits"].tolist() == [34, 31, 31]
    plenty = Matching(bottom_n=5)  # needs what it has enough of
    assert match(plenty, 0, bank_of([0], [1]), NOTHING)["deficits"].tolist() == [1]


def test_what_was_served_is_not_served_again():
    bank = bank_of([0], [1, 2], [2])
    bank[0]["counts"] = torch.tensor([90.0, 0.0, 0.0, 90.0, 90.0])
    first = match(Matching(), 0, bank, NOTHING)
    served = frozenset(first["classes"].tolist())
    assert match(Matching(), 0, bank, served) == {}
    assert match(Matching(), 0, bank, need(1))["classes"].tolist() == [2, 2]


def test_a_class_that_nobody_released_yet_is_sent_when_somebody_does():
    bank = bank_of([0], [1])
    bank[0]["counts"] = torch.tensor([90.0, 0.0, 0.0, 90.0, 90.0])
    served = frozenset(match(Matching(), 0, bank, NOTHING)["classes"].tolist())
    later = {**bank, 2: released([1, 2], client=2)}
    assert match(Matching(), 0, later, served)["classes"].tolist() == [2]


@pytest.mark.parametrize(
    ("counts", "below", "expected"),
    [
        ([10.0, 4.9, 5.1, 20.0], 0.5, {1}),
        ([10.0, 10.0, 10.0, 10.0], 0.5, set()),
        ([-8.0, 12.0, 0.0, 12.0], 0.5, {0, 2}),
        ([10.0, 4.9, 5.1, 20.0], 2.0, {0, 1, 2}),
        ([5.0, 5.0, 5.0, 5.0], 1.0, set()),
        ([-1.0, -2.0, -3.0, -4.0], 0.5, {0, 1, 2, 3}),
    ],
)
def test_a_class_is_scarce_below_a_fraction_of_the_mean_count(counts, below, expected):
    assert scarce(torch.tensor(counts), Matching(scarce_below=below)) == expected


def test_negative_noisy_counts_do_not_lower_the_limit():
    counts = torch.tensor([-100.0, 4.0, 10.0, 10.0])
    assert scarce(counts, Matching(scarce_below=0.75)) == {0, 1}


def test_bottom_n_takes_the_least_abundant_whatever_the_fraction():
    counts = torch.tensor([3.0, -1.0, 7.0, 3.0, 9.0])
    assert scarce(counts, Matching(bottom_n=1)) == {1}
    assert scarce(counts, Matching(bottom_n=2, scarce_below=9)) == {0, 1}
    assert scarce(counts, Matching(bottom_n=99)) == {0, 1, 2, 3, 4}


def slowly(kind, limit, bottom_n, client, counts, holds, served):
    """The rows (client, class) that a reader of the paper would send."""
    mine = counts[client]
    if bottom_n:
        wanted = sorted(range(CLASSES), key=lambda c: (mine[c], c))[:bottom_n]
    else:
        mean = np.mean([max(v, 0.0) for v in mine])
        wanted = [c for c in range(CLASSES) if mine[c] < limit * mean]
    wanted = [c for c in wanted if c not in served]
    partners = [j for j in range(len(holds)) if j != client]
    if kind == "pair":
        best, most = [], 0
        for j in partners:
            overlap = sum(c in holds[j] for c in wanted)
            if overlap > most:
                best, most = [j], overlap
        partners = best
    return [(j, c) for c in sorted(wanted) for j in partners if c in holds[j]]


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(["cover", "pair"]),
    limit=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    bottom_n=st.integers(0, 3),
    counts=st.lists(
        st.lists(st.integers(-9, 40), min_size=CLASSES, max_size=CLASSES), min_size=1, max_size=5
    ),
    data=st.data(),
)
def test_matching_is_that_of_a_naive_loop(kind, limit, bottom_n, counts, data):
    some = st.sets(st.integers(0, CLASSES - 1))
    holds = [data.draw(some) for _ in counts]
    client, served = data.draw(st.integers(0, len(counts) - 1)), data.draw(some)
    bank = {
        j: released(sorted(own), [float(v) for v in counts[j]], j) for j, own in enumerate(holds)
    }
    matching = Matching(kind=kind, scarce_below=limit, bottom_n=bottom_n)
    got = match(matching, client, bank, frozenset(served))
    want = slowly(kind, limit, bottom_n, client, counts, holds, served)
    rows = [(int(j), int(c)) for j, c in got["means"].tolist()] if got else []
    assert rows == want
    assert (got["classes"].tolist() if got else []) == [c for _, c in want]
