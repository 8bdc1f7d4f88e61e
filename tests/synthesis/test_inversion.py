"""Images made of a model alone: what they are asked to be, and that the model stays as it is."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddpms.errors import ConfigError
from feddpms.models import Plan
from feddpms.synthesis import (
    Inversion,
    fine_tune,
    invert,
    require_inversion,
    scarce,
    warm_up,
)
from feddpms.synthesis.inversion import statistics_gap, watched
from feddpms.types import Shard
from small import CLASSES, PLAN, TASK, blobs, small_net, unseen

HOW = Inversion(steps=25, lr=0.1, beta=0.1)
LABELS = torch.tensor([2, 0, 0, 1, 2, 2])


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def trained():
    """A network that knows the classes a little, and its statistics well."""
    net, shard = small_net(), blobs(60, [0, 1, 2], 5)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net.train()(shard.x), shard.y).backward()
        optimizer.step()
    for p in net.parameters():
        p.grad = None
    return net


@pytest.fixture(scope="module")
def net():
    return trained()


def make(net, labels=LABELS, how=HOW, seed=0):
    return invert(net, labels, PLAN.shape, how, stream(seed))


def test_labels_are_as_asked_for_and_images_in_range(net):
    made = make(net)
    assert made.y.tolist() == LABELS.tolist()
    assert made.x.shape == (6, *PLAN.shape)
    assert made.x.dtype == torch.float32
    assert made.x.min() >= 0
    assert made.x.max() <= 1
    assert made.x.std() > 0.01
    assert not made.x.requires_grad


def test_the_cross_entropy_goes_down_and_the_model_sees_the_labels(net):
    before = torch.randn(6, *PLAN.shape, generator=stream()).sigmoid()
    made = make(net, how=replace(HOW, steps=60))
    with torch.no_grad():
        first, last = (F.cross_entropy(net.eval()(x), LABELS) for x in (before, made.x))
    assert last < 0.5 * first
    assert net(made.x).argmax(1).tolist() == LABELS.tolist()


def gaps(net, x):
    with watched(net.eval()) as found, torch.no_grad():
        net(x)
    return torch.stack(found)


def test_the_statistics_come_nearer_and_the_more_so_the_more_they_weigh(net):
    start = torch.randn(6, *PLAN.shape, generator=stream()).sigmoid()
    found = [gaps(net, make(net, how=replace(HOW, beta=b)).x).sum() for b in (0.0, 0.1, 10.0)]
    assert found[2] < found[1] < gaps(net, start).sum()
    assert found[2] < found[1] < found[0]


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 2, 4)])
def test_the_gap_is_zero_at_the_running_statistics(shape):
    """Momentum 1: one pass in train mode makes the batch's statistics the running ones."""
    x = torch.rand(shape, generator=stream(), dtype=torch.float64)
    layer = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3, momentum=1.0).double()
    layer(x)
    torch.testing.assert_close(
        statistics_gap(layer, x), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-20
    )
    assert statistics_gap(layer, x + 0.1) == pytest.approx(3 * 0.01)
    assert statistics_gap(layer, 2 * (x - x.mean(0)) + x.mean(0)) > 0.1


def test_a_whole_network_at_its_running_statistics_has_no_gap():
    net, x = small_net().double(), unseen().x.double()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    for _ in range(3):  # each layer's statistics depend on those before it
        net.train()(x)
    with watched(net) as found, torch.no_grad():
        net(x)
    assert len(found) == 3
    assert torch.stack(found).max() < 1e-20


def test_one_value_has_no_spread():
    layer = nn.BatchNorm1d(3)
    want = 3 * ((layer.eps) ** 0.5 - (1 + layer.eps) ** 0.5) ** 2
    assert statistics_gap(layer, torch.zeros(1, 3)) == pytest.approx(want)


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was(training):
    net = trained().train(training)
    before = copy.deepcopy(net.state_dict())
    make(net)
    after = net.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert net.training is training
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_no_hook_stays_after_a_failure(net):
    with pytest.raises(RuntimeError):
        invert(net, LABELS, (3, 4, 4), HOW, stream())
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_the_same_stream_gives_the_same_bits(net):
    one, same, other = (make(net, seed=s).x for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize(
    ("counts", "per_class", "want"),
    [
        ((12, 0, 0), 9, (0, 4, 4)),  # up to the mean count, 4
        ((12, 0, 0), 3, (0, 3, 3)),  # at the most three
        ((4, 2, 6), 9, (0, 0, 0)),  # half the mean count is enough
        ((6, 1, 5), 9, (0, 3, 0)),
        ((1, 1, 0), 9, (0, 0, 1)),  # at least one
        ((12, 0, 0), 0, (0, 0, 0)),
        ((4, 4, 4), 9, (0, 0, 0)),
    ],
)
def test_a_class_is_lacking_below_half_the_mean_count(counts, per_class, want):
    y = torch.arange(3).repeat_interleave(torch.tensor(counts))
    labels = scarce(y, 3, 0.5, per_class)
    assert labels.bincount(minlength=3).tolist() == list(want)
    assert labels.tolist() == sorted(labels.tolist())


def test_no_label_is_no_image(net):
    made = make(net, labels=LABELS[:0])
    assert made.x.shape == (0, *PLAN.shape)
    assert len(made) == 0


def test_a_model_without_running_statistics_is_refused_in_one_line():
    group = Plan(PLAN.shape, CLASSES, replace(PLAN.settings, norm="group")).build()
    require_inversion("zdac", small_net().state_dict(), 2, TASK)
    with pytest.raises(
        ConfigError, match=r"^zdac .*set net\.kind=conv and net\.norm=batch"
    ) as told:
        require_inversion("zdac", group.state_dict(), 2, TASK)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("rounds", "wait", "first"), [(2, 0, 1), (10, 0, 2), (50, 0, 10), (5, 4, 4)]
)
def test_images_wait_as_long_as_set_or_for_a_fifth_of_the_rounds(rounds, wait, first):
    task = replace(TASK, rounds=rounds)
    require_inversion("zdas", small_net().state_dict(), wait, task)
    assert warm_up(wait, task) == first


@pytest.mark.parametrize(("rounds", "wait"), [(1, 0), (5, 5), (5, 9)])
def test_the_wait_must_leave_some_rounds(rounds, wait):
    with pytest.raises(ConfigError, match=r"^method\.warm_up of zdas must be below rounds") as told:
        require_inversion("zdas", small_net().state_dict(), wait, replace(TASK, rounds=rounds))
    assert "\n" not in str(told.value)


def test_fine_tuning_lowers_the_loss_and_leaves_the_statistics(net):
    net, shard = copy.deepcopy(net), unseen()
    shard = Shard(shard.x, (shard.y + 1) % CLASSES)
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        first = F.cross_entropy(net.eval()(shard.x), shard.y)
    fine_tune(net, shard, 10, 0.01)
    with torch.no_grad():
        assert F.cross_entropy(net.eval()(shard.x), shard.y) < first
    buffers = [k for k, _ in net.named_buffers()]
    assert len(buffers) == 9
    assert all(torch.equal(net.state_dict()[k], before[k]) for k in buffers)
    assert not torch.equal(net.state_dict()["mean.weight"], before["mean.weight"])
    assert all(p.grad is None for p in net.parameters())
