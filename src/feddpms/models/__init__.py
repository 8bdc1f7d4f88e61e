"""Networks: image -> latent code -> logits, with the decoder that FedDPMS adds."""

from feddpms.models.conditional import (
    ConditionalSettings,
    ConditionalVae,
    build_conditional,
    conditional_loss,
)
from feddpms.models.nets import GENERATIVE, NetSettings, Vae, build, split, trunk
from feddpms.models.vae import VaeSettings, vae_loss

__all__ = [
    "GENERATIVE",
    "ConditionalSettings",
    "ConditionalVae",
    "NetSettings",
    "Vae",
    "VaeSettings",
    "build",
    "build_conditional",
    "conditional_loss",
    "split",
    "trunk",
    "vae_loss",
]
