"""Networks: image -> latent code -> logits, with the decoder that FedDPMS adds."""

from feddpms.models.conditional import (
    ConditionalSettings,
    ConditionalVae,
    build_conditional,
    conditional_loss,
)
from feddpms.models.nets import GENERATIVE, NetSettings, Plan, Vae, build, rebuilt, split, trunk
from feddpms.models.vae import VaeSettings, vae_loss

__all__ = [
    "GENERATIVE",
    "ConditionalSettings",
    "ConditionalVae",
    "NetSettings",
    "Plan",
    "Vae",
    "VaeSettings",
    "build",
    "build_conditional",
    "conditional_loss",
    "rebuilt",
    "split",
    "trunk",
    "vae_loss",
]
