import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from feddpms.models import VaeSettings, vae_loss
from feddpms.models.vae import gaussian_kl
from feddpms.types import Batch
from small import blobs, small_net


def batch_of(n=7) -> Batch:
    shard = blobs(n, [0, 1, 2], 4)
    return Batch(shard.x, shard.y, None, torch.arange(n))


def stream(seed=5):
    return torch.Generator().manual_seed(seed)


def normals():
    g = stream()
    return lambda like: torch.randn(like.shape, generator=g, dtype=like.dtype)


@pytest.mark.parametrize(("centre", "scale"), [(0.5, 0.25), (0.0, 1.0), (-0.3, 2.0)])
def test_the_divergence_is_that_of_torch_distributions(centre, scale):
    g = stream(1)
    mean = torch.rand(8, 6, generator=g, dtype=torch.float64)
    log_variance = 4 * torch.rand(8, 6, generator=g, dtype=torch.float64) - 3
    got = gaussian_kl(mean, log_variance, VaeSettings(prior_mean=centre, prior_scale=scale))
    want = kl_divergence(
        Normal(mean, (log_variance / 2).exp()),
        Normal(torch.full_like(mean, centre), torch.full_like(mean, scale)),
    ).sum(1)
    torch.testing.assert_close(got, want)


def test_the_divergence_to_itself_is_zero():
    mean, log_variance = torch.full((2, 3), 0.4), torch.full((2, 3), 2 * math.log(0.3))
    got = gaussian_kl(mean, log_variance, VaeSettings(prior_mean=0.4, prior_scale=0.3))
    torch.testing.assert_close(got, torch.zeros(2), atol=1e-6, rtol=0)


def test_the_loss_is_the_sum_worked_out_by_hand():
    net, batch, weight, centre, scale = small_net().double().eval(), batch_of(), 0.3, 0.4, 0.6
    batch = Batch(batch.x.double(), batch.y, None, batch.index)
    settings = VaeSettings(weight=weight, prior_mean=centre, prior_scale=scale)
    got = vae_loss(settings, normals())(net, batch).item()
    with torch.no_grad():
        mean, log_variance = net.encode(batch.x)
        noise = torch.randn(mean.shape, generator=stream(), dtype=torch.float64)
        z = mean + (log_variance / 2).exp() * noise
        scores, rebuilt = net.classify(z).numpy(), net.decode(z).numpy()
    x, y, m, v = batch.x.numpy(), batch.y.numpy(), mean.numpy(), log_variance.exp().numpy()
    total = 0.0
    for i in range(len(y)):
        entropy = np.log(np.exp(scores[i]).sum()) - scores[i][y[i]]
        divergence = sum(
            math.log(scale / math.sqrt(v[i][j]))
            + (v[i][j] + (m[i][j] - centre) ** 2) / (2 * scale**2)
            - 0.5
            for j in range(6)
        )
        total += entropy + weight * (divergence + ((rebuilt[i] - x[i]) ** 2).sum())
    assert got == pytest.approx(total / len(y), rel=1e-10)


def test_weight_zero_leaves_the_cross_entropy_of_the_sampled_code():
    net, batch = small_net().eval(), batch_of()
    got = vae_loss(VaeSettings(weight=0), normals())(net, batch)
    mean, log_variance = net.encode(batch.x)
    z = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=stream())
    torch.testing.assert_close(got, F.cross_entropy(net.classify(z), batch.y))
    assert not torch.allclose(got, F.cross_entropy(net(batch.x), batch.y), atol=1e-5)


def test_each_step_draws_anew_and_the_same_stream_draws_the_same():
    net, batch = small_net().eval(), batch_of()
    loss, again = (vae_loss(VaeSettings(), normals()) for _ in range(2))
    first, second = loss(net, batch), loss(net, batch)
    assert not torch.equal(first, second)
    assert torch.equal(again(net, batch), first)


def test_every_part_of_the_network_gets_a_gradient():
    net = small_net().train()
    vae_loss(VaeSettings(), normals())(net, batch_of()).backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad.abs().sum() > 0, key
