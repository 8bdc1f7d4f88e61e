import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from PIL import Image

from feddpms.data import Data, hub, load
from feddpms.errors import ConfigError, DataError
from feddpms.rng import Rng

datasets = pytest.importorskip("datasets", reason="the optional package datasets is missing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def read(folder, **more):
    return load(Data(name=f"hf:{folder}", **more), Rng(0))


def gray(value, mode="L"):
    return Image.new(mode, (28, 20), value if mode == "L" else (value, 0, 0))


def write(folder, part="train", images=None, **columns):
    """A folder of parquet as the hub holds it."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    rows = {"image": images or [gray(10 * i) for i in range(10)]}
    rows["label"] = columns.pop("label", [0, 1] * 5)
    for name, (feature, values) in columns.items():
        features[name], rows[name] = feature, values
    made = datasets.Dataset.from_dict(rows, datasets.Features(features))
    folder.mkdir(exist_ok=True)
    made.to_parquet(str(folder / f"{part}-00000-of-00001.parquet"))


def test_parquet_folder_with_a_test_part(tmp_path):
    write(tmp_path / "set")
    write(tmp_path / "set", "test", images=[gray(200)], label=[2])
    part = read(tmp_path / "set")
    assert part.train.x.shape == (10, 1, 32, 32)
    assert (part.train.x[:, 0, 5, 5] * 255).round().tolist() == [10 * i for i in range(10)]
    assert part.train.y.tolist() == [0, 1] * 5
    assert part.test.y.tolist() == [2]
    assert part.classes == ("a", "b", "c")
    assert read(tmp_path / "set", size=16, fraction=0.3).train.x.shape == (3, 1, 16, 16)


def test_without_a_test_part_a_fifth_is_held_out(tmp_path):
    write(tmp_path / "set")
    part = read(tmp_path / "set")
    assert (len(part.train), sorted(part.test.y.tolist())) == (8, [0, 1])
    every = torch.cat([part.train.x, part.test.x])[:, 0, 5, 5] * 255
    assert sorted(every.round().tolist()) == [10 * i for i in range(10)]


def test_colour_if_one_image_is(tmp_path):
    write(tmp_path / "set", images=[gray(1)] * 9 + [gray(9, "RGB")])
    assert read(tmp_path / "set", fraction=0.2).train.x.shape[1] == 3


def test_image_folder(tmp_path):
    for part, name, n in (("train", "cat", 3), ("train", "dog", 2), ("test", "dog", 1)):
        for i in range(n):
            (tmp_path / "set" / part / name).mkdir(parents=True, exist_ok=True)
            gray(i).save(tmp_path / "set" / part / name / f"{i}.png")
    part = read(tmp_path / "set")
    assert part.classes == ("cat", "dog")
    assert sorted(part.train.y.tolist()) == [0, 0, 0, 1, 1]
    assert part.test.y.tolist() == [1]


def test_of_several_labels_the_usual_name_is_taken(tmp_path, refused):
    other = datasets.ClassLabel(names=["x"]), [0] * 10
    write(tmp_path / "set", coarse_label=other)
    assert read(tmp_path / "set").classes == ("a", "b", "c")


def test_columns_that_do_not_fit_are_refused(tmp_path, refused):
    extra = datasets.Image(), [gray(0)] * 10
    write(tmp_path / "two", second=extra)
    with refused(DataError, "one Image column", "second: Image"):
        read(tmp_path / "two")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.csv").write_text("a,label\n1,2\n")
    with refused(DataError, "one Image column", "a: Value"):
        read(tmp_path / "table")


def test_unlabelled_rows_are_refused(tmp_path, refused):
    write(tmp_path / "set", label=[0, 1] * 4 + [0, None])
    with refused(DataError, "labels 0..2", "-1 in row 9"):
        read(tmp_path / "set")


def test_no_training_part_is_refused(tmp_path, refused):
    write(tmp_path / "set", "test")
    with refused(DataError, 'part "train"', "got test"):
        read(tmp_path / "set")


def test_unknown_name_offline_is_refused(refused):
    with refused(DataError, "hf:nobody/nothing-of-that-name", "check the name and the connection"):
        read("nobody/nothing-of-that-name")


def test_no_name_is_refused(refused):
    with refused(ConfigError, 'expected "hf:NAME"'):
        read("")


def test_missing_package_says_how_to_install(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(hub, "found", lambda: False)
    with refused(ConfigError, 'pip install "feddpms[hf]"'):
        read("ylecun/mnist")


def test_a_broken_image_is_named(tmp_path, refused):
    write(tmp_path / "set", images=[gray(0)] * 9 + [{"bytes": b"no image", "path": None}])
    with refused(DataError, "column image, row 9", "not decode"):
        read(tmp_path / "set", fraction=1.0)


def test_bytes_or_path(tmp_path):
    gray(3).save(tmp_path / "3.png")
    rows = [{"i": {"bytes": None, "path": str(tmp_path / "3.png")}}, {"i": None}]
    (_, blob), (_, nothing) = hub._blobs("set", rows, "i", np.arange(2))
    assert blob == (tmp_path / "3.png").read_bytes()
    assert nothing is None
    assert np.asarray(Image.open(tmp_path / "3.png")).max() == 3
