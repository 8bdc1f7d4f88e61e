"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): parquet files, or the original Python batches."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feddpms.data import parquet
from feddpms.data.files import first_line, place
from feddpms.data.shards import Choose, Parts, check_labels, shard
from feddpms.errors import DataError

SIDE = 32


@dataclass(frozen=True)
class Layout:
    """What the files of one of the two sets are called.

    Attributes:
        classes: number of classes.
        columns: names of the label column in parquet files, first choice first.
        folder: folder of the original batches.
        train: batch files of the training part.
        test: batch file of the test part.
        meta: file of the class names.
        label_key: key of the labels in a batch.
        names_key: key of the class names.
        hub: name on the Hugging Face hub.
    """

    classes: int
    columns: tuple[str, ...]
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    label_key: str
    names_key: str
    hub: str


LAYOUTS = {
    "cifar10": Layout(
        classes=10,
        columns=("label",),
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        meta="batches.meta",
        label_key="labels",
        names_key="label_names",
        hub="uoft-cs/cifar10",
    ),
    "cifar100": Layout(
        classes=100,
        columns=("fine_label", "label"),
        folder="cifar-100-python",
        train=("train",),
        test="test",
        meta="meta",
        label_key="fine_labels",
        names_key="fine_label_names",
        hub="uoft-cs/cifar100",
    ),
}


def accepts(name: str) -> str:
    """What may lie at `data.dir`, and how to get it."""
    layout = LAYOUTS[name]
    return (
        "a folder with train-*.parquet and test-*.parquet "
        f"(https://huggingface.co/datasets/{layout.hub}) or with {layout.folder} "
        "(https://www.cs.toronto.edu/~kriz/cifar.html, python version)"
    )


def found(name: str, given: str) -> bool:
    """Whether the folder holds the training part in one of the two layouts."""
    path = Path(given).expanduser()
    return bool(given) and (bool(_batches(path, name)) or bool(_parquet(path, name)))


def read(name: str, given: str, choose: Choose) -> Parts:
    """CIFAR-10 or CIFAR-100 (fine labels), 32x32, colour; a partial training part is accepted.

    Args:
        name: "cifar10" or "cifar100".
        given: folder of the files.
        choose: the training rows to keep.

    Returns:
        Training part, test part, class names.

    Raises:
        ConfigError: no folder was given.
        DataError: the files are missing, broken, or not this data set.
    """
    folder = place(name, given, accepts(name))
    batches = _batches(folder, name)
    if batches:
        return _read_batches(batches, LAYOUTS[name], choose)
    folders = _parquet(folder, name)
    if len(folders) != 1:
        got = "none" if not folders else ", ".join(str(path) for path in folders)
        raise DataError(
            f'data set "{name}": expected one folder of its files in {folder}, got {got}; '
            f"give {accepts(name)}"
        )
    return _read_parquet(folders[0], LAYOUTS[name], choose)


def _batches(folder: Path, name: str) -> Path | None:
    """The folder of the original batches, if it is here."""
    layout = LAYOUTS[name]
    for path in (folder / layout.folder, folder):
        if (path / layout.train[0]).is_file():
            return path
    return None


def _parquet(folder: Path, name: str) -> list[Path]:
    """The nearest folders with parquet files of a training part: here, or up to two levels down."""
    for pattern in ("", f"{name}/", "*/", "*/*/"):
        parents = {path.parent for path in folder.glob(f"{pattern}train-*.parquet")}
        if parents:
            return sorted(parents)
    return []


def _read_parquet(folder: Path, layout: Layout, choose: Choose) -> Parts:
    """Both parts from parquet files."""
    rest = (layout.columns, layout.classes, SIDE)
    x, y, names = parquet.read(parquet.files(folder, "train"), choose, *rest)
    x_test, y_test, test_names = parquet.read(parquet.files(folder, "test"), np.arange, *rest)
    if names != test_names:
        raise DataError(
            f"{folder}: expected the same class names in train and test, got different ones; "
            "keep the files of one data set in a folder"
        )
    return shard(x, y), shard(x_test, y_test), names


def _read_batches(folder: Path, layout: Layout, choose: Choose) -> Parts:
    """Both parts from the original batches."""
    parts = [_batch(folder / file, layout) for file in layout.train]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    x_test, y_test = _batch(folder / layout.test, layout)
    rows = choose(len(y))
    return shard(x[rows], y[rows]), shard(x_test, y_test), _names(folder / layout.meta, layout)


def _batch(path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The images [n, 32, 32, 3] and labels [n] of one batch file."""
    content = _unpickled(path)
    x = content.get("data")
    y = np.asarray(content.get(layout.label_key))
    width = 3 * SIDE * SIDE
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape[1:] != (width,):
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
        raise DataError(
            f"{path}: not a CIFAR batch: expected data as uint8 [n, {width}], got {got}; "
            "get it again"
        )
    if y.shape != (len(x),) or (len(y) and y.dtype.kind not in "iu"):
        raise DataError(
            f"{path}: not a CIFAR batch: expected {len(x)} integers in {layout.label_key}, got "
            f"{y.dtype} {list(y.shape)}; get it again"
        )
    y = y.astype(np.int64)
    check_labels(y, layout.classes, f"{path}, {layout.label_key}")
    return x.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1), y


def _names(path: Path, layout: Layout) -> tuple[str, ...]:
    """The class names."""
    names = _unpickled(path).get(layout.names_key)
    if not isinstance(names, list) or len(names) != layout.classes:
        got = len(names) if isinstance(names, list) else "none"
        raise DataError(
            f"{path}: expected {layout.classes} class names in {layout.names_key}, got {got}; "
            "get it again"
        )
    return tuple(_text(name) for name in names)


def _text(value: str | bytes) -> str:
    """Text that Python 2 or Python 3 pickled."""
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _unpickled(path: Path) -> dict[str, Any]:
    """The content of a batch file, without running what a pickle may ask for."""
    if not path.is_file():
        raise DataError(
            f"{path}: expected a CIFAR batch, got no such file; get the whole set again"
        )
    try:
        with path.open("rb") as file:
            content = _BatchUnpickler(file, encoding="latin1").load()
        return {_text(key): value for key, value in content.items()}
    except Exception as error:
        raise DataError(
            f"{path}: not a CIFAR batch: expected a pickled dictionary of arrays, got one that "
            f"does not load ({first_line(error)}); get it again from the source"
        ) from None


def _dtype(kind: str, *_: object) -> np.dtype[Any]:
    """The types of bytes and labels; a copy, since unpickling sets its state."""
    if kind not in ("u1", "i4", "i8"):
        raise pickle.UnpicklingError(f"arrays of type {kind}")
    return np.dtype(kind, False, True)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """How Python 3 writes bytes into an old pickle."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes encoded as {encoding}")
    return text.encode("latin1")


class _BatchUnpickler(pickle.Unpickler):
    """Knows what an array of numbers needs and nothing else, so a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The callable of this name, if an array needs it."""
        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): _dtype,
            ("_codecs", "encode"): _latin1,
        }
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return allowed[module, name]
