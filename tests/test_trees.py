import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.test_contract import same
from feddpms.algorithms.trees import average, mean, toward, trained
from feddpms.types import Message
from small import small_net


def statistics(x):
    """A tree as batch norm keeps it."""
    return {
        "norm.running_mean": x.mean(0),
        "norm.running_var": x.var(0, correction=0),
        "norm.num_batches_tracked": torch.tensor(len(x)),
    }


def values(n, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return 3 * seed + (1 + seed) * torch.randn(n, 4, generator=g, dtype=dtype)


def reply(tree, examples):
    return Message("train", {"model": tree}, {"examples": examples})


def test_weights_are_relative():
    trees = [{"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 6.0])}]
    assert mean(trees, [3, 1])["w"].tolist() == [1, 3]
    assert mean(trees, [0.75, 0.25])["w"].tolist() == [1, 3]
    assert mean(trees, [0, 5])["w"].tolist() == [4, 6]


def test_replies_are_weighted_by_their_examples():
    replies = {
        2: reply({"w": torch.tensor([0.0])}, 30),
        7: reply({"w": torch.tensor([4.0])}, 10),
    }
    assert average(replies)["w"].tolist() == [1]


def test_counters_take_the_largest_and_stay_whole_numbers():
    trees = [{"n": torch.tensor(3)}, {"n": torch.tensor(8)}, {"n": torch.tensor(5)}]
    got = mean(trees, [100, 1, 1])["n"]
    assert got.dtype == torch.int64
    assert got == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_types_are_kept(dtype):
    trees = [statistics(values(5, s, dtype)) | {"w": values(2, s, dtype)} for s in (1, 2)]
    got = mean(trees, [5, 5])
    assert {k: v.dtype for k, v in got.items()} == {k: v.dtype for k, v in trees[0].items()}


def test_sums_do_not_lose_small_differences():
    trees = [{"w": torch.tensor([1 + i * 2.0**-23])} for i in range(4)]
    assert mean(trees, [1, 1, 1, 1])["w"].item() == pytest.approx(1 + 2 * 2.0**-23, abs=0)


@pytest.mark.parametrize("sizes", [(7, 40), (3, 3), (5, 11, 30)])
def test_the_pooled_variance_is_that_of_the_union(sizes):
    parts = [values(n, seed) for seed, n in enumerate(sizes)]
    got = mean([statistics(p) for p in parts], list(sizes))
    want = statistics(torch.cat(parts))
    torch.testing.assert_close(got["norm.running_var"], want["norm.running_var"])
    torch.testing.assert_close(got["norm.running_mean"], want["norm.running_mean"])


def test_a_pooled_variance_is_never_below_zero():
    tree = {"running_mean": torch.tensor([1e4 / 3]), "running_var": torch.tensor([0.0])}
    assert mean([tree, dict(tree), dict(tree)], [1, 1, 1])["running_var"].item() >= 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 99999), min_size=1, max_size=9))
def test_identical_trees_come_back_bit_for_bit(sizes):
    tree = small_net().state_dict()
    for key, value in mean([tree] * len(sizes), sizes).items():
        assert torch.equal(value, tree[key]), key


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(5)))
def test_the_order_of_replies_does_not_matter(order):
    sizes = [3, 1000, 7, 19, 2]
    replies = {c: reply(statistics(values(sizes[c], c)), sizes[c]) for c in range(5)}
    got = average({c: replies[c] for c in order})
    for key, value in average(replies).items():
        assert torch.equal(got[key], value), key


def test_trees_that_go_in_are_not_changed():
    trees = [statistics(values(5, s)) for s in (1, 2)]
    before = [{k: v.clone() for k, v in t.items()} for t in trees]
    for value in mean(trees, [1, 2]).values():
        value.add_(1)
    for tree, kept in zip(trees, before, strict=True):
        assert all(torch.equal(tree[k], kept[k]) for k in kept)


def test_a_step_towards_a_model_moves_what_is_trained_and_takes_its_statistics():
    old = {"w": torch.tensor([1.0, 2.0]), "n.running_var": torch.tensor([1.0])}
    new = {"w": torch.tensor([2.0, 0.0]), "n.running_var": torch.tensor([0.5])}
    assert same(toward(old, new, 1.0), new)
    assert toward(old, new, 2.0)["w"].tolist() == [3.0, -2.0]
    assert toward(old, new, 0.5)["w"].tolist() == [1.5, 1.0]
    assert toward(old, new, 3.0)["n.running_var"].tolist() == [0.5]  # never below 0


def test_what_is_trained_is_no_statistic_and_no_counter():
    net = small_net()
    assert list(trained(net.state_dict())) == [k for k, _ in net.named_parameters()]


def test_uniform_weights_ignore_how_many_examples_there_are():
    replies = {i: reply({"w": torch.tensor([float(i)])}, 1 + 2 * i) for i in range(2)}
    assert average(replies)["w"].item() == 0.75
    assert average(replies, "uniform")["w"].item() == 0.5
