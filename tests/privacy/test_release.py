"""The release: sensitivity at its worst, noise of the right size, one draw, the right model."""

import math

import numpy as np
import pytest
import torch

from feddpms.algorithms import FedDPMS
from feddpms.algorithms.fit import fit, load
from feddpms.privacy import Account, Privacy, calibrate
from feddpms.privacy.mechanism import (
    ClassSums,
    FixedMeans,
    GradientSum,
    Histogram,
    gaussian,
)
from feddpms.privacy.noise import Seeded
from feddpms.synthesis import Drawing, encode, generate
from feddpms.synthesis.means import class_means, fixed_means
from feddpms.types import Message
from small import CLASSES, LOOSE, client, small_net, three_shards

L = [1, 2, 32, 128]


def seeded(seed=0) -> Seeded:
    return Seeded(np.random.default_rng(seed))


def sums(codes, labels, clip=1.0, **more):
    return ClassSums(clip, **more).value(codes, labels, CLASSES)


@pytest.mark.parametrize("second_moments", [False, True])
@pytest.mark.parametrize("length", L)
@pytest.mark.parametrize("clip", [0.1, 2.0, 100.0])
def test_one_record_moves_the_sums_by_at_most_the_clip(length, clip, second_moments):
    """Worst case: a record in a corner of the cube, added to a class that others fill."""
    corner = torch.ones(1, length, dtype=torch.float64)
    rest = torch.zeros(5, length, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 2, 1])
    more = {"second_moments": second_moments}
    with_it = sums(torch.cat([rest, corner]), labels, clip, **more)
    moved = float((with_it - sums(rest, labels[:5], clip, **more)).norm())
    assert moved <= clip == ClassSums(clip).l2_sensitivity
    if not second_moments:
        assert moved == pytest.approx(min(clip, math.sqrt(length) / 2), abs=1e-7)


@pytest.mark.parametrize("length", L)
def test_replacing_a_record_moves_the_sums_by_at_most_twice_the_clip(length):
    a, b = (torch.full((1, length), v, dtype=torch.float64) for v in (0.0, 1.0))
    clip = 0.3
    one = torch.tensor([0])
    same_class = float((sums(a, one, clip) - sums(b, one, clip)).norm())
    other_class = float((sums(a, one, clip) - sums(b, one + 1, clip)).norm())
    bound = ClassSums(clip, "replace_one").l2_sensitivity
    assert bound == 2 * clip
    assert same_class == pytest.approx(bound, abs=1e-7)
    assert same_class <= bound
    assert other_class == pytest.approx(math.sqrt(2) * clip, abs=1e-7)


@pytest.mark.parametrize("length", L)
def test_fixed_means_move_by_the_diagonal_over_m(length):
    """The worst record takes a corner's place, or leaves it to the opposite one."""
    m = 5
    zeros, one = torch.zeros(8, length), torch.ones(1, length)
    labels = torch.zeros(9, dtype=torch.int64)

    def value(codes, labels):
        return FixedMeans(m, length).value(codes, labels, 2)

    added = value(torch.cat([one, zeros]), labels) - value(zeros, labels[1:])
    assert float(added.norm()) == pytest.approx(FixedMeans(m, length).l2_sensitivity, rel=1e-9)
    moved_label = labels.clone()
    moved_label[0] = 1
    twice = value(torch.cat([one, zeros]), labels) - value(torch.cat([one, zeros]), moved_label)
    bound = FixedMeans(m, length, "replace_one").l2_sensitivity
    assert bound == pytest.approx(math.sqrt(2 * length) / m)
    assert float(twice.norm()) <= bound
    # A record more in a class short of m takes a place that counted as the centre.
    short = value(torch.cat([one, zeros[:2]]), labels[:3]) - value(zeros[:2], labels[:2])
    assert float(short.norm()) == pytest.approx(math.sqrt(length) / 2 / m)


def test_sensitivities_follow_from_clip_and_neighbours():
    assert Histogram().l2_sensitivity == 1
    assert Histogram("replace_one").l2_sensitivity == pytest.approx(math.sqrt(2))
    assert GradientSum(0.7).l2_sensitivity == 0.7
    assert GradientSum(0.7, "replace_one").l2_sensitivity == 1.4
    for cls in (ClassSums, FixedMeans, Histogram, GradientSum):
        with pytest.raises(TypeError):
            cls(l2_sensitivity=1.0)  # pyright: ignore
        assert "l2_sensitivity" not in cls.__dataclass_fields__


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 1e300])
@pytest.mark.parametrize("second_moments", [False, True])
def test_a_broken_record_moves_the_sums_by_at_most_the_clip(bad, second_moments):
    rest, labels = torch.rand(4, 8).double(), torch.tensor([0, 1, 1, 2, 0])
    broken = torch.cat([rest, torch.full((1, 8), 0.5, dtype=torch.float64)])
    broken[4, 3] = bad
    out = sums(broken, labels, second_moments=second_moments)
    assert out.isfinite().all()
    clean = sums(rest, labels[:4], second_moments=second_moments)
    assert float((out - clean).norm()) <= 1.0
    fixed = FixedMeans(3, 8).value(broken, labels, CLASSES)
    assert fixed.isfinite().all()


