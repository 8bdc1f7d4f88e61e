import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from feddpms.data import Data, available, load
from feddpms.data.idx import CLASSES, SYSTEM
from feddpms.errors import DataError
from feddpms.rng import Rng

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(array, kind=8):
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def copy(tmp_path):
    rng = np.random.default_rng(0)
    for prefix, n in (("train", 20), ("t10k", 10)):
        x = rng.integers(0, 256, (n, 28, 28))
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % 10))
    return tmp_path


def read(folder, **more):
    return load(Data(name="fmnist", dir=str(folder), **more), Rng(0))


def test_compressed_and_plain_files(copy):
    part = read(copy)
    assert part.train.x.shape == (20, 1, 28, 28)
    x = np.random.default_rng(0).integers(0, 256, (20, 28, 28))
    assert torch.equal((part.train.x[:, 0] * 255).round().long(), torch.from_numpy(x))
    assert part.test.y.tolist() == list(range(10))
    assert part.classes == CLASSES
    assert len(read(copy, fraction=0.1).train) == 2
    assert {row[0]: row[2] for row in available(str(copy))}["fmnist"]


def plain(array):
    return lambda raw: idx(array)


GZ = f"{IMAGES}.gz"
CASES = {
    "truncated gzip": (GZ, lambda raw: raw[:-100], ("whole gzip file",)),
    "corrupt gzip": (GZ, lambda raw: raw[:50] + b"?" * 50 + raw[100:], ("whole gzip file",)),
    "no gzip": (GZ, lambda raw: b"<html>", ("whole gzip file",)),
    "empty": (LABELS, lambda raw: b"", ("an empty file",)),
    "magic": (LABELS, lambda raw: b"\1" + raw[1:], ("magic 00000801", "01000801")),
    "labels as images": (GZ, lambda raw: gzip.compress(idx(np.zeros(20))), ("3 dimension",)),
    "other type": (LABELS, lambda raw: idx(np.zeros(20), kind=13), ("unsigned bytes",)),
    "short": (LABELS, lambda raw: raw[:-1], ("20 values", "got 19")),
    "long": (LABELS, lambda raw: raw + b"\0", ("20 values", "got 21")),
    "head only": (LABELS, lambda raw: raw[:6], ("magic",)),
    "count": (LABELS, plain(np.zeros(19)), ("20 labels", "got 19", GZ)),
    "label": (LABELS, plain(np.full(20, 10)), ("labels 0..9", "10 in row 0", "20 such")),
    "size": (GZ, lambda raw: gzip.compress(idx(np.zeros((20, 32, 32)))), ("28x28", "32x32")),
}


@pytest.mark.parametrize(("name", "change", "words"), CASES.values(), ids=CASES)
def test_broken_files_are_refused(copy, refused, name, change, words):
    path = copy / name
    path.write_bytes(change(path.read_bytes()))
    with refused(DataError, str(path), *words):
        read(copy)


def test_missing_files_say_where_and_how(copy, refused):
    (copy / LABELS).unlink()
    with refused(DataError, "looked for", LABELS, "apt install dataset-fashion-mnist"):
        read(copy)
    with refused(DataError, "looked for", "nowhere", "apt install dataset-fashion-mnist"):
        read(copy / "nowhere")


@pytest.mark.skipif(
    not Path(SYSTEM).is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_real_fashion_mnist():
    part = load(Data(name="fmnist", fraction=0.1), Rng(0))
    assert part.train.x.shape == (6000, 1, 28, 28)
    assert torch.bincount(part.test.y).tolist() == [1000] * 10
