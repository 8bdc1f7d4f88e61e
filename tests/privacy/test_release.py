"""The release: sensitivity at its worst, noise of the right size, one draw, the right model."""

import math

import numpy as np
import pytest
import torch

from feddpms.algorithms import FedDPMS
from feddpms.algorithms.fit import fit, load
from feddpms.privacy import Privacy, calibrate, noisy_class_sums
from feddpms.synthesis import encode
from feddpms.synthesis.means import class_means
from feddpms.types import Message
from small import CLASSES, LOOSE, client, small_net, three_shards

L = [1, 2, 32, 128]


def exact(codes, labels, clip=1.0, classes=CLASSES):
    """The un-noised release."""
    g = torch.Generator().manual_seed(0)
    return noisy_class_sums(codes, labels, classes, clip, 0.0, 0.0, g)


def distance(a, b) -> float:
    return float((a.sums - b.sums).norm())


@pytest.mark.parametrize("length", L)
@pytest.mark.parametrize("clip", [0.1, 2.0, 100.0])
def test_one_record_moves_the_sums_by_at_most_the_clip(length, clip):
    """Worst case: a record in a corner of the cube, added to a class that others fill."""
    corner = torch.ones(1, length, dtype=torch.float64)
    rest = torch.zeros(5, length, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 2, 1])
    moved = distance(exact(torch.cat([rest, corner]), labels, clip), exact(rest, labels[:5], clip))
    assert moved <= clip * (1 + 1e-9)
    assert moved == pytest.approx(min(clip, math.sqrt(length) / 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_broken_record_moves_the_sums_by_at_most_the_clip(bad):
    rest, labels = torch.rand(4, 8), torch.tensor([0, 1, 1, 2, 0])
    broken = torch.cat([rest, torch.full((1, 8), 0.5)])
    broken[4, 3] = bad
    out = exact(broken, labels)
    assert out.sums.isfinite().all()
    assert distance(out, exact(rest, labels[:4])) <= 1.0 + 1e-6


def test_a_class_that_one_neighbour_alone_has():
    codes, labels = torch.ones(3, 8), torch.tensor([0, 0, 2])
    assert distance(exact(codes, labels), exact(codes[:2], labels[:2])) <= 1.0 + 1e-6
    assert torch.equal(exact(codes[:0], labels[:0]).counts, torch.zeros(3))


def test_without_noise_the_mean_is_the_vector_mean():
    """Every coordinate is its own mean; a mean over all entries would repeat one number."""
    g = torch.Generator().manual_seed(3)
    codes, labels = torch.rand(50, 16, generator=g), torch.arange(50) % 2
    out = exact(codes, labels, clip=10.0)
    means = class_means(out.sums, out.counts, 1.0, 0)["means"]
    want = torch.stack([codes[labels == c].mean(0) for c in (0, 1)])
    torch.testing.assert_close(means, want)
    assert len(set(means[0].tolist())) == 16


def test_the_noise_has_the_size_that_was_paid_for():
    """A chi-square test at 1e-6 over 64,000 draws: 2 % too little or too much is caught."""
    g = torch.Generator().manual_seed(5)
    n, multiplier, clip = 2000, 1.7, 0.6
    zeros, labels = torch.zeros(0, 32, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    draws = [noisy_class_sums(zeros, labels, 1, clip, multiplier, 3.0, g) for _ in range(n)]
    sums = torch.cat([d.sums for d in draws]).flatten().numpy()
    counts = torch.cat([d.counts for d in draws]).numpy()

    def fits(values, std):
        z = (np.mean((values / std) ** 2) - 1) * math.sqrt(len(values) / 2)
        return abs(z) < 4.9

    assert fits(sums, multiplier * clip)
    assert not fits(sums, multiplier * clip * 1.02)
    assert not fits(sums, multiplier * clip * 0.98)
    assert fits(counts, 3.0)
    assert np.abs(np.corrcoef(sums.reshape(n, 32).T) - np.eye(32)).max() < 0.12


def analytic_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang (2018), theorem 8."""
    phi = lambda t: 0.5 * math.erfc(-t / math.sqrt(2))  # noqa: E731
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(
    ("epsilon", "delta", "total"),
    [(0.5, 1e-2, 3.1469), (1, 1e-5, 3.7306), (2, 1e-5, 1.9938), (8, 1e-5, 0.6002)],
)
def test_calibration_spends_the_target_and_no_more(epsilon, delta, total):
    m = calibrate(Privacy(target_epsilon=epsilon, target_delta=delta, count_noise_multiplier=20.0))
    assert m.total == pytest.approx(total, abs=5e-5)
    mu = math.sqrt(1 / m.latent**2 + 1 / m.counts**2)
    assert analytic_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)


def test_latent_multipliers_beside_a_histogram():
    """Published split of (2, 1e-5) at 5, 10, 20, 50 counts of noise."""
    for counts, latent in [(5, 2.1741), (10, 2.0347), (20, 2.0038), (50, 1.9954)]:
        assert calibrate(Privacy(count_noise_multiplier=counts)).latent == pytest.approx(
            latent, abs=5e-5
        )


def test_a_histogram_that_spends_all_is_refused():
    from feddpms.errors import ConfigError

    with pytest.raises(ConfigError, match=r"count_noise_multiplier must be above .* got 1; "):
        calibrate(Privacy(target_epsilon=0.5, count_noise_multiplier=1.0))


def share(net, **changes):
    """A client's answer to a share ask that broadcasts a model."""
    method, me = FedDPMS(), client(three_shards()[1], net, round=3, **changes)
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
    g = client(shard, net, round=3).rng.torch("privacy noise")
    m = calibrate(LOOSE)
    noisy = noisy_class_sums(
        codes, shard.y, CLASSES, LOOSE.l2_clip, m.latent, LOOSE.count_noise_multiplier, g
    )
    want = class_means(noisy.sums, noisy.counts, LOOSE.min_class_count, 0)
    assert torch.equal(reply.trees["release"]["means"], want["means"])


def test_codes_do_not_depend_on_batch_mates_or_mode():
    net, shard = small_net().train(), three_shards()[1]
    whole = encode(net, shard.x)
    alone = torch.cat([encode(net, x[None]) for x in shard.x])
    torch.testing.assert_close(whole, alone)
    assert net.training


def test_a_release_is_drawn_once_and_sent_again():
    (first, memory), _ = share(small_net())
    (again, kept), _ = share(small_net(), memory=memory)
    assert again == first
    assert kept is memory
    other = client(three_shards()[1], small_net(), round=4, id=0)
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
    sums = torch.tensor([[1.0, -1.0], [2.0, 2.0], [0.1, 0.1]])
    counts = torch.tensor([9.0, 4.0, 2.0])
    out = class_means(sums, counts, 4.0, 0)
    assert out["classes"].tolist() == [0, 1]
    torch.testing.assert_close(out["means"], torch.tensor([[0.5 + 1 / 9, 0.5 - 1 / 9], [1.0, 1.0]]))
    assert class_means(sums, counts, 1.0, 1)["classes"].tolist() == [0]
    assert len(class_means(sums, counts, 100.0, 0)["classes"]) == 0


def test_sensitivity_follows_from_the_clip_and_cannot_be_passed():
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        Privacy(l2_sensitivity=1.0)  # pyright: ignore
    for clip in (0.5, 1.0):
        g = torch.Generator().manual_seed(0)
        codes, labels = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
        (event, _) = noisy_class_sums(codes, labels, 3, clip, 2.0, 1.0, g).events
        assert event.l2_sensitivity == clip


@pytest.mark.parametrize(
    "bad", [{"target_epsilon": 0}, {"target_delta": 1}, {"l2_clip": math.nan}, {"l2_clip": -1}]
)
def test_impossible_targets_are_refused(bad):
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        Privacy(**bad)