def test_sums_have_no_rounding_error():
    """In any order, and with any other records around, a record adds the same bits."""
    g = torch.Generator().manual_seed(0)
    codes, labels = torch.rand(500, 16, generator=g), torch.arange(500) % 3
    order = torch.randperm(500, generator=g)
    whole = sums(codes, labels)
    assert torch.equal(whole, sums(codes[order], labels[order]))
    assert torch.equal(whole - sums(codes[:-1], labels[:-1]), sums(codes[-1:], labels[-1:]))


def test_a_class_that_one_neighbour_alone_has():
    codes, labels = torch.ones(3, 8), torch.tensor([0, 0, 2])
    assert float((sums(codes, labels) - sums(codes[:2], labels[:2])).norm()) <= 1.0
    assert torch.equal(Histogram().value(labels[:0], 3), torch.zeros(3, dtype=torch.float64))


def test_without_noise_the_mean_is_the_vector_mean():
    """Every coordinate is its own mean; a mean over all entries would repeat one number."""
    g = torch.Generator().manual_seed(3)
    codes, labels = torch.rand(50, 16, generator=g), torch.arange(50) % 2
    counts = Histogram().value(labels, CLASSES)
    means = class_means(sums(codes, labels, clip=10.0), counts, 1.0, 0)["means"]
    want = torch.stack([codes[labels == c].mean(0) for c in (0, 1)]).double()
    torch.testing.assert_close(means, want, atol=1e-6, rtol=0)
    assert len(set(means[0].tolist())) == 16
    fixed = fixed_means(FixedMeans(20, 16).value(codes, labels, CLASSES), counts, 20.0, 0)
    want = torch.stack([codes[labels == c][:20].mean(0) for c in (0, 1)]).double()
    torch.testing.assert_close(fixed["means"], want, atol=1e-6, rtol=0)


def test_without_noise_second_moments_give_the_spread():
    g = torch.Generator().manual_seed(3)
    codes = 0.5 + torch.tensor([0.03, 0.1]) * torch.randn(4000, 2, generator=g)
    labels = torch.zeros(4000, dtype=torch.int64)
    exact = sums(codes, labels, clip=10.0, second_moments=True)
    out = class_means(exact, Histogram().value(labels, CLASSES), 1.0, 0, l2_clip=10.0)
    torch.testing.assert_close(out["spreads"][0], codes.std(0).double(), atol=1e-3, rtol=0)
    assert set(out) == {"classes", "means", "counts", "spreads"}


def test_released_spreads_are_those_of_the_draws():
    net = small_net()
    matched = {"classes": torch.tensor([1]), "means": torch.full((1, 6), 0.5)}
    matched["deficits"] = torch.tensor([4])
    matched["spreads"] = torch.full((1, 6), 1e-6)
    drawing = Drawing(per_class=4, spread="released")
    tight = generate(net, matched, drawing, torch.Generator().manual_seed(0)).shard.x
    assert float((tight - tight[0]).abs().max()) < 1e-4
    matched["spreads"] = torch.full((1, 6), 0.5)
    wide = generate(net, matched, drawing, torch.Generator().manual_seed(0)).shard.x
    assert float((wide - wide[0]).abs().max()) > 1e-3


def fits(values, std) -> bool:
    """A chi-square test at 1e-6 of the size of Gaussian noise."""
    z = (np.mean((np.asarray(values).ravel() / std) ** 2) - 1) * math.sqrt(np.size(values) / 2)
    return abs(z) < 4.9


@pytest.mark.parametrize(
    "statistic", [ClassSums(0.6), ClassSums(0.6, "replace_one"), FixedMeans(7, 32), Histogram()]
)
def test_the_noise_has_the_size_that_was_paid_for(statistic):
    """Over 64,000 draws: 2 % too little or too much is caught, and so are correlations."""
    n, multiplier, noise = 2000, 1.7, seeded(5)
    zeros = torch.zeros(32, dtype=torch.float64)
    draws = np.stack([gaussian(zeros, statistic, multiplier, noise).numpy() for _ in range(n)])
    std = multiplier * statistic.l2_sensitivity
    assert fits(draws, std)
    assert not fits(draws, std * 1.02)
    assert not fits(draws, std * 0.98)
    assert np.abs(np.corrcoef(draws.T) - np.eye(32)).max() < 0.12


def share(net, shard=None, method=None, **changes):
    """A client's answer to a share ask that broadcasts a model."""
    method = method or FedDPMS()
    me = client(shard or three_shards()[1], net, round=3, **changes)
    broadcast = {k: v.clone() for k, v in small_net(seed=5).state_dict().items()}
    return method.client(Message("share", {"model": broadcast}), me), broadcast


