"""Networks: image -> latent code -> logits, with the decoder that FedDPMS adds."""

from feddpms.models.nets import GENERATIVE, NetSettings, Vae, build, split, trunk
from feddpms.models.vae import VaeSettings, vae_loss

__all__ = [
    "GENERATIVE",
    "NetSettings",
    "Vae",
    "VaeSettings",
    "build",
    "split",
    "trunk",
    "vae_loss",
]
