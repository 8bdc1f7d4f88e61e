"""The preliminary loss of FedDPMS (paper, section 3.2)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from feddpms.types import Batch, Loss, Normals, settings


@settings
class VaeSettings:
    """Weight and prior of the auto-encoder's part of the preliminary loss."""

    weight: Annotated[float, Ge(0)] = 0.005
    """lambda: weight of divergence and reconstruction error against the cross entropy"""
    prior_mean: float = 0.5
    """centre of the prior of each coordinate of the latent code"""
    prior_scale: Annotated[float, Gt(0)] = 0.25
    """standard deviation of the prior of each coordinate of the latent code"""


def vae_loss(vae: VaeSettings, eps: Normals) -> Loss:
    """Cross entropy + lambda * (KL divergence to the prior + squared reconstruction error).

    With q(z|x) = N(mean(x), var(x)) and the prior p(z) = N(m0, s0^2), both diagonal,
    KL = sum_j [ log(s0/s_j) + (s_j^2 + (m_j - m0)^2) / (2 s0^2) - 1/2 ].

    Args:
        vae: lambda, m0 and s0.
        eps: the noise in z = mean + s * eps.

    Returns:
        The loss of a network with `encode`, `decode` and `classify`: sums over coordinates and
        pixels, mean over the batch.
    """

    def loss(net, batch: Batch) -> Tensor:
        mean, log_variance = net.encode(batch.x)
        z = mean + (log_variance / 2).exp() * eps(mean)
        classify = F.cross_entropy(net.classify(z), batch.y)
        divergence = gaussian_kl(mean, log_variance, vae).mean()
        rebuild = (net.decode(z) - batch.x).square().flatten(1).sum(1).mean()
        return classify + vae.weight * (divergence + rebuild)

    return loss


def gaussian_kl(mean: Tensor, log_variance: Tensor, vae: VaeSettings) -> Tensor:
    """KL divergence in nats of N(mean, var) to the prior, one an example [b]."""
    prior = torch.as_tensor(vae.prior_scale, dtype=mean.dtype)
    ratio = (log_variance.exp() + (mean - vae.prior_mean).square()) / prior.square()
    return 0.5 * (ratio - 1 - log_variance + 2 * prior.log()).sum(1)
