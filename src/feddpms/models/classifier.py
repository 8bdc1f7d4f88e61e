"""Latent code -> logits: linear layers with activations between them."""

from torch import Tensor, nn


class Classifier(nn.Module):
    """Latent codes [b, latent] -> logits [b, classes].

    `body` ends in the representation that MOON contrasts; `head` is the last linear layer.
    """

    def __init__(self, latent: int, hidden: int, classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(latent, hidden), nn.LeakyReLU(0.1))
        self.head = nn.Linear(hidden, classes)

    def forward(self, z: Tensor) -> Tensor:
        """Logits of latent codes."""
        return self.head(self.body(z))
