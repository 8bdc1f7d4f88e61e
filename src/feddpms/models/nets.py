"""The network that every method trains, and its seeded initial weights.

Encoder, latent mean and classifier are the *trunk*: what predicts. The log-variance head and the
decoder (names in GENERATIVE) are used by methods that generate; the others never touch them, so
a comparison never compares two architectures.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from feddpms.errors import ConfigError
from feddpms.models.classifier import Classifier
from feddpms.models.decoder import Decoder, DenseDecoder
from feddpms.models.encoder import DenseEncoder, Encoder, LeNetEncoder
from feddpms.rng import Rng
from feddpms.types import Task, Tree, settings

GENERATIVE = ("log_variance.", "decoder.")
LOG_VARIANCE = (-8.0, 2.0)
UNITS = 8
"""of a fully connected layer, for each channel of a convolutional net's first layer"""


@settings
class NetSettings:
    """Kind and size of the network."""

    kind: Literal["conv", "lenet", "mlp"] = "conv"
    """encoder of three convolutions; of LeNet-5's two, without normalisation, for sides from 16; or
    of two fully connected layers without normalisation, which takes images of any side"""
    width: Annotated[float, Gt(0), Le(64)] = 1.0
    """factor on the channels: 16, 32, 32 for one-channel images, twice that for colour; of lenet,
    6, 16 for any; of an mlp, on the units: 128, 128, and twice that"""
    latent: Annotated[int, Ge(0), Le(65536)] = 0
    """latent length; 0 takes 32 for one-channel images, 128 for colour"""
    hidden: Annotated[int, Ge(1), Le(65536)] = 128
    """units of the classifier's hidden layer"""
    norm: Literal["batch", "group"] = "batch"
    """normalisation layer of a conv net"""


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
        width = settings.width * (16 if channels == 1 else 32)
        self.latent = settings.latent or (32 if channels == 1 else 128)
        given = channels, (side[0], side[1])
        if settings.kind == "mlp":
            units = max(1, round(UNITS * width))
            self.encoder = DenseEncoder(*given, units)
            decoder = DenseDecoder(self.latent, *given, units)
        elif settings.kind == "lenet":
            _require_sides(*given[1], least=16)
            self.encoder = LeNetEncoder(*given, settings.width)
            decoder = Decoder(self.latent, *given, max(1, round(8 * settings.width)))
        else:
            _require_sides(*given[1], least=4)
            first = max(1, round(width))
            self.encoder = Encoder(*given, first, settings.norm)
            decoder = Decoder(self.latent, *given, first)
        self.mean = nn.Linear(self.encoder.size, self.latent)
        self.log_variance = nn.Linear(self.latent, self.latent)
        self.decoder = decoder
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
        shape: channels, height, width of an image; but for an mlp, sides divisible by 4.
        classes: number of classes of the data set.
        settings: size of the network.
        rng: where the streams for the initial weights are.

    Raises:
        ConfigError: a side is not divisible by 4 or too small, and the net is convolutional.
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


@dataclass(frozen=True)
class Plan:
    """How to build a network again, elsewhere or later, by a rule that knows only its weights.

    Attributes:
        shape: channels, height, width of an image.
        classes: number of classes of the data set.
        settings: size of the network.
    """

    shape: tuple[int, int, int]
    classes: int
    settings: NetSettings

    def build(self) -> Vae:
        """A network with some weights, to be overwritten."""
        return build(self.shape, self.classes, self.settings, Rng(0))


def rebuilt(task: Task, model: Tree) -> Any:
    """The network of a model, for a server rule, which has only trees.

    Args:
        task: how the network is built.
        model: weights and buffers, of one floating type; entries that it lacks are some numbers.

    Raises:
        ConfigError: the task does not say how, or says how to build another network.
    """
    net = task.network.build() if task.network else nn.Module()
    state = net.state_dict()
    if not all(k in state and state[k].shape == v.shape for k, v in model.items()):
        raise ConfigError(
            f"Task.network must build the network of the model, got {task.network}; give the plan "
            "of the network that clients train"
        )
    net.to(next(v.dtype for v in model.values() if v.is_floating_point()))
    net.load_state_dict(model, strict=False)
    return net


def trunk(tree: Tree) -> Tree:
    """The part of a tree that predicts: everything but the log-variance head and the decoder."""
    return {k: v for k, v in tree.items() if not k.startswith(GENERATIVE)}


def _require_sides(height: int, width: int, least: int) -> None:
    """Refuse what two strides of 2 cannot quarter, or is too small for the convolutions."""
    if height % 4 or width % 4 or min(height, width) < least:
        raise ConfigError(
            f"images must have sides divisible by 4, of {least} pixels or more, got "
            f"{height}x{width}; resize them, or set net.kind=mlp"
        )


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
