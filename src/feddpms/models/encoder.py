"""Image -> features: convolutions that quarter the side length, LeNet's, or linear layers."""

from itertools import pairwise

from torch import Tensor, nn


def norm(kind: str, channels: int) -> nn.Module:
    """The normalisation layer of a setting: `batch`, or `group` with up to 8 groups of several."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = next(g for g in (8, 4, 2, 1) if channels % (2 * g) == 0 or g == 1)
    return nn.GroupNorm(groups, channels)


class Encoder(nn.Module):
    """Images [b, c, h, w] in [0, 1] -> features [b, size].

    The first layer moves the input to [-1, 1], so that real and synthetic images share one range.
    """

    def __init__(self, channels: int, side: tuple[int, int], width: int, kind: str):
        super().__init__()
        self.size = 2 * width * (side[0] // 4) * (side[1] // 4)
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate([(channels, width), (width, 2 * width), (2 * width, 2 * width)]):
            layers += [
                nn.Conv2d(a, b, 3, stride=2 if i < 2 else 1, padding=1),
                norm(kind, b),
                nn.LeakyReLU(0.1),
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images: all channels of a pixel, then those of the next."""
        return self.layers(2 * x - 1).movedim(1, -1).flatten(1)  # channels_last as it lies


class LeNetEncoder(nn.Module):
    """Images [b, c, h, w] in [0, 1], of sides from 16 -> features [b, size], without normalisation.

    The two convolutions of LeNet-5 (LeCun et al., 1998), each with its largest of 2x2 pixels, as
    the simple network of federated comparisons has them (Li et al., ICDE 2022).
    """

    def __init__(self, channels: int, side: tuple[int, int], width: float):
        super().__init__()
        first, second = (max(1, round(n * width)) for n in (6, 16))
        layers: list[nn.Module] = []
        for a, b in pairwise([channels, first, second]):
            layers += [nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2)]
        self.size = second * ((side[0] - 12) // 4) * ((side[1] - 12) // 4)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images: all channels of a pixel, then those of the next."""
        return self.layers(2 * x - 1).movedim(1, -1).flatten(1)


class DenseEncoder(nn.Module):
    """Images [b, c, h, w] in [0, 1], of any side -> features [b, size], without normalisation."""

    def __init__(self, channels: int, side: tuple[int, int], units: int):
        super().__init__()
        self.size = units
        layers: list[nn.Module] = []
        for a, b in pairwise([channels * side[0] * side[1], units, units]):
            layers += [nn.Linear(a, b), nn.LeakyReLU(0.1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        return self.layers((2 * x - 1).flatten(1))
