"""feddpms' default network for 28x28 images of one channel, in plain torch; all sides train it."""

import math

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """Three convolutions that quarter the side length."""

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in [(1, 16, 2), (16, 32, 2), (32, 32, 1)]:
            layers.append(nn.Conv2d(before, after, 3, stride=stride, padding=1))
            layers += [nn.BatchNorm2d(after), nn.LeakyReLU(0.1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features [b, 1568] of images in [0, 1]: all channels of a pixel, then of the next."""
        return self.layers(2 * x - 1).movedim(1, -1).flatten(1)


class Classifier(nn.Module):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.1))
        self.head = nn.Linear(128, 10)

    def forward(self, z: Tensor) -> Tensor:
        """Logits [b, 10] of codes [b, 32]."""
        return self.head(self.body(z))


class Network(nn.Module):
    """Images [b, 1, 28, 28] in [0, 1] -> logits [b, 10]; entries are named as in feddpms."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.mean = nn.Linear(1568, 32)
        self.classifier = Classifier()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        code = self.mean(self.encoder(x)).sigmoid()
        return self.classifier((code - 0.5) * math.sqrt(12))


def network(weights: dict[str, Tensor]) -> Network:
    """A network with these weights, laid out as feddpms lays out its own."""
    net = Network()
    net.load_state_dict(weights)
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def parameters(net: nn.Module) -> int:
    """How many values are trained."""
    return sum(p.numel() for p in net.parameters())
