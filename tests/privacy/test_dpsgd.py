"""DP-SGD's sum of clipped gradients, against plain autograd on one example at a time."""

import sys

import pytest
import torch

from feddpms.algorithms.method import cross_entropy
from feddpms.algorithms.moon import contrastive
from feddpms.errors import ConfigError
from feddpms.models import NetSettings, VaeSettings, build, vae_loss
from feddpms.models.nets import GENERATIVE
from feddpms.privacy.dpsgd import ClippedGradients, require_per_example
from feddpms.rng import Rng
from feddpms.types import Batch
from small import small_net

pytest.importorskip("opacus")
N, CLASSES, LATENT, HIDDEN = 7, 3, 6, 8
HEAD = {"classifier.head.weight", "classifier.head.bias"}
LOSSES = ["cross entropy", "vae", "moon"]


def make_net(norm="group"):
    """Small, but with several channels in every layer, so that the memory format matters."""
    settings = NetSettings(width=0.25, latent=LATENT, hidden=HIDDEN, norm=norm)
    return build((1, 8, 8), CLASSES, settings, Rng(0))


def make_batch(n=N, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 8, 8, generator=g, dtype=torch.float64).to(dtype)
    return Batch(x, torch.arange(n) % CLASSES, None, torch.arange(n))


def part(batch, rows):
    rows = torch.as_tensor(rows)
    return Batch(batch.x[rows], batch.y[rows], None, batch.index[rows])


def make_loss(which, monkeypatch, dtype=torch.float32):
    """A loss in which each example has its own noise and its own representations."""
    if which == "cross entropy":
        return cross_entropy
    g = torch.Generator().manual_seed(2)
    noise, z_g, z_p = (
        torch.randn(N, d, generator=g, dtype=dtype) for d in (LATENT, HIDDEN, HIDDEN)
    )
    if which == "moon":
        return contrastive(cross_entropy, z_g, z_p, 3.0, 0.5)
    settings = VaeSettings(weight=0.1)
    return lambda net, batch: vae_loss(settings, lambda mean: noise[batch.index])(net, batch)


def alone(net, loss, batch, names=None):
    """The gradient of each example, by plain autograd on a batch of one."""
    net.train()
    named = {k: p for k, p in net.named_parameters() if names is None or k in names}
    out = []
    for i in range(len(batch.y)):
        value = loss(net, part(batch, [i]))
        grads = torch.autograd.grad(value, list(named.values()), materialize_grads=True)
        out.append(dict(zip(named, grads, strict=True)))
    return out


def norm(tree) -> float:
    return float(torch.cat([t.double().flatten() for t in tree.values()]).norm())


def minus(a, b):
    return {k: a[k] - b[k] for k in a}


def clipped_sum(net, batch, loss=cross_entropy, clip=1.0, names=None):
    with ClippedGradients(net, clip, names) as gradients:
        return gradients.sum(loss, batch)[0]


