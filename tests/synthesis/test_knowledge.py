"""Class knowledge: what is measured, how it is fused, how it guides, and what is made of it."""

import math

import pytest
import torch
import torch.nn.functional as F

from feddpms.models import ConditionalSettings, build_conditional
from feddpms.rng import Rng
from feddpms.synthesis import Guidance, balanced, fuse, guided, lacking, told
from feddpms.synthesis.knowledge import DRAWS, READ, attention, divergence
from feddpms.types import Batch, Task
from small import blobs

DEVICES, CLASSES, Q = 5, 4, 6
HELD = torch.tensor(
    [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 0, 1]], dtype=torch.bool
)
"""nobody has class 2"""
TASK = Task(classes=3, clients=3, rounds=5, latent=6)

every_reference = pytest.mark.parametrize("reference", ["self", "mean"])


def made(seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(DEVICES, CLASSES, Q, generator=g, dtype=torch.float64)


def sent(k, held=HELD):
    """What devices send of their knowledge."""
    return {
        i: {"classes": row.nonzero().flatten(), "means": k[i, row]} for i, row in enumerate(held)
    }


def normals(seed=0):
    g = torch.Generator().manual_seed(seed)
    return lambda like: torch.randn(like.shape, generator=g, dtype=like.dtype)


def auto_encoder(like):
    return build_conditional(like, TASK, ConditionalSettings(width=2), Rng(3))


@every_reference
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_attention_is_shared_among_the_devices_that_have_a_class(reference, scale):
    k = made(scale=scale)
    a = attention(k, HELD, reference)
    assert (a >= 0).all()
    assert (a[~HELD] == 0).all()
    torch.testing.assert_close(a.sum(0), HELD.any(0).double())
    assert not torch.equal(attention(made(1), HELD, reference), a)


@every_reference
def test_what_a_device_says_of_a_class_that_it_lacks_is_not_heard(reference):
    k = made()
    loud = torch.where(HELD.unsqueeze(2), k, 1e6)
    assert torch.equal(attention(loud, HELD, reference), attention(k, HELD, reference))


def test_attention_is_a_softmax_of_scaled_products():
    k = made()
    for c in (0, 1, 3):
        own = [i for i in range(DEVICES) if HELD[i, c]]
        asks = {"self": own, "mean": ["mean"]}
        for reference, asking in asks.items():
            total = torch.zeros(DEVICES, dtype=torch.float64)
            for i in asking:
                query = sum(k[j, c] for j in own) / len(own) if i == "mean" else k[i, c]
                e = {j: math.exp(float(query @ k[j, c]) / math.sqrt(Q)) for j in own}
                for j in own:
                    total[j] += e[j] / sum(e.values()) / len(asking)
            torch.testing.assert_close(attention(k, HELD, reference)[:, c], total)


@every_reference
def test_equal_knowledge_is_fused_to_itself_without_divergence(reference):
    k = made()[:1].expand(DEVICES, -1, -1)
    fused = fuse(sent(k), Guidance(reference=reference))
    assert fused["classes"].tolist() == [0, 1, 3]
    torch.testing.assert_close(fused["means"], k[0, [0, 1, 3]])
    assert float(divergence(k[0, [0, 1, 3]], fused["means"])) == pytest.approx(0, abs=1e-12)


@every_reference
def test_one_device_is_fused_to_what_it_says(reference):
    k = made()
    alone = fuse({7: sent(k)[4]}, Guidance(reference=reference))
    torch.testing.assert_close(alone["means"], k[4, [0, 1, 3]])


@every_reference
def test_the_order_of_devices_changes_nothing(reference):
    k, order, guidance = made(), torch.tensor([3, 1, 4, 0, 2]), Guidance(reference=reference)
    here, there = fuse(sent(k), guidance), fuse(sent(k[order], HELD[order]), guidance)
    torch.testing.assert_close(here, there)
    backwards = dict(reversed(sent(k).items()))
    assert torch.equal(fuse(backwards, guidance)["means"], here["means"])


def test_nothing_sent_is_nothing_known():
    assert fuse({}, Guidance()) == {}


def test_divergence_is_that_of_softmaxes_from_device_to_fused():
    k, fused = made()[0], made()[1]
    p, q = k.exp() / k.exp().sum(1, keepdim=True), fused.exp() / fused.exp().sum(1, keepdim=True)
    torch.testing.assert_close(divergence(k, fused), (p * (p / q).log()).sum())
    assert not torch.isclose(divergence(k, fused), divergence(fused, k))
    assert float(divergence(k + 5, k)) == pytest.approx(0, abs=1e-12)  # a shift is no knowledge


def test_what_is_told_is_the_mean_activation_over_draws_of_the_own_classes():
    shard = blobs(9, [2, 0], 1)
    net, eps = auto_encoder(shard.x), normals()
    got = told(net, shard.y, normals())
    assert got["classes"].tolist() == [0, 2]
    for c, k in zip((0, 2), got["means"], strict=True):
        z = net.means[c] + eps(torch.zeros(READ, 6))
        torch.testing.assert_close(k, F.leaky_relu(net.open(z), 0.1).mean(0).detach())


def test_what_is_fused_guides_classes_that_a_device_lacks():
    """A few steps down the guided loss alone: the decoder's draws of class 1 come to K_1."""
    shard = blobs(12, [0], 1)
    net = auto_encoder(shard.x)
    fused = {"classes": torch.tensor([1]), "means": net.features(net.means[1:2] * 3).detach()}
    nothing = lambda net, batch: torch.zeros(())  # noqa: E731
    loss = guided(nothing, fused, 2.0, net.means, normals())
    batch = Batch(shard.x, shard.y, None, torch.arange(12))
    first = float(loss(net, batch).detach())
    draws = net.means[1] + normals()(torch.zeros(DRAWS, 6))
    want = 2 * divergence(net.features(draws).mean(0, keepdim=True).detach(), fused["means"])
    assert first == pytest.approx(float(want), rel=1e-5)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    assert float(loss(net, batch).detach()) < first / 4


@pytest.mark.parametrize(("fused", "gamma"), [({}, 1.0), ({"classes": torch.tensor([0])}, 0.0)])
def test_without_knowledge_or_weight_the_loss_is_the_devices_own(fused, gamma):
    base = lambda net, batch: torch.zeros(())  # noqa: E731
    assert guided(base, fused, gamma, torch.zeros(3, 6), normals()) is base


def test_a_full_class_histogram_is_even():
    y = torch.tensor([0] * 7 + [2] * 3 + [3])
    heard = torch.tensor([0, 1, 2])
    assert lacking(y, heard, 5, 100).tolist() == [0, 7, 4, 6, 0]  # nobody knows class 4
    everything = lacking(y, torch.arange(5), 5, 100)
    assert (torch.bincount(y, minlength=5) + everything).tolist() == [7] * 5
    assert lacking(y, torch.arange(5), 5, 4).tolist() == [0, 4, 4, 4, 4]
    assert lacking(y, torch.arange(5), 5, 0).tolist() == [0] * 5


def test_examples_are_decoded_draws_around_a_classs_mean():
    shard = blobs(9, [0], 1)
    net = auto_encoder(shard.x)
    made = balanced(net, torch.tensor([0, 2, 3]), 0.5, normals())
    assert made.y.tolist() == [1, 1, 2, 2, 2]
    assert made.weight == 0.5
    z = net.means[made.y] + normals()(torch.zeros(5, 6))
    torch.testing.assert_close(made.x, net.decode(z).detach())
    assert not made.x.requires_grad
    assert balanced(net, torch.zeros(3, dtype=torch.int64), 1.0, normals()) is None
