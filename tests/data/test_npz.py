import numpy as np
import pytest
import torch

from feddpms.data import Data, load
from feddpms.errors import DataError
from feddpms.rng import Rng

X = np.arange(10 * 8 * 4, dtype=np.uint32).reshape(10, 8, 4).astype(np.uint8)
Y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])


@pytest.fixture
def loaded(tmp_path):
    def save_and_load(**arrays):
        np.savez(tmp_path / "set.npz", **arrays)
        return load(Data(name="npz", dir=str(tmp_path / "set.npz")), Rng(0))

    return save_and_load


def test_gray_uint8_with_test_part(loaded):
    part = loaded(x=X, y=Y, x_test=X[:3], y_test=np.array([[3], [0], [0]]))
    assert part.train.x.shape == (10, 1, 8, 4)
    assert torch.equal(part.train.x[:, 0], torch.from_numpy(X) / 255)
    assert part.train.y.tolist() == Y.tolist()
    assert part.test.y.tolist() == [3, 0, 0]
    assert part.classes == ("0", "1", "2", "3"), "classes are counted over both parts"


def test_without_test_part_a_fifth_of_each_class_is_held_out(loaded):
    part = loaded(x=np.repeat(X, 2, 0), y=np.repeat(Y, 2))
    assert sorted(part.test.y.tolist()) == [0, 0, 1, 2]
    assert len(part.train) == 16


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_and_first_give_the_same(loaded, channels):
    last = np.random.default_rng(0).integers(0, 256, (10, 8, 4, channels), np.uint8)
    parts = [loaded(x=x, y=Y, x_test=x, y_test=Y) for x in (last, last.transpose(0, 3, 1, 2))]
    assert parts[0].train.x.shape == (10, channels, 8, 4)
    assert torch.equal(parts[0].train.x, parts[1].train.x)
    assert parts[1].train.x.is_contiguous()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_in_unit_range_are_kept(loaded, dtype):
    x = np.full((10, 4, 4), 0.25, dtype)
    x[0] = 1
    part = loaded(x=x, y=Y, x_test=x, y_test=Y)
    assert part.train.x.dtype == torch.float32
    assert part.train.x.unique().tolist() == [0.25, 1.0]


def test_medmnist_names_and_the_validation_part_is_left_out(loaded):
    y = Y[:, None].astype(np.uint8)
    part = loaded(
        train_images=X,
        train_labels=y,
        val_images=X[:1],
        val_labels=np.array([[9]]),
        test_images=X[:2],
        test_labels=y[:2],
    )
    assert (len(part.train), len(part.test), len(part.classes)) == (10, 2, 3)


def bad(**changed):
    return {"x": X, "y": Y, **changed}


def floats(value):
    x = np.zeros((10, 4, 4), np.float32)
    x[2, 1, 3] = x[5, 0, 0] = value
    return x


CASES = {
    "nan": (bad(x=floats(np.nan)), ("finite", "nan", "[2, 1, 3]", "2 such")),
    "inf": (bad(x=floats(np.inf)), ("finite", "inf", "[2, 1, 3]")),
    "above 1": (bad(x=floats(1.5)), ("[0, 1]", "1.5", "[2, 1, 3]", "2 such")),
    "below 0": (bad(x=floats(-0.5)), ("[0, 1]", "-0.5")),
    "int64": (bad(x=X.astype(np.int64)), ("uint8", "int64")),
    "counts": (bad(y=Y[:9]), ("10 in x", "9 in y")),
    "none": (bad(x=X[:0], y=Y[:0]), ("examples",)),
    "flat": (bad(x=X.reshape(10, -1)), ("shape", "[10, 32]")),
    "two channels": (bad(x=np.zeros((10, 4, 4, 2), np.uint8)), ("1 or 3 channels",)),
    "no pixels": (bad(x=X[:, :0]), ("images with pixels", "0x4")),
    "negative": (bad(y=Y - 1), ("0..1", "-1 in row 0", "4 such")),
    "float labels": (bad(y=Y + 0.5), ("integer labels", "float64")),
    "one-hot": (bad(y=np.eye(3)[Y].astype(int)), ("[n] or [n, 1]", "[10, 3]")),
    "huge label": (bad(y=Y * 1000), ("label 2000", "renumber")),
    "enormous label": (bad(y=Y.astype(np.uint64) + 2**63), ("class numbers", "renumber")),
    "objects": (
        bad(x=np.array([X[0], X[1, :4]], dtype=object)),
        ("object array", "mixed sizes", "never loaded"),
    ),
    "no y": ({"x": X}, ("arrays x, y", "got x")),
    "other names": ({"images": X, "labels": Y}, ("arrays x, y", "images, labels")),
    "half a test part": (bad(x_test=X), ("got x, y, x_test",)),
    "test shape": (bad(x_test=X[:, :4], y_test=Y), ("(8, 4)", "(4, 4)")),
    "nothing to hold out": ({"x": X[:2], "y": Y[:2]}, ("2 examples of some class",)),
}


@pytest.mark.parametrize(("arrays", "words"), CASES.values(), ids=CASES)
def test_wrong_arrays_are_refused(loaded, refused, arrays, words):
    with refused(DataError, "set.npz", *words):
        loaded(**arrays)


def test_wrong_files_are_refused(tmp_path, refused):
    path = tmp_path / "set.npz"
    with refused(DataError, "looked for", str(path)):
        load(Data(name="npz", dir=str(path)), Rng(0))
    np.savez_compressed(path, x=X, y=Y)
    whole = path.read_bytes()
    corrupt = whole[:60] + bytes(60) + whole[120:]
    for content in (whole[: len(whole) // 2], b"not an archive", b"", corrupt):
        path.write_bytes(content)
        with refused(DataError, str(path), "a whole .npz file"):
            load(Data(name="npz", dir=str(path)), Rng(0))
    with path.open("wb") as file:
        np.save(file, X)
    with refused(DataError, "a single .npy array"):
        load(Data(name="npz", dir=str(path)), Rng(0))
    with refused(DataError, "a whole .npz file"):
        load(Data(name="npz", dir=str(tmp_path)), Rng(0))
