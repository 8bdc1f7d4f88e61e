"""Data sets in NumPy's .npz files: the digits that come with the package, and the user's own."""

import zipfile
import zlib
from importlib import resources
from pathlib import Path

import numpy as np

from feddpms.data.files import first_line, place
from feddpms.data.shards import Choose, Parts, check_labels, held_out, shard
from feddpms.errors import DataError

ACCEPTS = (
    "a .npz file with arrays x, y and optionally x_test, y_test, or MedMNIST's train_images, "
    "train_labels, test_images, test_labels"
)
LAYOUTS = (
    ("x", "y", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
DIGITS_TOP = 16


def digits(choose: Choose) -> Parts:
    """Handwritten digits: 1,438 + 359 images, 8x8, grayscale, 10 classes; in the package.

    They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak,
    1998). One fifth of every class is the test part here, the same for every seed; a writer may
    occur in both parts.

    Args:
        choose: the training rows to keep.
    """
    with (resources.files("feddpms.data") / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        x, y = arrays["x"], arrays["y"]
    train, test = held_out(y, "digits.npz")
    train = train[choose(len(train))]
    names = tuple(str(digit) for digit in range(10))
    return shard(x[train], y[train], DIGITS_TOP), shard(x[test], y[test], DIGITS_TOP), names


def read(given: str, choose: Choose) -> Parts:
    """A .npz file of the user's own.

    Images are [n, height, width], [n, height, width, channels] or [n, channels, height, width]
    with 1 or 3 channels; uint8, or floats in [0, 1]. Labels are integers [n] or [n, 1] from 0; the
    number of classes is the largest label of both parts plus one. Without a test part, one fifth of
    every class is held out, the same for every seed. MedMNIST's val_images and val_labels are left
    out.

    Args:
        given: path of the file.
        choose: the training rows to keep.

    Returns:
        Training part, test part, class names ("0", "1", ...).

    Raises:
        ConfigError: no path was given.
        DataError: the file is missing, broken, or its arrays are not as described.
    """
    path = place("npz", given, ACCEPTS)
    arrays = _arrays(path)
    x_name, y_name, *_ = names = next(keys for keys in LAYOUTS if keys[0] in arrays)
    x, y = _part(path, arrays, x_name, y_name)
    if names[2] in arrays:
        x_test, y_test = _part(path, arrays, names[2], names[3])
        if x.shape[1:] != x_test.shape[1:]:
            raise DataError(
                f"{path}: expected {names[2]} of the image shape of {x_name}, {x.shape[1:]}, got "
                f"{x_test.shape[1:]}; bring both to one shape"
            )
    else:
        train, test = held_out(y, str(path))
        x, y, x_test, y_test = x[train], y[train], x[test], y[test]
    classes = _classes(path, y, y_test)
    rows = choose(len(y))
    return shard(x[rows], y[rows]), shard(x_test, y_test), tuple(map(str, range(classes)))


def _classes(path: Path, y: np.ndarray, y_test: np.ndarray) -> int:
    """The number of classes: the largest label of both parts plus one."""
    classes = int(max(y.max(), y_test.max())) + 1
    if classes > len(y) + len(y_test):
        raise DataError(
            f"{path}: expected labels numbered 0..classes-1, got label {classes - 1} with only "
            f"{len(y) + len(y_test)} examples; renumber the classes from 0"
        )
    return classes


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the file; pickled objects are never loaded."""
    wanted = {name for keys in LAYOUTS for name in keys}
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path}: expected a whole .npz file, got no zip archive (cut off, a single .npy array "
            f"or another format); give {ACCEPTS}"
        )
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            stored = file.files
            arrays = {name: file[name] for name in stored if name in wanted}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle=False" in str(error):
            raise DataError(
                f"{path}: expected arrays of numbers, got an object array (images of mixed sizes, "
                "or a pickle, which is never loaded); bring all images to one size and save again"
            ) from None
        raise DataError(
            f"{path}: expected a whole .npz file, got one that does not load "
            f"({first_line(error)}); save it again"
        ) from None
    _check_names(path, arrays, stored)
    return arrays


def _check_names(path: Path, arrays: dict[str, np.ndarray], stored: list[str]) -> None:
    """Images need labels, in both parts."""
    for keys in LAYOUTS:
        test = keys[2] in arrays or keys[3] in arrays
        if keys[0] in arrays and all(name in arrays for name in (keys if test else keys[:2])):
            return
    raise DataError(
        f"{path}: expected {ACCEPTS.removeprefix('a .npz file with ')}; got "
        f"{', '.join(stored) or 'no array'}; save the arrays under these names"
    )


def _part(
    path: Path, arrays: dict[str, np.ndarray], x_name: str, y_name: str
) -> tuple[np.ndarray, np.ndarray]:
    """The checked images [n, h, w] or [n, h, w, c] and labels [n] of one part."""
    x = _images(f"{path}: {x_name}", arrays[x_name])
    y = _labels(f"{path}: {y_name}", arrays[y_name])
    if len(x) != len(y):
        raise DataError(
            f"{path}: expected one label for each image, got {len(x)} in {x_name} and {len(y)} in "
            f"{y_name}; save them in the same order and number"
        )
    if not len(x):
        raise DataError(f"{path}: expected examples in {x_name}, got none; save at least one")
    return x, y


def _images(where: str, x: np.ndarray) -> np.ndarray:
    """The images with channels last."""
    if x.ndim == 4 and x.shape[3] not in (1, 3) and x.shape[1] in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
        raise DataError(
            f"{where}: expected shape [n, height, width], [n, height, width, channels] or [n, "
            f"channels, height, width] with 1 or 3 channels, got {list(x.shape)}; reshape it"
        )
    height, width = x.shape[1:3]
    if not height or not width:
        raise DataError(
            f"{where}: expected images with pixels, got {height}x{width}; save them whole"
        )
    return x if x.dtype == np.uint8 else _unit_floats(where, x)


def _unit_floats(where: str, x: np.ndarray) -> np.ndarray:
    """Float pixels as float32, every one finite and in [0, 1]."""
    if x.dtype.kind != "f":
        raise DataError(
            f"{where}: expected uint8 pixels in 0..255 or floats in [0, 1], got {x.dtype}; "
            "convert with .astype('uint8') if they are in 0..255"
        )
    for what, wrong in (
        ("finite pixels", ~np.isfinite(x)),
        ("float pixels in [0, 1]", (x < 0) | (x > 1)),
    ):
        if wrong.any():
            first = tuple(int(place) for place in np.argwhere(wrong)[0])
            raise DataError(
                f"{where}: expected {what}, got {x[first]} at index {list(first)} ({wrong.sum()} "
                "such pixels); repair them, or save 0..255 as uint8"
            )
    return x.astype(np.float32)


def _labels(where: str, y: np.ndarray) -> np.ndarray:
    """Labels as a vector of integers from 0."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"{where}: expected integer labels of shape [n] or [n, 1], got {y.dtype} of shape "
            f"{list(y.shape)}; give one class number from 0 for each image"
        )
    if len(y) and int(y.max()) > np.iinfo(np.int32).max:
        raise DataError(f"{where}: expected class numbers, got {y.max()}; renumber from 0")
    y = y.astype(np.int64)
    if len(y):
        check_labels(y, max(int(y.max()) + 1, 1), where)
    return y
