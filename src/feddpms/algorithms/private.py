"""Private training: each step's gradient is a noisy sum of clipped per-example gradients.

DP-SGD (Abadi et al., CCS 2016, algorithm 1) with the optimiser of the run, so DP-Adam with Adam:
what an optimiser does with a noisy gradient is post-processing.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from feddpms.algorithms.batches import poisson
from feddpms.algorithms.flat import Flat
from feddpms.algorithms.method import Client, Method
from feddpms.algorithms.training import Training
from feddpms.errors import ConfigError
from feddpms.privacy import UPDATES, Privacy, calibrate
from feddpms.privacy.dpsgd import ClippedGradients, require_opacus
from feddpms.privacy.mechanism import GradientSum, event, gaussian
from feddpms.types import Event, Loss


def require_private_training(method: Method, privacy: Privacy, norm: str, local: Training) -> None:
    """Refuse private training where it would not be private.

    Args:
        method: what is run.
        privacy: whether training is private, and what else is sent.
        norm: the network's normalisation layer, "none" without one.
        local: how clients train.

    Raises:
        ConfigError: Opacus is missing; or says all that has to be set.
    """
    if privacy.training.kind == "none":
        return
    require_opacus()
    name = type(method).__name__.lower()
    if not method.about.per_example:
        raise ConfigError(
            f"{name} cannot train privately: its loss, or what it shares, is not a sum over "
            "examples; choose another method, or privacy.training.kind=none"
        )
    lacking = []
    if norm == "batch":
        lacking.append("net.norm=group (batch normalisation mixes examples)")
    if privacy.weights == "exact":
        lacking.append("privacy.weights=noisy (exact numbers of examples are in the clear)")
    if local.epochs_range:
        lacking.append("local.epochs_range=[] (how many noisy steps a client takes is public)")
    if lacking:
        needs = " and ".join(lacking)
        raise ConfigError(f"privacy.training.kind={privacy.training.kind} needs {needs}")


def training_event(me: Client) -> Event:
    """What a round of private training costs: the steps of one round, at the run's multiplier."""
    training, noise = me.privacy.training, me.noise("training")
    statistic = GradientSum(training.l2_clip, me.privacy.adjacency)
    steps = me.local.epochs * training.steps_per_epoch
    multiplier = _multiplier(me, steps)
    return event(UPDATES, statistic, multiplier, noise, steps, training.sample_rate)


def noisy_gradients(me: Client, loss: Loss):
    """Noisy gradients: what sets `grad` before each step, and yields the step's loss.

    Synthetic examples come from other clients' releases, so they need no noise; they are clipped
    as own ones are, so that neither drowns the other, and weigh what their shard says.

    Guarantee: of own examples, a step uses one `gaussian` of a Poisson sample's `GradientSum`; its
    divisor is public.
    """

    def steps(net: Any, flat: Flat) -> Iterator[Tensor]:
        training, noise = me.privacy.training, me.noise("training")
        statistic = GradientSum(training.l2_clip, me.privacy.adjacency)
        multiplier = _multiplier(me, me.local.epochs * training.steps_per_epoch)
        weight = me.synthetic.weight if me.synthetic else 0.0
        with ClippedGradients(net, training.l2_clip, flat.named) as clipped:
            for own, extra in poisson(me):
                total, value = clipped.sum(loss, own)
                summed = gaussian(_joined(total), statistic, multiplier, noise)
                if len(extra.y):
                    summed = summed + weight * _joined(clipped.sum(loss, extra)[0])
                flat.set(summed / (training.expected_batch_size + weight * len(extra.y)))
                yield torch.tensor(value)

    return steps


def _multiplier(me: Client, steps: int) -> float:
    """Noise multiplier of a step, from the target for all rounds."""
    multiplier = calibrate(me.privacy, me.task.rounds * steps).training
    assert multiplier is not None
    return multiplier


def _joined(tree: dict[str, Tensor]) -> Tensor:
    """All entries as one vector, in order, each row by row."""
    return torch.cat([value.flatten() for value in tree.values()])
