"""Networks: image -> latent code -> logits, with the decoder that FedDPMS adds."""

from feddpms.models.nets import GENERATIVE, NetSettings, Plan, Vae, build, rebuilt, split, trunk
from feddpms.models.vae import VaeSettings, vae_loss

__all__ = [
    "GENERATIVE",
    "NetSettings",
    "Plan",
    "Vae",
    "VaeSettings",
    "build",
    "rebuilt",
    "split",
    "trunk",
    "vae_loss",
]
