"""The network that every method trains, and its seeded initial weights.

Encoder, latent mean and classifier are the *trunk*: what predicts. The log-variance head and the
decoder (names in GENERATIVE) are used by methods that generate; the others never touch them, so
a comparison never compares two architectures.
"""

import math
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from feddpms.errors import ConfigError
from feddpms.models.classifier import Classifier
from feddpms.models.decoder import Decoder
from feddpms.models.encoder import Encoder
from feddpms.rng import Rng
from feddpms.types import Tree, settings

GENERATIVE = ("log_variance.", "decoder.")
LOG_VARIANCE = (-8.0, 2.0)


@settings
class NetSettings:
    """Size of the network."""

    width: Annotated[float, Gt(0), Le(64)] = 1.0
    """factor on the channels: 16, 32, 32 for one-channel images, twice that for colour"""
    latent: Annotated[int, Ge(0), Le(65536)] = 0
    """latent length; 0 takes 32 for one-channel images, 128 for colour"""
    hidden: Annotated[int, Ge(1), Le(65536)] = 128
    """units of the classifier's hidden layer"""
    norm: Literal["batch", "group"] = "batch"
    """normalisation layer"""


class Vae(nn.Module):
    """A variational auto-encoder with a classifier on its latent code (paper, section 3.2).

    The latent mean is a sigmoid, so codes lie in [0, 1]^latent; the log-variance is read from what
    enters it, since a head on the features would be as large as all that predicts. Classifier and
    decoder see codes moved to mean 0 and variance 1 as if they were uniform: raw, they start near
    one point, and learning is slow.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, settings: NetSettings):
        super().__init__()
        channels, *side = shape
        if side[0] % 4 or side[1] % 4 or min(side) < 4:
            raise ConfigError(
                f"images must have sides divisible by 4, got {side[0]}x{side[1]}; resize them"
            )
        width = max(1, round(settings.width * (16 if channels == 1 else 32)))
        self.latent = settings.latent or (32 if channels == 1 else 128)
        self.encoder = Encoder(channels, (side[0], side[1]), width, settings.norm)
        self.mean = nn.Linear(self.encoder.size, self.latent)
        self.log_variance = nn.Linear(self.latent, self.latent)
        self.decoder = Decoder(self.latent, channels, (side[0], side[1]), width)
        self.classifier = Classifier(self.latent, settings.hidden, classes)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean in [0, 1] and log-variance of the code of images, each [b, latent]."""
        mean = self.mean(self.encoder(x))
        return mean.sigmoid(), self.log_variance(mean).clamp(*LOG_VARIANCE)

    def code(self, x: Tensor) -> Tensor:
        """Mean of the code of images [b, latent]."""
        return self.mean(self.encoder(x)).sigmoid()

    def decode(self, z: Tensor) -> Tensor:
        """Images [b, c, h, w] in [0, 1] of latent codes [b, latent]."""
        return self.decoder(_standard(z))

    def classify(self, z: Tensor) -> Tensor:
        """Logits [b, classes] of latent codes [b, latent]."""
        return self.classifier(_standard(z))

    def features(self, x: Tensor) -> Tensor:
        """What enters the last linear layer [b, hidden]."""
        return self.classifier.body(_standard(self.code(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [b, classes] of images."""
        return self.classify(self.code(x))


def build(shape: tuple[int, int, int], classes: int, settings: NetSettings, rng: Rng) -> Vae:
    """A network whose initial weights depend on the seed and each weight's name alone.

    Args:
        shape: channels, height, width of an image; sides divisible by 4.
        classes: number of classes of the data set.
        settings: size of the network.
        rng: where the streams for the initial weights are.

    Raises:
        ConfigError: a side is not divisible by 4.
    """
    with torch.random.fork_rng(devices=[]):  # modules draw their first weights globally
        net = Vae(shape, classes, settings)
    initialise(net, rng)
    nn.init.constant_(net.log_variance.bias, -3.0)  # start with a spread of 0.22 of the unit range
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def initialise(net: nn.Module, rng: Rng) -> None:
    """Give linear and convolution layers their first weights, each by its own name's stream."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            _initialise(module, rng.at(name))


def trunk(tree: Tree) -> Tree:
    """The part of a tree that predicts: everything but the log-variance head and the decoder."""
    return {k: v for k, v in tree.items() if not k.startswith(GENERATIVE)}


def _standard(z: Tensor) -> Tensor:
    """Codes in [0, 1] on the scale of a standard variable."""
    return (z - 0.5) * math.sqrt(12)


def split(tree: Tree) -> tuple[Tree, Tree]:
    """A tree without the decoder, and the decoder."""
    decoder = {k: v for k, v in tree.items() if k.startswith("decoder.")}
    return {k: v for k, v in tree.items() if k not in decoder}, decoder


def _initialise(module: nn.Linear | nn.Conv2d | nn.ConvTranspose2d, rng: Rng) -> None:
    """Uniform weights and biases within 1/sqrt(fan-in), torch's own rule, from named streams."""
    fan_in = module.weight[0].numel()
    if isinstance(module, nn.ConvTranspose2d):
        fan_in = module.weight.shape[0] * module.weight[0, 0].numel()
    bound = 1 / math.sqrt(fan_in)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.uniform_(-bound, bound, generator=rng.torch(name))
