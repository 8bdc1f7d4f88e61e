"""Image data sets of the Hugging Face hub, through the optional package `datasets`."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from feddpms.data.files import first_line
from feddpms.data.images import Blob, common_mode, resized
from feddpms.data.shards import Choose, Parts, check_labels, held_out, shard
from feddpms.errors import ConfigError, DataError

LABELS = ("label", "fine_label")
TESTS = ("test", "validation", "valid")


def found() -> bool:
    """Whether the package `datasets` is installed."""
    return find_spec("datasets") is not None


def read(name: str, choose: Choose, size: int) -> Parts:
    """A data set with an image column and a class label column.

    The columns are found by their type; of several class labels, "label" or "fine_label" is taken.
    The test part is "test", else "validation"; without either, one fifth of every class of "train"
    is held out, the same for every seed. Images are resized to squares, grayscale if every one is.

    Args:
        name: a name on the hub, such as "ylecun/mnist", or a local folder.
        choose: the training rows to keep; only these and the test part are decoded.
        size: side length in pixels.

    Returns:
        Training part, test part, class names.

    Raises:
        ConfigError: no name was given, or the package `datasets` is not installed.
        DataError: it cannot be had, or has no image column, class label column or training part.
    """
    parts = _loaded(name)
    train = parts["train"]
    image, label = _columns(name, train)
    classes = tuple(train.features[label].names)
    y = _labels(name, train, label, len(classes))
    other = next((part for part in TESTS if part in parts), None)
    if other is None:
        rows, rows_test = held_out(y, f"hf:{name}")
        test, y_test = train, y
    else:
        test = parts[other]
        y_test = _labels(name, test, label, len(classes))
        rows, rows_test = np.arange(len(y)), np.arange(len(y_test))
    train, test = _encoded(train, image), _encoded(test, image)
    mode = common_mode(
        chain(_blobs(name, train, image, rows), _blobs(name, test, image, rows_test))
    )
    rows = rows[choose(len(rows))]
    x = resized(_blobs(name, train, image, rows), size, mode)
    x_test = resized(_blobs(name, test, image, rows_test), size, mode)
    return shard(x, y[rows]), shard(x_test, y_test[rows_test]), classes


def _loaded(name: str) -> Any:
    """The parts of the data set by name; it has a training part."""
    if not name:
        raise ConfigError(
            'data.name: expected "hf:NAME", got no NAME; give one such as hf:ylecun/mnist'
        )
    if not found():
        raise ConfigError(
            f'data set "hf:{name}": expected the package datasets, got none installed; '
            'run pip install "feddpms[hf]"'
        )
    import datasets

    local = Path(name).expanduser()
    try:
        parts: Any = datasets.load_dataset(str(local) if local.is_dir() else name)
    except Exception as error:
        raise DataError(
            f'data set "hf:{name}": expected a data set of the hub or a local folder, got '
            f"{type(error).__name__}: {first_line(error)}; check the name and the connection"
        ) from None
    if "train" not in parts:
        raise DataError(
            f'data set "hf:{name}": expected a part "train", got {", ".join(parts)}; '
            "choose a data set with one"
        )
    return parts


def _columns(name: str, part: Any) -> tuple[str, str]:
    """The names of the image and of the label column."""
    import datasets

    kinds = {column: type(feature) for column, feature in part.features.items()}
    images = [column for column, kind in kinds.items() if kind is datasets.Image]
    labels = [column for column, kind in kinds.items() if kind is datasets.ClassLabel]
    preferred = [column for column in LABELS if column in labels] if len(labels) > 1 else labels
    if len(images) != 1 or not preferred:
        got = ", ".join(f"{column}: {kind.__name__}" for column, kind in kinds.items())
        raise DataError(
            f'data set "hf:{name}": expected one Image column and a ClassLabel column (of several, '
            f"one called {' or '.join(LABELS)}), got {got}; choose another data set"
        )
    return images[0], preferred[0]


def _labels(name: str, part: Any, label: str, classes: int) -> np.ndarray:
    """The labels of a part, checked."""
    values = part.with_format(None)[label][:]
    y = np.array([-1 if value is None else value for value in values], np.int64)
    check_labels(y, classes, f'data set "hf:{name}", column {label}')
    return y


def _encoded(part: Any, image: str) -> Any:
    """The part with images left as files."""
    import datasets

    return part.cast_column(image, datasets.Image(decode=False))


def _blobs(name: str, part: Any, image: str, rows: np.ndarray) -> Iterator[Blob]:
    """The encoded images of these rows, one at a time."""
    for row in rows.tolist():
        stored = part[row][image] or {}
        blob, path = stored.get("bytes"), stored.get("path")
        if blob is None and path and Path(path).is_file():
            blob = Path(path).read_bytes()
        yield f'data set "hf:{name}", column {image}, row {row}', blob
