"""The data sets by name, and what every one of them becomes: two shards and the class names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt, MultipleOf

from feddpms.data import cifar, folder, hub, idx, npz
from feddpms.data.shards import Choose, Parts
from feddpms.errors import ConfigError, DataError, unknown
from feddpms.rng import Rng
from feddpms.types import Shard, settings

HUB = "hf:"


@dataclass(frozen=True)
class Dataset:
    """A loaded data set.

    Attributes:
        name: the name it was asked for by, and the part of training that stands for the test set.
        train: examples to be split over the clients.
        test: examples that every client's and the server's model is measured on: the test set, or
            training examples held out in its place.
        classes: class names, in the order of the labels; fixed by the data set, never by what a
            client holds or by the fraction that was taken.
    """

    name: str
    train: Shard
    test: Shard
    classes: tuple[str, ...]


@settings
class Data:
    """Which data set, and how much of it."""

    name: str = "digits"
    """Data set: digits, fmnist, cifar10, cifar100, npz, folder, or hf:NAME."""
    dir: str = ""
    """Folder or file of the data set; digits needs none."""
    fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    """Part of the training data to use, in (0, 1], chosen at random; the test set stays whole."""
    validation: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Part of what was taken, in [0, 1), that is held out and scored in place of the test set: for
    choosing settings without a look at it; 0 for the test set."""
    size: Annotated[int, Ge(4), MultipleOf(4)] = 32
    """Side length in pixels, a multiple of 4, that folder and hf:NAME resize images to."""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Attributes:
        description: what it is, in one line.
        where: where it is looked for, and how to get it.
        read: reads it, given the settings and a chooser of training rows.
        found: whether its files are there, given `data.dir`.
    """

    description: str
    where: str
    read: Callable[[Data, Choose], Parts]
    found: Callable[[str], bool]


DATASETS: dict[str, Source] = {
    "digits": Source(
        "handwritten digits, 1,438 + 359, 8x8 gray, 10 classes",
        "in the package",
        lambda _, choose: npz.digits(choose),
        lambda _: True,
    ),
    "fmnist": Source(
        "Fashion-MNIST, 60,000 + 10,000, 28x28 gray, 10 classes",
        f"data.dir, else {idx.SYSTEM}; {idx.ACCEPTS}",
        lambda data, choose: idx.read(data.dir, choose),
        idx.found,
    ),
    "cifar10": Source(
        "CIFAR-10, 50,000 + 10,000, 32x32 colour, 10 classes",
        f"data.dir: {cifar.accepts('cifar10')}",
        lambda data, choose: cifar.read("cifar10", data.dir, choose),
        lambda given: cifar.found("cifar10", given),
    ),
    "cifar100": Source(
        "CIFAR-100, 50,000 + 10,000, 32x32 colour, 100 classes; a part is enough",
        f"data.dir: {cifar.accepts('cifar100')}",
        lambda data, choose: cifar.read("cifar100", data.dir, choose),
        lambda given: cifar.found("cifar100", given),
    ),
    "npz": Source(
        "your own arrays in a .npz file, or MedMNIST's",
        f"data.dir: {npz.ACCEPTS}",
        lambda data, choose: npz.read(data.dir, choose),
        lambda given: Path(given).expanduser().is_file(),
    ),
    "folder": Source(
        "your own images in one folder for each class, resized to data.size",
        f"data.dir: {folder.ACCEPTS}",
        lambda data, choose: folder.read(data.dir, choose, data.size),
        lambda given: bool(given) and Path(given).expanduser().is_dir(),
    ),
    f"{HUB}NAME": Source(
        "an image set of the Hugging Face hub, or a local folder of its layout",
        'the package datasets (pip install "feddpms[hf]")',
        lambda data, choose: hub.read(data.name.removeprefix(HUB), choose, data.size),
        lambda _: hub.found(),
    ),
}
"""Every data set by the name that `data.name` takes."""


def load(data: Data, rng: Rng) -> Dataset:
    """Load a data set, and take the asked-for fraction of its training part.

    The rows taken depend on the seed, the fraction and the number of rows, on nothing else; they
    are a uniform sample, so class counts vary a little. They stay in their order.

    Args:
        data: which data set, and how much of it.
        rng: the run's random streams; "fraction" and "validation" are used.

    Returns:
        The data set, decoded.

    Raises:
        ConfigError: the name is unknown, or the settings lack what it needs.
        DataError: a file is missing, broken, or not what it claims to be.
    """

    def choose(n: int) -> np.ndarray:
        if data.fraction == 1:
            return np.arange(n)
        kept = max(math.floor(data.fraction * n + 0.5), 1)
        return np.sort(rng.numpy("fraction").choice(n, kept, replace=False))

    train, test, classes = _source(data).read(data, choose)
    for part, name in ((train, "training"), (test, "test")):
        if not len(part):
            raise DataError(
                f'data set "{data.name}": expected {name} examples, got none; get it again'
            )
    if not data.validation:
        return Dataset(data.name, train, test, classes)
    train, test = _held_out(train, data.validation, rng)
    return Dataset(f"{data.name}, validation {data.validation:g}", train, test, classes)


def training_rows(data: Data) -> int:
    """How many training examples a data set has where it lies, before a fraction is taken.

    Raises:
        FeddpmsError: as `load`.
    """
    counts = list[int]()

    def choose(n: int) -> np.ndarray:
        counts.append(n)
        return np.arange(min(n, 1))

    _source(data).read(data, choose)
    return counts[0]


def _source(data: Data) -> Source:
    """Where a data set comes from.

    Raises:
        ConfigError: the name is unknown, or `data.dir` is given to one that takes none.
    """
    key = f"{HUB}NAME" if data.name.startswith(HUB) else data.name
    if key not in DATASETS:
        raise ConfigError(_no_such(data.name))
    if data.dir and key in ("digits", f"{HUB}NAME"):
        raise ConfigError(
            f'data set "{data.name}": expected no data.dir (--data-dir), got {data.dir}; leave it '
            "out, or name the data set that lies there with --data"
        )
    return DATASETS[key]


def _no_such(name: str) -> str:
    """The line for an unknown data set, which may be a path that stands in the wrong place."""
    if Path(name).exists():
        return (
            f"expected the name of a data set, got the path {name}; give --data npz or folder, and "
            "the path as --data-dir (data.dir)"
        )
    return unknown("data set", name, DATASETS)


def _held_out(train: Shard, part: float, rng: Rng) -> tuple[Shard, Shard]:
    """Training examples without a uniform sample of them, and that sample, each in order."""
    count, n = math.floor(part * len(train) + 0.5), len(train)
    if not 0 < count < n:
        raise ConfigError(
            f"data.validation={part:g} must hold out some of {n} training examples and leave some, "
            f"got {count}; change it, or take a larger data.fraction"
        )
    held = torch.zeros(n, dtype=torch.bool)
    held[torch.from_numpy(rng.numpy("validation").choice(n, count, replace=False))] = True
    return Shard(train.x[~held], train.y[~held]), Shard(train.x[held], train.y[held])


def available(given: str = "") -> list[tuple[str, str, bool, str]]:
    """What the command's table of data sets shows.

    Args:
        given: a folder or file to look in, as `data.dir`.

    Returns:
        Name, one-line description, whether it was found, and where it is looked for, for each.
    """
    return [
        (name, source.description, source.found(given), source.where)
        for name, source in DATASETS.items()
    ]