def test_the_release_encodes_with_the_broadcast_model_not_the_local_one():
    """Whatever the client trained before, its codes come from the weights that it was sent."""
    shard, net = three_shards()[1], small_net()
    (reply, _), broadcast = share(fresh := small_net(seed=8))
    trained = fit(client(shard, net), net.state_dict()).tree
    (after, _), _ = share(load(small_net(), trained))
    assert torch.equal(reply.trees["release"]["means"], after.trees["release"]["means"])
    codes = encode(load(fresh, broadcast), shard.x)
    me = client(shard, net, round=3)
    exact = Histogram().value(shard.y, CLASSES)
    counts = gaussian(exact, Histogram(), LOOSE.count_noise_multiplier, me.noise("class histogram"))
    statistic = ClassSums(LOOSE.l2_clip)
    exact = statistic.value(codes, shard.y, CLASSES)
    noisy = gaussian(exact, statistic, calibrate(LOOSE).latent, me.noise("latent means"))
    want = class_means(noisy, counts, LOOSE.min_class_count, 0)
    assert torch.equal(reply.trees["release"]["means"], want["means"].float())


def test_codes_do_not_depend_on_batch_mates_or_mode():
    net, shard = small_net().train(), three_shards()[1]
    whole = encode(net, shard.x)
    alone = torch.cat([encode(net, x[None]) for x in shard.x])
    torch.testing.assert_close(whole, alone)
    assert net.training


def test_a_release_is_drawn_once_and_sent_again():
    account = Account(LOOSE)
    (first, _), _ = share(small_net(), account=account)
    other = client(three_shards()[1], small_net(), round=4, id=0)
    (again, _), _ = share(small_net(), account=account, rng=other.rng)
    assert again.events == first.events
    for key, value in first.trees["release"].items():
        assert torch.equal(again.trees["release"][key], value)
    (fresh, _), _ = share(small_net(), rng=other.rng)
    assert fresh.events != first.events  # a second draw shows in the events


def test_nothing_exact_leaves_with_a_release():
    """No tree of the reply equals the exact counts, sums, means, or class list by necessity."""
    shard = three_shards()[1]
    (reply, _), broadcast = share(small_net())
    released = reply.trees["release"]
    exact_counts = torch.bincount(shard.y, minlength=CLASSES).float()
    assert set(reply.trees) == {"release"}
    assert set(released) == {"classes", "means", "counts"}
    assert not (released["counts"] == exact_counts).any()
    codes = encode(load(small_net(), broadcast), shard.x)
    for c, mean in zip(released["classes"].tolist(), released["means"], strict=True):
        assert not (mean == codes[shard.y == c].mean(0)).any()
    assert reply.numbers == {}
    assert {e.channel for e in reply.events} == {"latent means", "class histogram"}
    assert all(e.simulated for e in reply.events)


def test_classes_and_divisor_come_from_noisy_counts():
    exact = torch.tensor([[1.0, -1.0], [2.0, 2.0], [0.1, 0.1]])
    counts = torch.tensor([9.0, 4.0, 2.0])
    out = class_means(exact, counts, 4.0, 0)
    assert out["classes"].tolist() == [0, 1]
    torch.testing.assert_close(out["means"], torch.tensor([[0.5 + 1 / 9, 0.5 - 1 / 9], [1.0, 1.0]]))
    assert class_means(exact, counts, 1.0, 1)["classes"].tolist() == [0]
    assert len(class_means(exact, counts, 100.0, 0)["classes"]) == 0


def test_fixed_means_need_m_records_by_the_noisy_count():
    privacy = Privacy(
        target_epsilon=50.0,
        count_noise_multiplier=0.5,
        min_class_count=3.0,
        release="fixed_m_mean",
        mean_size=15,
    )
    (reply, _), _ = share(small_net(), privacy=privacy)
    exact = torch.bincount(three_shards()[1].y, minlength=CLASSES).tolist()
    assert exact == [0, 20, 20]
    assert reply.trees["release"]["classes"].tolist() == [1, 2]
    (event,) = [e for e in reply.events if e.channel == "latent means"]
    assert event.l2_sensitivity == pytest.approx(math.sqrt(6) / 15)


PAPER = Privacy(release="paper", mean_size=10, paper_sigma=3.9, paper_draws=6)


def test_the_papers_release_is_filtered_by_the_local_classifier_and_pays_for_every_draw():
    shard, net = three_shards()[1], small_net()
    local = fit(client(shard, net), {k: v.clone() for k, v in net.state_dict().items()}).tree
    from feddpms.types import Memory

    (reply, _), _ = share(small_net(), privacy=PAPER, memory=Memory({"local": local}))
    released = reply.trees["release"]
    assert released["counts"].tolist() == [0, 20, 20]
    with torch.no_grad():
        called = load(small_net(), local).eval().classify(released["means"]).argmax(1)
    assert torch.equal(called, released["classes"])
    (noisy,) = [e for e in reply.events if e.mechanism == "gaussian"]
    assert noisy.times == 6
    assert noisy.noise_multiplier == pytest.approx(3.9 / math.sqrt(6))  # latent length 6
    assert {e.channel for e in reply.events if e.mechanism == "none"} == {
        "class list and counts",
        "means encoded by the local model",
        "choice of means by the local classifier",
    }
