"""A conditional variational auto-encoder: each class has a prior of its own for the code.

z | c ~ N(m_c, I) with means m_c that are the same everywhere, q(z | x, c) = N(m_c + f(x), s(x)^2),
so that the class is in where a code lies. The decoder's linear layer turns a code into features,
and one transposed convolution draws them. It is but one, so that it draws features of classes that
it has never seen; a deeper decoder does not.
"""

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from feddpms.errors import ConfigError
from feddpms.models.encoder import Encoder
from feddpms.models.nets import LOG_VARIANCE, initialise
from feddpms.rng import Rng
from feddpms.types import Batch, Loss, Normals, Task, settings


@settings
class ConditionalSettings:
    """Size, priors and likelihood of the auto-encoder."""

    width: Annotated[int, Ge(1), Le(2048)] = 16
    """channels of its first convolution"""
    channels: Annotated[int, Ge(1), Le(2048)] = 16
    """features for every 2x2 pixels; so many numbers is what is sent of a class"""
    latent: Annotated[int, Ge(0), Le(65536)] = 0
    """latent length, at least one a class; 0 takes the network's, or the number of classes"""
    separation: Annotated[float, Gt(0)] = 12.0
    """distance between the prior means of two classes, in standard deviations of a prior"""
    pixel_scale: Annotated[float, Gt(0)] = 0.3
    """standard deviation of a pixel around its decoded value"""
    lr: Annotated[float, Gt(0)] = 0.01
    """learning rate of its training, which is by Adam, whatever the run's are"""

    def length(self, task: Task) -> int:
        """Latent length for a run.

        Raises:
            ConfigError: it is set, and there are more classes.
        """
        if self.latent and self.latent < task.classes:
            raise ConfigError(
                "method.auto_encoder.latent must be 0 or at least the number of classes "
                f"({task.classes}), got {self.latent}; raise it"
            )
        return self.latent or max(task.latent, task.classes)


class ConditionalVae(nn.Module):
    """The auto-encoder; its encoder says how far a code is from its class's prior mean.

    Attributes:
        means: the classes' prior means [classes, latent]; they are not trained.
    """

    means: Tensor

    def __init__(self, shape: tuple[int, int, int], latent: int, width: int, features: int):
        super().__init__()
        channels, *side = shape
        self.encoder = Encoder(channels, (side[0], side[1]), width, "group")
        self.head = nn.Linear(self.encoder.size, 2 * latent)
        self.side = (side[0] // 2, side[1] // 2, features)
        self.open = nn.Linear(latent, math.prod(self.side))
        self.draw = nn.ConvTranspose2d(features, channels, 4, stride=2, padding=1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean, less its class's prior mean, and log-variance of the code of images [b, latent]."""
        offset, log_variance = self.head(self.encoder(x)).chunk(2, dim=1)
        return offset, log_variance.clamp(*LOG_VARIANCE)

    def features(self, z: Tensor) -> Tensor:
        """What enters the transposed convolution [b, q], of codes [b, latent]."""
        return F.leaky_relu(self.open(z), 0.1)

    def decode(self, z: Tensor) -> Tensor:
        """Images [b, c, h, w] in [0, 1] of codes [b, latent]."""
        k = self.features(z).view(-1, *self.side).movedim(-1, 1)  # channels_last
        return self.draw(k).sigmoid()


def build_conditional(
    like: Tensor, task: Task, settings: ConditionalSettings, rng: Rng
) -> ConditionalVae:
    """An auto-encoder whose initial weights depend on the seed and each weight's name alone.

    Args:
        like: images [n, c, h, w] as it will see, of the type and on the device where it will work.
        task: classes, and the latent length of the network beside it.
        settings: size and priors.
        rng: where the streams for the initial weights are.

    Raises:
        ConfigError: the latent length is below the number of classes.
    """
    shape, latent = (like.shape[1], like.shape[2], like.shape[3]), settings.length(task)
    with torch.random.fork_rng(devices=[]):  # modules draw their first weights globally
        net = ConditionalVae(shape, latent, settings.width, settings.channels)
    initialise(net, rng)
    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    net.to(like.device, like.dtype)
    net.means = prior_means(task.classes, latent, settings.separation, like)
    return net


def prior_means(classes: int, latent: int, separation: float, like: Tensor) -> Tensor:
    """The classes' prior means [classes, latent]: one axis each, so that all are equally far apart.

    Args:
        classes: number of classes, at most `latent`.
        latent: latent length.
        separation: distance between any two means.
        like: a tensor of the type and on the device of the result.
    """
    axes = torch.eye(classes, latent, dtype=like.dtype, device=like.device)
    return separation / math.sqrt(2) * axes


def conditional_loss(pixel_scale: float, means: Tensor, eps: Normals) -> Loss:
    """Minus the evidence lower bound, without its constant.

    |f(x)|^2 / 2 + sum_j (s_j^2 - 1 - log s_j^2) / 2 is the divergence to the class's prior, and
    |decode(z) - x|^2 / (2 pixel_scale^2) with z = m_c + f(x) + s * eps the reconstruction error.

    Args:
        pixel_scale: standard deviation of a pixel around its decoded value.
        means: the classes' prior means [classes, latent].
        eps: the noise in z.

    Returns:
        The loss of a network with `encode` and `decode`: sums over coordinates and pixels, mean
        over the batch.
    """

    def loss(net: Any, batch: Batch) -> Tensor:
        offset, log_variance = net.encode(batch.x)
        z = means[batch.y] + offset + (log_variance / 2).exp() * eps(offset)
        divergence = (offset.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        rebuild = (net.decode(z) - batch.x).square().flatten(1).sum(1) / (2 * pixel_scale**2)
        return (divergence + rebuild).mean()

    return loss
