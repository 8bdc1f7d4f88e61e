import pytest
import torch
from torch import nn

from feddpms.errors import ConfigError
from feddpms.models import GENERATIVE, NetSettings, Plan, build, rebuilt, split, trunk
from feddpms.rng import Rng
from feddpms.types import Task

SHAPES = [(1, 4, 4), (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 12, 20)]
NARROW = NetSettings(width=0.25, latent=6, hidden=8)
MLP = NetSettings(kind="mlp", width=0.25, latent=6, hidden=8)
LENET = NetSettings(kind="lenet", width=0.5, latent=6, hidden=8)

every_shape = pytest.mark.parametrize("shape", SHAPES)
both_norms = pytest.mark.parametrize("norm", ["batch", "group"])


def make(shape=(1, 8, 8), settings=NARROW, seed=0, classes=3):
    return build(shape, classes, settings, Rng(seed))


def images(shape, n=5, seed=1):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def channels(net) -> list[int]:
    return [m.out_channels for m in net.encoder.modules() if isinstance(m, nn.Conv2d)]


@every_shape
@both_norms
def test_shapes(shape, norm):
    net, x = make(shape, NetSettings(width=0.25, latent=6, hidden=8, norm=norm)), images(shape)
    mean, log_variance = net.encode(x)
    assert mean.shape == log_variance.shape == net.code(x).shape == (5, 6)
    assert net(x).shape == net.classify(mean).shape == (5, 3)
    assert net.features(x).shape == (5, 8)
    assert net.decode(mean).shape == x.shape


@pytest.mark.parametrize("side", [(30, 28), (28, 30), (2, 4), (0, 4), (7, 7)])
def test_sides_not_divisible_by_4_are_refused_in_one_line(side):
    with pytest.raises(ConfigError, match=f"divisible by 4.* got {side[0]}x{side[1]}") as caught:
        make((1, *side))
    assert "\n" not in str(caught.value)


@every_shape
def test_codes_and_decoded_images_lie_in_the_unit_range(shape):
    net = make(shape)
    with torch.no_grad():
        net.mean.weight.mul_(1000)
        net.decoder.layers[-2].weight.mul_(1000)
        codes, decoded = net.code(images(shape)), net.decode(images((6,)))
    for values in (codes, decoded):
        assert values.min() >= 0
        assert values.max() <= 1
        assert values.min() < 0.1
        assert values.max() > 0.9


def test_the_log_variance_is_clamped():
    net, x = make(), images((1, 8, 8))
    with torch.no_grad():
        for bias, limit in ((-50.0, -8.0), (50.0, 2.0)):
            net.log_variance.bias.fill_(bias)
            assert net.encode(x)[1].eq(limit).all()


def test_the_log_variance_starts_small():
    log_variance = make().eval().encode(images((1, 8, 8)))[1]
    assert log_variance.mean().item() == pytest.approx(-3, abs=0.5)


@both_norms
def test_eval_mode_is_deterministic_and_each_record_is_by_itself(norm):
    net = make(settings=NetSettings(width=0.25, latent=6, hidden=8, norm=norm))
    x = images((1, 8, 8), 6)
    for _ in range(3):
        net.train()(x)
    net.eval()
    with torch.no_grad():
        together, backwards = net(x), net(x.flip(0)).flip(0)
        alone = torch.cat([net(one[None]) for one in x])
        assert torch.equal(together, net(x))
    torch.testing.assert_close(alone, together)
    torch.testing.assert_close(backwards, together)


def test_training_mode_with_batch_norm_looks_at_the_whole_batch():
    net, x = make().train(), images((1, 8, 8), 6)
    assert not torch.allclose(net(x)[:2], net(x[:2]), atol=1e-4)


@pytest.mark.parametrize(("shape", "latent"), [((1, 8, 8), 32), ((3, 8, 8), 128)])
def test_default_latent_length(shape, latent):
    assert make(shape, NetSettings(width=0.25)).latent == latent
    assert make(shape, NetSettings(width=0.25, latent=5)).latent == 5


@pytest.mark.parametrize(
    ("channel", "width", "expected"),
    [(1, 1.0, [16, 32, 32]), (3, 1.0, [32, 64, 64]), (1, 0.5, [8, 16, 16]), (1, 0.001, [1, 2, 2])],
)
def test_the_width_scales_the_channels(channel, width, expected):
    assert channels(make((channel, 8, 8), NetSettings(width=width))) == expected


def test_group_norm_keeps_no_running_statistics():
    net = make(settings=NetSettings(width=0.25, latent=6, hidden=8, norm="group"))
    assert list(net.buffers()) == []
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    one, same, other = (make(seed=s).state_dict() for s in (0, 0, 1))
    for key, value in one.items():
        assert torch.equal(value, same[key]), key
        constant = value.unique().tolist() in ([0], [1], [-3])
        assert torch.equal(value, other[key]) == constant, key


