"""What steers local training: drift + pull (y - centre), added to the gradient at weights y.

FedProx, SCAFFOLD, FedDyn and FedDC are this and a rule for what is kept. Adam rescales a gradient
number by number, and a correction in it loses its meaning. A decoupled correction is a step of its
own after Adam's, y <- y - lr (drift + pull (y - centre)), as AdamW's decay is (Loshchilov, Hutter,
ICLR 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from feddpms.algorithms.flat import Flat
from feddpms.algorithms.method import method_name
from feddpms.algorithms.training import Training
from feddpms.algorithms.trees import trained
from feddpms.errors import ConfigError
from feddpms.models import split
from feddpms.types import Tree

WithAdam = Literal["refuse", "decoupled"]
"""What a method that is defined for SGD does if clients train with Adam."""


@dataclass(frozen=True)
class Correction:
    """A drift, and a pull towards a point.

    Attributes:
        drift: by parameter; those that are not named have none.
        centre: by parameter; those that are not named are not pulled. Buffers count for nothing.
        pull: how strongly.
        decoupled: it is a step of its own after the optimiser's.
    """

    drift: Tree = field(default_factory=dict)
    centre: Tree = field(default_factory=dict)
    pull: float = 0.0
    decoupled: bool = False

    def over(self, flat: Flat) -> Callable[[], Tensor]:
        """What gives the correction [n] at the weights as they are when it is called."""
        drift = flat.like({k: v for k, v in self.drift.items() if k in flat.named})
        centre = {k: v for k, v in self.centre.items() if k in flat.named}
        pull = flat.like({k: torch.full_like(v, self.pull) for k, v in centre.items()})
        point = flat.like(centre)
        return lambda: drift + pull * (flat.vector.detach() - point)


def steered(tree: Tree) -> Tree:
    """What a correction acts on: trained entries but the decoder, which stays with a client."""
    return split(trained(tree))[0]


def effective_steps(local: Training, steps: int) -> float:
    """How far equal gradients of size 1 move the weights, in learning rates (FedNova's ||a||_1).

    SGD: the number of steps K. With momentum r: (K - r (1 - r^K) / (1 - r)) / (1 - r). Adam, whose
    steps have a length of their own: K.
    """
    r = local.momentum if local.optimizer == "sgd" else 0.0
    return (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)


def require_optimizer(method: Any, local: Training) -> None:
    """Refuse Adam under a method that is defined for SGD, unless its settings say what to do.

    Raises:
        ConfigError: names the choices.
    """
    inner, path = method, ""
    while hasattr(inner, "inner"):
        inner, path = inner.inner, f"{path}.inner"
    if local.optimizer == "adam" and getattr(inner, "with_adam", "decoupled") == "refuse":
        raise ConfigError(
            f"{method_name(inner)} is defined for SGD, got local.optimizer=adam; set "
            "local.optimizer=sgd (and local.lr for it, such as 0.01), or "
            f"method{path}.with_adam=decoupled, which corrects after Adam's step (in a comparison: "
            f"{method_name(method)}{path}.with_adam=decoupled)"
        )
