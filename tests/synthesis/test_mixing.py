import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddpms.synthesis import averages, mixed
from feddpms.types import Batch, Shard
from small import blobs

CLASSES = 3


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def smooth():
    """A smooth network in float64 without layers that look at the whole batch."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    g = stream(3)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    return net


def batch_of(n=8):
    shard = blobs(n, [0, 1, 2], 4)
    return Batch(shard.x.double(), shard.y, None, torch.arange(n))


def pool_of(n=1):
    g = stream(7)
    x = torch.rand(n, 1, 4, 4, generator=g, dtype=torch.float64)
    y = torch.rand(n, CLASSES, generator=g, dtype=torch.float64)
    return {"x": x, "y": y / y.sum(1, keepdim=True)}


def one_of(batch, i):
    return Batch(batch.x[i : i + 1], batch.y[i : i + 1], None, batch.index[i : i + 1])


@pytest.mark.parametrize(("n", "size", "groups"), [(24, 6, 4), (25, 6, 4), (29, 6, 4), (7, 1, 7)])
def test_no_average_is_of_fewer_than_the_group_size(n, size, groups):
    """Each example marks a pixel of its own, so that an average shows whom it is made of."""
    shard = Shard(torch.eye(n).view(n, 1, 1, n), torch.zeros(n, dtype=torch.int64))
    members = averages(shard, 1, size, stream())["x"].flatten(1) > 0
    assert len(members) == groups
    assert members.sum(1).min() >= size
    assert members.sum(0).tolist() == [1] * n


def test_an_average_weighs_its_members_equally():
    shard = Shard(torch.eye(10).view(10, 1, 1, 10), torch.zeros(10, dtype=torch.int64))
    for row in averages(shard, 1, 3, stream())["x"].flatten(1):
        inside = row[row > 0]
        torch.testing.assert_close(inside, torch.full_like(inside, 1 / len(inside)))


def test_labels_are_averaged_with_their_images():
    shard = blobs(25, [0, 1, 2], 1)
    marked = Shard(F.one_hot(shard.y, CLASSES).float().view(-1, 1, 1, CLASSES), shard.y)
    sent = averages(marked, CLASSES, 4, stream())
    torch.testing.assert_close(sent["x"].flatten(1), sent["y"])
    torch.testing.assert_close(sent["y"].sum(1), torch.ones(6))


def test_equal_groups_together_have_the_mean_of_the_data():
    shard = blobs(24, [0, 1, 2, 2], 1)
    sent = averages(shard, CLASSES, 6, stream())
    torch.testing.assert_close(sent["x"].mean(0), shard.x.mean(0))
    torch.testing.assert_close(sent["y"].mean(0), torch.tensor([0.25, 0.25, 0.5]))


def test_a_client_with_few_examples_sends_one_average_of_all():
    shard = blobs(5, [0, 1], 1)
    sent = averages(shard, CLASSES, 64, stream())
    torch.testing.assert_close(sent["x"], shard.x.mean(0, keepdim=True))
    torch.testing.assert_close(sent["y"], torch.tensor([[0.6, 0.4, 0.0]]))


def test_groups_are_drawn_at_random_from_the_stream():
    shard = blobs(24, [0, 1, 2], 1)
    one, same, other = (averages(shard, CLASSES, 6, stream(s))["x"] for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    assert not torch.allclose(one[0], shard.x[:6].mean(0))


@pytest.mark.parametrize("lam", [0.05, 0.3])
def test_the_loss_is_its_three_terms_example_by_example(lam):
    """The third by a central difference along the average, one example at a time."""
    net, batch, pool, h = smooth(), batch_of(), pool_of(), 1e-5
    x_bar, y_bar = pool["x"][0], pool["y"][0]
    each = []
    with torch.no_grad():
        for x, y in zip(batch.x, batch.y, strict=True):

            def own(v, y=y):
                return -net(v[None]).log_softmax(1)[0, y].item()

            v = (1 - lam) * x
            slope = (own(v + h * x_bar) - own(v - h * x_bar)) / (2 * h)
            other = -(y_bar * net(v[None]).log_softmax(1)[0]).sum().item()
            each.append((1 - lam) * own(v) + lam * other + lam * (1 - lam) * slope)
    got = mixed(pool, lam, False, stream())(net, batch).item()
    assert got == pytest.approx(sum(each) / len(each), rel=1e-8)


def test_the_loss_of_a_batch_is_the_mean_of_the_losses_of_its_examples():
    net, batch, loss = smooth(), batch_of(8), mixed(pool_of(), 0.3, False, stream())
    alone = torch.stack([loss(net, one_of(batch, i)) for i in range(8)])
    torch.testing.assert_close(loss(net, batch), alone.mean())


def test_gradients_are_the_mean_of_those_of_the_examples_too():
    net, batch, loss = smooth(), batch_of(8), mixed(pool_of(), 0.3, False, stream())
    whole = torch.autograd.grad(loss(net, batch), list(net.parameters()))
    alone = [
        torch.autograd.grad(loss(net, one_of(batch, i)), list(net.parameters())) for i in range(8)
    ]
    for got, *parts in zip(whole, *alone, strict=True):
        torch.testing.assert_close(got, torch.stack(parts).mean(0))


def test_the_slope_itself_trains_the_weights():
    net, batch, lam = smooth(), batch_of(), 0.3
    pool, dark = pool_of(), {**pool_of(), "x": torch.zeros(1, 1, 4, 4, dtype=torch.float64)}
    first = next(iter(net.parameters()))
    with_slope, without = (
        torch.autograd.grad(mixed(p, lam, False, stream())(net, batch), first)[0]
        for p in (pool, dark)
    )
    h, index = 1e-5, (0, 5)

    def slope_term(change):
        with torch.no_grad():
            first[index] += change
        values = [mixed(p, lam, False, stream())(net, batch).item() for p in (pool, dark)]
        return values[0] - values[1]

    numerical = (slope_term(h) - slope_term(-2 * h)) / (2 * h)
    difference = (with_slope - without)[index].item()
    assert abs(difference) > 1e-4
    assert difference == pytest.approx(numerical, rel=1e-4)


def test_each_example_picks_its_own_average_from_the_stream():
    net, batch, pool, lam = smooth(), batch_of(8), pool_of(5), 0.3
    got = mixed(pool, lam, False, stream(9))(net, batch)
    picks = torch.randint(5, (8,), generator=stream(9)).tolist()
    assert len(set(picks)) > 1
    alone = [
        mixed({k: v[i : i + 1] for k, v in pool.items()}, lam, False, stream())(
            net, one_of(batch, n)
        )
        for n, i in enumerate(picks)
    ]
    torch.testing.assert_close(got, torch.stack(alone).mean())


def test_nothing_is_mixed_at_zero():
    net, batch = smooth(), batch_of()
    got = mixed(pool_of(), 0.0, False, stream())(net, batch)
    torch.testing.assert_close(got, F.cross_entropy(net(batch.x), batch.y))


def test_the_bound_keeps_the_mixed_loss_from_below_zero():
    """A steep network: to first order its loss on the mixture is far below 0, and no loss is."""
    net, batch, pool, lam = smooth(), batch_of(8), pool_of(), 0.4
    with torch.no_grad():
        for p in net.parameters():
            p *= 20
    free = mixed(pool, lam, False, stream())(net, batch).item()
    bound = mixed(pool, lam, True, stream())(net, batch).item()
    pick = torch.randint(len(pool["x"]), (8,), generator=stream())
    v = ((1 - lam) * batch.x).requires_grad_()
    own = F.cross_entropy(net(v), batch.y, reduction="none")
    (slope,) = torch.autograd.grad(own.sum(), v)
    mixture = own + lam * (slope * pool["x"][pick]).flatten(1).sum(1)
    assert (mixture < 0).any()
    other = F.cross_entropy(net(v), pool["y"][pick], reduction="none")
    want = ((1 - lam) * mixture.clamp(min=0) + lam * other).mean().item()
    assert bound == pytest.approx(want)
    assert free < bound
