"""From arrays to shards: what every data set has in common once its files are read."""

from collections.abc import Callable

import numpy as np
import torch

from feddpms.errors import DataError
from feddpms.rng import Rng
from feddpms.types import Shard

Choose = Callable[[int], np.ndarray]
"""Given the number of training examples, the rows to keep, ascending."""

Parts = tuple[Shard, Shard, tuple[str, ...]]
"""What a source gives: training part, test part, class names."""


def shard(x: np.ndarray, y: np.ndarray, top: float = 255.0) -> Shard:
    """Images and labels as tensors.

    Args:
        x: images [n, height, width] or [n, height, width, channels]; uint8 in 0..top, or
            floats in [0, 1].
        y: labels [n] in 0..classes-1, of any integer type.
        top: the value of a fully bright uint8 pixel.

    Returns:
        A shard: x float32 [n, channels, height, width] in [0, 1], y int64 [n].
    """
    images = torch.from_numpy(np.ascontiguousarray(x))
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    pixels = images.contiguous().to(torch.float32)
    if x.dtype == np.uint8:
        pixels.div_(top)
    return Shard(pixels, torch.from_numpy(y.astype(np.int64)))


def check_labels(y: np.ndarray, classes: int, where: str) -> None:
    """Refuse labels that are no class.

    Args:
        y: labels [n], of any integer type.
        classes: number of classes.
        where: what the line names: the file, and its column or array.

    Raises:
        DataError: a label is below 0 or above classes-1.
    """
    wrong = np.flatnonzero((y < 0) | (y >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels 0..{classes - 1}, got {y[wrong[0]]} in row {wrong[0]} "
            f"({len(wrong)} such rows); number the classes from 0 and leave unlabelled rows out"
        )


def held_out(y: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The fixed split of a data set that comes without a test part.

    One fifth of every class, rounded (at least 1 of a class that has 2), is the test part. The
    split depends on the labels only: it is the same for every seed, so results can be compared.

    Args:
        y: labels [n].
        where: what an error names: the file or folder.

    Returns:
        Rows of the training part and rows of the test part, each ascending.

    Raises:
        DataError: no class has two examples, so nothing can be held out.
    """
    rng = Rng(0).at("held out")
    test = [np.empty(0, np.int64)]
    for label in np.unique(y):
        rows = rng.numpy(int(label)).permutation(np.flatnonzero(y == label))
        test.append(rows[: max(round(len(rows) / 5), 1)] if len(rows) > 1 else rows[:0])
    chosen = np.sort(np.concatenate(test))
    if not len(chosen):
        raise DataError(
            f"{where}: expected 2 examples of some class, to hold one out as test, got {len(y)} "
            "in all; add examples or a test part"
        )
    return np.setdiff1d(np.arange(len(y)), chosen), chosen