def test_a_weight_does_not_change_when_another_part_does():
    one = make().state_dict()
    wider = make(settings=NetSettings(width=0.25, latent=6, hidden=9), classes=4).state_dict()
    assert one["classifier.head.weight"].shape != wider["classifier.head.weight"].shape
    for key, value in one.items():
        if not key.startswith("classifier."):
            assert torch.equal(value, wider[key]), key


def test_weights_of_different_layers_are_different_draws():
    net = make(settings=NetSettings(width=0.25, latent=6, hidden=6))
    one, other = net.classifier.body[0].weight, net.log_variance.weight
    assert one.shape == other.shape
    assert not torch.allclose(one, other, atol=1e-3)


@every_shape
def test_initial_weights_fill_torchs_own_bounds(shape):
    net = make(shape, NetSettings(width=1.0))
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            taps = module.weight[0, 0].numel() if module.weight.ndim == 4 else 1
            wide = isinstance(module, nn.Linear)
            inputs = (module.in_features if wide else module.in_channels) * taps
            largest = module.weight.abs().max().item() * inputs**0.5
            assert 0.9 < largest <= 1.0001, name
            assert module.weight.mean().abs().item() * inputs**0.5 < 0.2, name


def test_building_leaves_the_global_generator_untouched():
    before = torch.get_rng_state()
    make()
    assert torch.equal(before, torch.get_rng_state())


def test_initial_weights_do_not_depend_on_the_global_generator():
    one = make().state_dict()
    torch.rand(7)
    assert all(torch.equal(v, one[k]) for k, v in make().state_dict().items())


def test_the_trunk_is_all_that_predicts_and_no_more():
    net, x = make().eval(), images((1, 8, 8))
    tree = trunk(net.state_dict())
    left_out = set(net.state_dict()) - set(tree)
    assert left_out == {
        k for k in net.state_dict() if k.split(".")[0] in ("log_variance", "decoder")
    }
    assert all(k.startswith(GENERATIVE) for k in left_out)
    net(x).sum().backward()
    touched = {k for k, p in net.named_parameters() if p.grad is not None}
    assert touched == {k for k, _ in net.named_parameters() if k in tree}


def test_split_gives_everything_once():
    tree = make().state_dict()
    rest, decoder = split(tree)
    assert decoder
    assert all(k.startswith("decoder.") for k in decoder)
    assert set(rest) | set(decoder) == set(tree)
    assert not set(rest) & set(decoder)
    assert any(k.startswith("log_variance.") for k in rest)


def test_the_log_variance_is_read_from_what_enters_the_mean():
    net = make().eval()
    with torch.no_grad():
        mean, log_variance = net.encode(images((1, 8, 8)))
        assert torch.allclose(log_variance, net.log_variance(mean.logit()), atol=1e-4)
    assert net.log_variance.weight.numel() == net.latent**2


