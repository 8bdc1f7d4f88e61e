"""What a run starts from, once all that can be checked before training is checked."""

from dataclasses import dataclass
from importlib.metadata import version

import torch

from feddpms import config
from feddpms.algorithms import FedDPMS
from feddpms.algorithms.correction import require_optimizer
from feddpms.algorithms.precision import require_precision
from feddpms.algorithms.private import require_private_training
from feddpms.config import Run
from feddpms.data import Dataset, counts, describe, levels, split
from feddpms.engine.loop import visible
from feddpms.errors import ConfigError
from feddpms.models import Plan, build, trunk
from feddpms.privacy import calibrate, source
from feddpms.records import PartitionRecord, RunRecord
from feddpms.rng import Rng
from feddpms.synthesis import Drawing
from feddpms.types import Shard, Task


@dataclass(frozen=True)
class Prepared:
    """What a run starts from."""

    shards: list[Shard]
    task: Task
    net: torch.nn.Module
    first: tuple[RunRecord | PartitionRecord, ...]


def prepare(settings: Run, data: Dataset, train: bool = True) -> Prepared:
    """Split the data, build the network, and check all that can be checked before training.

    Args:
        settings: what is run.
        data: on which data.
        train: check what is released as well; an audit draws no noise and needs no library for it.

    Raises:
        ConfigError: settings do not fit the data or one another.
    """
    rng, part = Rng(settings.seed), settings.partition
    labels = data.train.y.numpy()
    parts = split(labels, len(data.classes), part, rng)
    shards = [Shard(data.train.x[i], data.train.y[i]) for i in map(torch.from_numpy, parts)]
    net = build(_shape(data), len(data.classes), settings.net, rng.at("initial weights"))
    plan = Plan(_shape(data), len(data.classes), settings.net)
    task = Task(len(data.classes), len(shards), settings.rounds, net.latent, plan)
    require_optimizer(settings.method, settings.local)
    # Complains about settings that do not fit the run.
    settings.method.start(visible(settings.method, net.state_dict()), task)
    private, engine = settings.privacy.training.kind != "none", settings.engine
    require_precision(settings.local, engine.device, private, engine.clients_at_once > 1)
    if train:
        _check_privacy(settings)
    first = RunRecord(
        version=version("feddpms"),
        method=config.method_name(settings.method),
        data=data.name,
        seed=settings.seed,
        clients=len(shards),
        rounds=settings.rounds,
        classes=data.classes,
        parameters=sum(v.numel() for v in trunk(dict(net.named_parameters())).values()),
        train_examples=sum(map(len, shards)),
        test_examples=len(data.test),
        partition=describe(part),
    )
    if settings.privacy.noise == "secure":  # clients that could be real: nobody knows their split
        return Prepared(shards, task, net, (first,))
    held = levels(counts(labels, parts, len(data.classes))).tolist()
    return Prepared(shards, task, net, (first, PartitionRecord(levels=tuple(map(tuple, held)))))


def _check_privacy(settings: Run) -> None:
    """Check that what is released, and how, fits together and its target."""
    method, privacy, training = settings.method, settings.privacy, settings.privacy.training
    norm = settings.net.norm if settings.net.kind == "conv" else "none"
    require_private_training(method, privacy, norm, settings.local)
    drawing = method.synthesis if isinstance(method, FedDPMS) else Drawing()
    if drawing.spread == "released" and privacy.release != "class_sum":
        raise ConfigError(
            'method.synthesis.spread="released" needs privacy.release=class_sum, got '
            f"{privacy.release}; choose one of them"
        )
    if privacy.max_epsilon and method.about.scope != "local":
        _check_budget(settings)
    calibrate(privacy, settings.rounds * settings.local.epochs * training.steps_per_epoch)
    source(privacy.noise, Rng(0).numpy())  # complains if its library is missing


def _check_budget(settings: Run) -> None:
    """Refuse a budget that the first reply would break."""
    privacy, method = settings.privacy, settings.method
    lacking = {
        "privacy.training.kind=dpsgd": privacy.training.kind != "none",
        "privacy.tuned_on=public": privacy.tuned_on == "public",
        "privacy.release other than paper": privacy.release != "paper",
        "a method other than central": method.about.scope != "pooled",
    }
    if not all(lacking.values()):
        needs = " and ".join(name for name, met in lacking.items() if not met)
        raise ConfigError(
            f"privacy.max_epsilon={privacy.max_epsilon:g} needs {needs}: no budget covers what is "
            "in the clear; set it, or lift the budget"
        )


def _shape(data: Dataset) -> tuple[int, int, int]:
    """Channels, height, width of an image."""
    channels, height, width = data.train.x.shape[1:]
    return channels, height, width
