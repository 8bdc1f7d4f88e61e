"""Pictures of a run's data: images that methods made beside real ones, and the partition."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from feddpms import records
from feddpms.config import Run
from feddpms.data import Dataset, counts, load, split, table
from feddpms.errors import RunFolderError
from feddpms.models import rebuilt
from feddpms.models import split as split_model
from feddpms.report import plots
from feddpms.rng import Rng
from feddpms.types import Memory, Shard, Task, Tree

SHEET = 8
"""images of a class on the sheet"""


def show_partition(settings: Run, picture: Path) -> tuple[str, Path]:
    """The class histogram of each client as text, and as a picture in a new file.

    Args:
        settings: data and partition.
        picture: a path that ends in .svg or .png.

    Raises:
        FeddpmsError: the data or the partition is not as it should be, or the file exists.
    """
    if picture.suffix not in (".svg", ".png"):
        raise RunFolderError(f"expected a picture name that ends in .svg or .png, got {picture}")
    if picture.exists():
        raise RunFolderError(f"{picture} exists; choose another name for the picture")
    data = load(settings.data, Rng(settings.seed))
    labels = data.train.y.numpy()
    parts = split(labels, len(data.classes), settings.partition, Rng(settings.seed))
    held = counts(labels, parts, len(data.classes))
    svg = picture.suffix == ".svg"
    drawn = (plots.partition_svg if svg else plots.partition_png)(held.tolist(), data.classes)
    try:
        records.write_file(picture, drawn.encode() if isinstance(drawn, str) else drawn)
    except OSError as error:
        raise RunFolderError(
            f"expected a place for a picture, got {picture}: {error.strerror}; choose another"
        ) from None
    return table(held, data.classes), picture


def sheet(
    data: Dataset, memories: Mapping[int, Memory], task: Task, model: Tree
) -> dict[str, Tensor]:
    """Test images and synthetic images by class, as bytes; empty if no method made any.

    Of each client a few of a class, so that no more than one memory is looked at a time.

    Args:
        data: its test set is shown.
        memories: what the clients keep.
        task: how the network is built.
        model: the final global model; with a decoder, the test images are reconstructed, too.

    Returns:
        `real`, `synthetic` and, with a decoder, `reconstructed` uint8 [classes, SHEET, channels,
        height, width], and `synthetic_count` int64 [classes].
    """
    classes, pool = len(data.classes), list[Shard]()
    for client in sorted(memories):
        made = memories[client].synthetic
        if made is not None and len(made):
            pool.append(_few(made, classes, -(-10 * SHEET // len(memories))))
    if not pool:
        return {}
    real, _ = _rows(data.test, classes)
    again = {}
    if split_model(model)[1]:
        again = {"reconstructed": _rows(_again(data.test, classes, task, model), classes)[0]}
    every = Shard(torch.cat([s.x for s in pool]), torch.cat([s.y for s in pool]))
    synthetic, filled = _rows(every, classes)
    return {"real": real, **again, "synthetic": synthetic, "synthetic_count": filled}


def _again(shard: Shard, classes: int, task: Task, model: Tree) -> Shard:
    """A few examples of each class, as the model decodes their codes."""
    few, net = _few(shard, classes, SHEET), rebuilt(task, model).eval()
    with torch.no_grad():
        return Shard(net.decode(net.code(few.x)), few.y)


def _rows(shard: Shard, classes: int) -> tuple[Tensor, Tensor]:
    """Up to SHEET images of each class, evenly taken, and how many there are."""
    few = _few(shard, classes, SHEET)
    rows = torch.zeros(classes, SHEET, *shard.x.shape[1:], dtype=torch.uint8)
    filled = torch.bincount(few.y, minlength=classes)
    for c in range(classes):
        rows[c, : int(filled[c])] = (few.x[few.y == c] * 255).round().to(torch.uint8)
    return rows, filled


def _few(shard: Shard, classes: int, most: int) -> Shard:
    """Up to `most` examples of each class, evenly taken."""
    kept = []
    for c in range(classes):
        places = (shard.y == c).nonzero().flatten()
        kept.append(places[:: max(1, len(places) // most)][:most])
    chosen = torch.cat(kept)
    return Shard(shard.x[chosen], shard.y[chosen])
