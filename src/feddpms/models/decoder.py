"""Latent code -> image: the encoder's mirror, by transposed convolutions."""

from torch import Tensor, nn

from feddpms.models.encoder import norm


class Decoder(nn.Module):
    """Latent codes [b, latent] -> images [b, c, h, w] in [0, 1]."""

    def __init__(self, latent: int, channels: int, side: tuple[int, int], width: int, kind: str):
        super().__init__()
        self.shape = (2 * width, side[0] // 4, side[1] // 4)
        self.open = nn.Linear(latent, self.shape[0] * self.shape[1] * self.shape[2])
        self.layers = nn.Sequential(
            norm(kind, 2 * width),
            nn.LeakyReLU(0.1),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            norm(kind, 2 * width),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            norm(kind, width),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images of latent codes."""
        return self.layers(self.open(z).view(-1, *self.shape))
