"""Latent code -> image: the encoder's mirror, by transposed convolutions or linear layers."""

from torch import Tensor, nn


class Decoder(nn.Module):
    """Latent codes [b, latent] -> images [b, c, h, w] in [0, 1].

    It has no normalisation layer: clients see other classes, so statistics of theirs, averaged, fit
    none of them; without it, decoding is as good and takes less time.
    """

    def __init__(self, latent: int, channels: int, side: tuple[int, int], width: int):
        super().__init__()
        self.shape = (side[0] // 4, side[1] // 4, 2 * width)
        self.open = nn.Linear(latent, self.shape[0] * self.shape[1] * self.shape[2])
        self.layers = nn.Sequential(
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images of latent codes."""
        return self.layers(self.open(z).view(-1, *self.shape).movedim(-1, 1))  # channels_last


class DenseDecoder(nn.Module):
    """Latent codes [b, latent] -> images [b, c, h, w] in [0, 1], of any side."""

    def __init__(self, latent: int, channels: int, side: tuple[int, int], units: int):
        super().__init__()
        self.shape = (channels, *side)
        self.open = nn.Linear(latent, units)
        self.layers = nn.Sequential(
            nn.LeakyReLU(0.1), nn.Linear(units, channels * side[0] * side[1]), nn.Sigmoid()
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images of latent codes."""
        return self.layers(self.open(z)).unflatten(1, self.shape)
