"""The conditional auto-encoder: priors, loss, initial weights."""

import math

import numpy as np
import pytest
import torch

from feddpms.errors import ConfigError
from feddpms.models import ConditionalSettings, build_conditional, conditional_loss
from feddpms.models.conditional import prior_means
from feddpms.rng import Rng
from feddpms.types import Batch, Task

TASK = Task(classes=3, clients=3, rounds=5, latent=6)


def made(seed=0, like=None, **settings):
    like = torch.zeros(1, 1, 8, 8) if like is None else like
    return build_conditional(like, TASK, ConditionalSettings(**settings), Rng(seed))


def test_prior_means_are_equally_far_apart():
    means = prior_means(10, 12, 4.0, torch.zeros((), dtype=torch.float64))
    apart = torch.cdist(means, means)
    off = ~torch.eye(10, dtype=torch.bool)
    torch.testing.assert_close(apart[off], torch.full((90,), 4.0, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12)])
def test_shapes(shape):
    x = torch.rand(5, *shape)
    net = made(like=x, width=2, channels=3)
    offset, log_variance = net.encode(x)
    assert offset.shape == log_variance.shape == (5, 6)
    k = net.features(net.means)
    assert k.shape == (3, 3 * (shape[1] // 2) * (shape[2] // 2))
    images = net.decode(net.means)
    assert images.shape == (3, *shape)
    assert images.min() >= 0
    assert images.max() <= 1


def test_the_images_are_drawn_from_the_features():
    net = made()
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    k = net.features(z)
    drawn = net.draw(k.view(-1, 4, 4, 16).movedim(-1, 1)).sigmoid()
    torch.testing.assert_close(drawn, net.decode(z))


def test_initial_weights_are_a_matter_of_the_seed():
    state, again, other = (made(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(state[k], again[k]) for k in state)
    drawn = [k for k in state if not k.startswith("encoder.") or state[k].dim() == 4]
    assert not any(torch.equal(state[k], other[k]) for k in drawn)
    before = torch.random.get_rng_state()
    made()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_works_in_the_images_type():
    net = made(like=torch.zeros(1, 1, 8, 8, dtype=torch.float64))
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert net.means.dtype == torch.float64


@pytest.mark.parametrize(
    ("latent", "of_network", "length"), [(0, 6, 6), (0, 2, 3), (3, 6, 3), (9, 6, 9)]
)
def test_the_latent_length_has_room_for_the_classes(latent, of_network, length):
    task = Task(classes=3, clients=1, rounds=5, latent=of_network)
    assert ConditionalSettings(latent=latent).length(task) == length


def test_too_short_a_code_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"at least the number of classes \(3\), got 2") as told:
        ConditionalSettings(latent=2).length(TASK)
    assert "\n" not in str(told.value)


def test_the_loss_is_minus_the_evidence_lower_bound():
    """-log p(x|z) - log p(z|c) + log q(z|x,c), in expectation; the divergence against densities."""
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, scale = torch.tensor([0, 2, 1, 0]), 0.3
    net = made(like=x, width=2)
    eps = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = conditional_loss(scale, net.means, lambda like: eps)(net, Batch(x, y, None, y))
    with torch.no_grad():
        offset, log_variance = net.encode(x)
        q = torch.distributions.Normal(net.means[y] + offset, (log_variance / 2).exp())
        z = q.loc + q.scale * eps
        seen = torch.distributions.Normal(net.decode(z), scale).log_prob(x).flatten(1).sum(1)
        seen += 64 * math.log(scale * math.sqrt(2 * math.pi))  # without its constant
        prior = torch.distributions.Normal(net.means[y], torch.ones_like(q.loc))
        kl = torch.distributions.kl_divergence(q, prior).sum(1)
    torch.testing.assert_close(got.detach(), (kl - seen).mean())
    assert np.isfinite(float(got.detach()))