def tasked(plan):
    return Task(classes=3, clients=2, rounds=4, latent=6, network=plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@both_norms
def test_a_model_is_a_network_again_by_its_plan(norm, dtype):
    plan = Plan((1, 8, 8), 3, NetSettings(width=0.25, latent=6, hidden=8, norm=norm))
    net, x = make(settings=plan.settings, seed=4).to(dtype), images((1, 8, 8)).to(dtype)
    net.train()(x)  # so that the buffers are some, too
    model = trunk(net.state_dict())
    again = rebuilt(tasked(plan), model)
    assert torch.equal(again.eval()(x), net.eval()(x))
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    assert model["mean.weight"].abs().max() > 0  # it is a copy


@pytest.mark.parametrize(
    "plan", [None, Plan((1, 8, 8), 4, NARROW), Plan((1, 8, 8), 3, NetSettings(norm="group"))]
)
def test_a_plan_of_another_network_is_refused_in_one_line(plan):
    with pytest.raises(ConfigError, match=r"^Task\.network must build") as told:
        rebuilt(tasked(plan), trunk(make().state_dict()))
    assert "\n" not in str(told.value)


# Fully connected


@pytest.mark.parametrize("shape", [*SHAPES, (1, 7, 5), (3, 1, 9)])
def test_an_mlp_takes_images_of_any_side(shape):
    net, x = make(shape, MLP), images(shape)
    mean, log_variance = net.encode(x)
    assert mean.shape == log_variance.shape == net.code(x).shape == (5, 6)
    assert net(x).shape == net.classify(mean).shape == (5, 3)
    assert net.features(x).shape == (5, 8)
    decoded = net.decode(mean)
    assert decoded.shape == x.shape
    for values in (mean, decoded):
        assert 0 <= values.min() < values.max() <= 1


@pytest.mark.parametrize(
    ("channel", "width", "units"), [(1, 1.0, 128), (3, 1.0, 256), (1, 0.1, 13)]
)
def test_an_mlp_is_linear_layers_without_normalisation(channel, width, units):
    net = make((channel, 8, 8), NetSettings(kind="mlp", width=width))
    assert list(net.buffers()) == []
    kinds = {type(m) for m in net.modules() if not list(m.children())}
    assert kinds == {nn.Linear, nn.LeakyReLU, nn.Sigmoid}
    layers = [m for m in net.encoder.modules() if isinstance(m, nn.Linear)]
    assert [m.out_features for m in layers] == [units, units]
    assert net.latent == {1: 32, 3: 128}[channel]


def test_an_mlp_scores_each_record_by_itself_however_its_pixels_lie():
    net, x = make((3, 8, 8), MLP), images((3, 8, 8), 6)
    with torch.no_grad():
        expected = net.train()(x)
        torch.testing.assert_close(torch.cat([net(one[None]) for one in x]), expected)
        assert torch.equal(net(x.to(memory_format=torch.channels_last)), expected)
        assert not torch.allclose(net(x.flip(-1)), expected, atol=1e-4)


def test_the_trunk_of_an_mlp_is_all_that_predicts_and_no_more():
    net = make(settings=MLP).eval()
    net(images((1, 8, 8))).sum().backward()
    touched = {k for k, p in net.named_parameters() if p.grad is not None}
    assert touched == set(trunk(net.state_dict()))


# LeNet


@pytest.mark.parametrize("shape", [(1, 16, 16), (1, 28, 28), (3, 32, 32), (3, 16, 20)])
def test_a_lenet_takes_images_of_sides_from_16(shape):
    net, x = make(shape, LENET), images(shape)
    mean, log_variance = net.encode(x)
    assert mean.shape == log_variance.shape == net.code(x).shape == (5, 6)
    assert net(x).shape == net.classify(mean).shape == (5, 3)
    assert net.features(x).shape == (5, 8)
    decoded = net.decode(mean)
    assert decoded.shape == x.shape
    for values in (mean, decoded):
        assert 0 <= values.min() < values.max() <= 1


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 32, 12), (1, 18, 16)])
def test_a_lenet_refuses_other_sides_in_one_line(shape):
    with pytest.raises(ConfigError, match="divisible by 4, of 16 pixels or more, got") as caught:
        make(shape, LENET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 16, 20)])
def test_a_lenet_is_lecuns(shape):
    """Two valid 5x5 convolutions of 6 and 16 channels, each followed by the largest of 2x2."""
    net, x = make(shape, NetSettings(kind="lenet")), images(shape)
    assert list(net.buffers()) == []
    state, h = net.state_dict(), 2 * x - 1
    for i, n in ((0, 6), (3, 16)):
        weight, bias = (state[f"encoder.layers.{i}.{k}"] for k in ("weight", "bias"))
        windows = h.unfold(2, 5, 1).unfold(3, 5, 1)
        h = torch.einsum("bcijkl,ockl->boij", windows, weight) + bias.view(-1, 1, 1)
        h = h.clamp(min=0).unfold(2, 2, 2).unfold(3, 2, 2).amax((-2, -1))
        assert h.shape[1] == n
    torch.testing.assert_close(net.encoder(x), h.permute(0, 2, 3, 1).flatten(1))


def test_a_lenet_for_cifar_10_has_as_many_weights_as_known():
    """62,006 with 120 and 84 units behind the convolutions, as counted for that network."""
    net = make((3, 32, 32), NetSettings(kind="lenet", latent=120, hidden=84), classes=10)
    assert sum(v.numel() for v in trunk(net.state_dict()).values()) == 62_006


def test_a_lenets_width_is_a_factor_on_its_channels():
    assert channels(make((1, 16, 16), LENET)) == [3, 8]
    assert channels(make((3, 16, 16), NetSettings(kind="lenet", width=0.01))) == [1, 1]


def test_all_kinds_have_the_same_classifier():
    one = make((1, 16, 16)).state_dict()
    for settings in (MLP, LENET):
        other = make((1, 16, 16), settings).state_dict()
        for key in (k for k in one if k.startswith("classifier.")):
            assert torch.equal(one[key], other[key]), key


def test_sides_that_do_not_fit_name_the_kind_that_takes_them():
    with pytest.raises(ConfigError, match=r"or set net\.kind=mlp"):
        make((1, 7, 7))