@pytest.mark.parametrize("which", LOSSES)
def test_the_sum_is_that_of_the_gradients_of_each_example_alone(which, monkeypatch):
    net, batch = make_net().double(), make_batch(dtype=torch.float64)
    loss = make_loss(which, monkeypatch, torch.float64)
    grads = alone(net, loss, batch)
    norms = [norm(g) for g in grads]
    clip = sorted(norms)[N // 2] * 1.0001  # some are clipped, some are not
    want = {
        k: sum(g[k] * min(1, clip / n) for g, n in zip(grads, norms, strict=True)) for k in grads[0]
    }
    with ClippedGradients(net, clip) as gradients:
        for _ in range(2):  # nothing is left over from the sum before
            sums, total = gradients.sum(loss, batch)
            assert list(sums) == [k for k, _ in net.named_parameters()]
            for k in want:
                torch.testing.assert_close(sums[k], want[k], rtol=1e-5, atol=1e-10, msg=k)
    assert total == pytest.approx(N * loss(net, batch).item())


@pytest.mark.parametrize("which", LOSSES)
def test_batch_mates_do_not_matter(which, monkeypatch):
    """In float32 with the network as it is built; three examples against each of them alone."""
    net, batch, loss = make_net(), make_batch(), make_loss(which, monkeypatch)
    whole = clipped_sum(net, part(batch, [4, 0, 5]), loss)
    each = [clipped_sum(net, part(batch, [i]), loss) for i in (0, 4, 5)]
    left = {k: v - sum(e[k] for e in each) for k, v in whole.items()}
    assert norm(left) <= 1e-5 * norm(whole)


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_one_example_moves_the_sum_by_at_most_the_clip(which, scale, monkeypatch):
    net, batch, loss = make_net(), make_batch(), make_loss(which, monkeypatch)
    batch.x[3] *= scale
    for clip in (1e-3, 0.1):
        with_it = clipped_sum(net, batch, loss, clip)
        without = clipped_sum(net, part(batch, [0, 1, 2, 4, 5, 6]), loss, clip)
        moved = norm(minus(with_it, without))
        assert moved <= clip * (1 + 1e-6)
        assert moved == pytest.approx(clip, rel=1e-3)
        assert norm(clipped_sum(net, part(batch, [3]), loss, clip)) <= clip  # no rounding above it


def test_a_gradient_within_the_clip_is_left_alone():
    net, batch = make_net(), part(make_batch(), [2])
    (grad,) = alone(net, cross_entropy, batch)
    assert norm(minus(clipped_sum(net, batch, clip=norm(grad) * 1.01), grad)) <= 1e-5 * norm(grad)


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_with_a_broken_gradient_counts_as_zero(which, bad, monkeypatch):
    net, batch, loss = make_net(), make_batch(), make_loss(which, monkeypatch)
    batch.x[3, 0, 2, 2] = bad
    sums = clipped_sum(net, batch, loss)
    rest = clipped_sum(net, part(batch, [0, 1, 2, 4, 5, 6]), loss)
    assert norm(minus(sums, rest)) <= 1e-5 * norm(rest)  # a NaN would fail this, too
    assert norm(clipped_sum(net, part(batch, [3]), loss)) == 0


def test_named_parameters_alone_are_clipped_and_summed():
    net, batch, names = make_net(), make_batch(), {*HEAD, "decoder.open.bias", "no such name"}
    net.eval().classifier.head.bias.requires_grad_(False)  # Opacus is silent in eval mode
    before = {k: p.requires_grad for k, p in net.named_parameters()}
    kept = ["decoder.open.bias", "classifier.head.weight"]
    sums = clipped_sum(net, batch, clip=1e-3, names=names)
    want = {k: torch.zeros_like(p) for k, p in net.named_parameters() if k in kept}
    for g in alone(net, cross_entropy, batch, kept):
        want = {k: v + g[k] * 1e-3 / norm(g) for k, v in want.items()}
    assert list(sums) == list(want) == kept
    assert norm(minus(sums, want)) <= 1e-5 * norm(want)
    assert {k: p.requires_grad for k, p in net.named_parameters()} == before


def test_parameters_that_the_loss_does_not_reach_get_zeros():
    sums = clipped_sum(make_net(), make_batch())
    assert {k for k, v in sums.items() if not v.any()} == {
        k for k in sums if k.startswith(GENERATIVE)
    }
    only = clipped_sum(make_net(), make_batch(), names={"decoder.open.bias"})
    assert list(only) == ["decoder.open.bias"]
    assert norm(only) == 0


def test_sums_have_the_parameters_shape_and_memory_format():
    """A fused optimiser reads a gradient in the order of its parameter, whatever its strides."""
    net = make_net()
    for n in (0, N):
        sums = clipped_sum(net, make_batch(n))
        for k, p in net.named_parameters():
            assert (sums[k].shape, sums[k].stride()) == (p.shape, p.stride())
            assert (sums[k].dtype, sums[k].requires_grad) == (torch.float64, False)


def test_an_empty_batch_sums_to_zero():
    with ClippedGradients(make_net(), 1.0) as gradients:
        sums, total = gradients.sum(cross_entropy, make_batch(0))
    assert norm(sums) == total == 0


def test_weights_of_examples_are_refused():
    batch = make_batch()
    weighted = Batch(batch.x, batch.y, torch.ones(N), batch.index)
    with ClippedGradients(make_net(), 1.0) as gradients, pytest.raises(ValueError, match="weight"):
        gradients.sum(cross_entropy, weighted)


def pulled(net, batch):
    return cross_entropy(net, batch) + sum(p.square().sum() for p in net.parameters())


def dropped_pass(net, batch):
    net.features(batch.x)
    return cross_entropy(net, batch)


def doubled(net, batch):
    return cross_entropy(net, part(batch, [*range(len(batch.y))] * 2))


def test_what_has_no_per_example_gradient_is_refused():
    """A term in the weights alone has no layer; its gradient would be lost without a word."""
    net, batch = make_net(), make_batch()
    with ClippedGradients(net, 1.0) as gradients:
        for loss in (pulled, dropped_pass):
            with pytest.raises(ValueError, match=r"the loss uses \S+ \d times but"):
                gradients.sum(loss, batch)
        with pytest.raises(ValueError, match="must pass its batch of 7"):
            gradients.sum(doubled, batch)


@pytest.mark.parametrize("names", [None, {"decoder.open.weight"}])
def test_batch_norm_is_refused(names):
    for refuse in (require_per_example, lambda net: ClippedGradients(net, 1.0, names)):
        with pytest.raises(
            ConfigError, match=r'BatchNorm2d at encoder.layers.1; set net.norm = "gr'
        ):
            refuse(small_net())
    require_per_example(make_net())


def test_without_opacus_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    net, line = make_net().eval(), r'^DP training needs Opacus; pip install "feddpms\[dpsgd\]"$'
    with pytest.raises(ConfigError, match=line), ClippedGradients(net, 1.0, HEAD):
        pass
    assert all(p.requires_grad for p in net.parameters())
    assert not net.training


def traces(net):
    """What hooks could leave behind: attributes, hooks, modes, gradients."""
    modules = {
        k: (sorted(vars(m)), len(m._forward_hooks), len(m._backward_hooks), m.training)
        for k, m in net.named_modules()
    }
    parameters = {k: (sorted(vars(p)), p.grad, p.requires_grad) for k, p in net.named_parameters()}
    return modules, parameters, list(net.state_dict())


def broken(net, batch):
    net(batch.x)
    raise KeyError("broken")


def broken_backward(net, batch):
    h = net.encoder(batch.x)
    h.register_hook(lambda _: broken(net, batch))
    return cross_entropy(net, batch) + h.mean()


@pytest.mark.parametrize("names", [None, HEAD])
@pytest.mark.parametrize("loss", [cross_entropy, broken, broken_backward])
def test_the_network_is_left_as_it_was(loss, names):
    net = make_net()
    net.decoder.eval()
    before = traces(net)
    with ClippedGradients(net, 1.0, names) as gradients:
        assert traces(net) != before
        inside = traces(net)
        net(make_batch().x)
        assert traces(net) == inside
        if loss is cross_entropy:
            gradients.sum(loss, make_batch())
        else:
            with pytest.raises((KeyError, RuntimeError)):
                gradients.sum(loss, make_batch())
        assert traces(net) == inside
    assert traces(net) == before
    with pytest.raises(RuntimeError), ClippedGradients(net, 1.0):
        raise RuntimeError("inside")
    assert traces(net) == before


@pytest.mark.parametrize("loss", [broken, broken_backward])
def test_a_loss_that_broke_off_leaves_nothing_in_the_next_sum(loss):
    net, batch = make_net(), make_batch()
    want = clipped_sum(net, batch)
    with ClippedGradients(net, 1.0) as gradients:
        net(batch.x)  # a pass outside of a sum does not count either
        with pytest.raises(KeyError):
            gradients.sum(loss, batch)
        net(batch.x)
        sums, _ = gradients.sum(cross_entropy, batch)
    assert all(torch.equal(sums[k], want[k]) for k in want)
