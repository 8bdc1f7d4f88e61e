"""Fashion-MNIST from its four IDX files (Xiao, Rasul and Vollgraf, 2017).

An IDX file is a four-byte magic (two zeros, the type, the number of dimensions), one big-endian
uint32 for each dimension, and the values. Only unsigned bytes occur here.
"""

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np

from feddpms.data.files import first_line, place
from feddpms.data.shards import Choose, Parts, check_labels, shard
from feddpms.errors import DataError
from feddpms.types import Shard

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
SYSTEM = "/usr/share/datasets/fashion-mnist"
ACCEPTS = (
    "a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, each plain or .gz (Debian: apt install dataset-fashion-mnist; "
    "elsewhere: https://github.com/zalandoresearch/fashion-mnist)"
)
UNSIGNED_BYTE = 8
SIDE = 28


def found(given: str) -> bool:
    """Whether the training images are where they are looked for."""
    return any(Path(given or SYSTEM).expanduser().glob("train-images-idx3-ubyte*"))


def read(given: str, choose: Choose) -> Parts:
    """Fashion-MNIST: 60,000 + 10,000 images, 28x28, grayscale, 10 classes.

    Args:
        given: folder of the four files, or "" for the folder of Debian's package.
        choose: the training rows to keep.

    Returns:
        Training part, test part, class names.

    Raises:
        DataError: a file is missing, broken, or not what its name says.
    """
    folder = place("fmnist", given or SYSTEM, ACCEPTS)
    return _part(folder, "train", choose), _part(folder, "t10k", np.arange), CLASSES


def _part(folder: Path, prefix: str, choose: Choose) -> Shard:
    """The images and labels of one part."""
    x_path = _find(folder, f"{prefix}-images-idx3-ubyte")
    y_path = _find(folder, f"{prefix}-labels-idx1-ubyte")
    x, y = array(x_path, dims=3), array(y_path, dims=1)
    if x.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{x_path}: expected images of {SIDE}x{SIDE} pixels, got {x.shape[1]}x{x.shape[2]}; "
            "use the file of Fashion-MNIST"
        )
    if len(x) != len(y):
        raise DataError(
            f"{y_path}: expected {len(x)} labels, one for each image of {x_path.name}, got "
            f"{len(y)}; take both files from one copy"
        )
    check_labels(y, len(CLASSES), str(y_path))
    rows = choose(len(y))
    return shard(x[rows], y[rows])


def _find(folder: Path, name: str) -> Path:
    """The file of this name, compressed or not."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise DataError(
        f'data set "fmnist": looked for {folder / name}.gz, got no such file; give {ACCEPTS}'
    )


def array(path: Path, dims: int) -> np.ndarray:
    """The values of an IDX file of unsigned bytes.

    Args:
        path: the file; it is decompressed if its name ends in .gz.
        dims: the number of dimensions it must have.

    Returns:
        uint8, with the dimensions that the file states.

    Raises:
        DataError: the file is truncated, corrupt, or has another type or number of dimensions.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: expected a whole gzip file, got one that does not unpack "
            f"({first_line(error)}); get it again"
        ) from None
    start = 4 + 4 * dims
    magic = bytes([0, 0, UNSIGNED_BYTE, dims])
    if raw[:4] != magic or len(raw) < start:
        raise DataError(
            f"{path}: expected an IDX file of {dims} dimension(s) of unsigned bytes (magic "
            f"{magic.hex()}), got {raw[:4].hex() or 'an empty file'}; get it again"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dims, 4))
    if len(raw) - start != prod(shape):
        raise DataError(
            f"{path}: expected {prod(shape)} values ({' x '.join(map(str, shape))}) as its header "
            f"says, got {len(raw) - start}; get it again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
