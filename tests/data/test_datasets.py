import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from feddpms.data import DATASETS, Data, available, load
from feddpms.errors import ConfigError
from feddpms.rng import Rng


@pytest.fixture
def arrays(tmp_path):
    """A set whose pixels say which row they are: brightness = row."""
    x = np.broadcast_to(np.arange(200, dtype=np.uint8)[:, None, None], (200, 4, 4))
    y = np.arange(200) % 5
    path = tmp_path / "set.npz"
    np.savez(path, x=x, y=y, x_test=x[:20], y_test=y[:20])
    return str(path)


def rows(dataset):
    return (dataset.train.x[:, 0, 0, 0] * 255).round().int().tolist()


def test_digits_are_whole_and_as_documented():
    digits = load(Data(), Rng(0))
    assert digits.name == "digits"
    assert digits.train.x.shape == (1438, 1, 8, 8)
    assert digits.test.x.shape == (359, 1, 8, 8)
    assert digits.train.x.dtype == torch.float32
    assert digits.train.x.is_contiguous()
    assert digits.train.y.dtype == torch.int64
    assert (digits.train.x.min(), digits.train.x.max()) == (0, 1)
    assert digits.classes == tuple("0123456789")


def test_digits_split_is_stratified_and_the_same_for_every_seed():
    one, two = load(Data(), Rng(0)), load(Data(), Rng(1))
    assert torch.equal(one.test.x, two.test.x)
    assert torch.equal(one.train.x, two.train.x)
    every = torch.bincount(torch.cat([one.train.y, one.test.y]))
    assert every.sum() == 1797
    assert torch.equal(torch.bincount(one.test.y), (every / 5).round().long())


def test_digits_can_be_told_apart():
    """Nearest class mean is right far above chance, so images and labels belong together."""
    digits = load(Data(), Rng(0))
    means = torch.stack([digits.train.x[digits.train.y == k].mean(0) for k in range(10)])
    guess = torch.cdist(digits.test.x.flatten(1), means.flatten(1)).argmin(1)
    assert (guess == digits.test.y).float().mean() > 0.85


def test_fraction_takes_a_sorted_random_part_of_training_only(arrays):
    part = load(Data(name="npz", dir=arrays, fraction=0.25), Rng(3))
    assert len(part.train) == 50
    assert len(part.test) == 20
    assert rows(part) == sorted(set(rows(part)))
    assert rows(part) != list(range(50))
    assert torch.equal(part.train.y, torch.tensor(rows(part)) % 5)


def test_fraction_depends_on_seed_and_fraction_alone(arrays):
    def taken(seed, *used):
        rng = Rng(seed)
        for name in used:
            rng.numpy(name).random(100)
        return rows(load(Data(name="npz", dir=arrays, fraction=0.25), rng))

    assert taken(3) == taken(3, "partition", "fraction")
    assert taken(3) != taken(4)
    assert taken(3) == sorted(Rng(3).numpy("fraction").choice(200, 50, replace=False).tolist())


@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 200), (0.0001, 1), (0.0124, 2), (0.0125, 3)])
def test_fraction_rounds_half_up_and_keeps_at_least_one(arrays, fraction, kept):
    part = load(Data(name="npz", dir=arrays, fraction=fraction), Rng(0))
    assert len(part.train) == kept
    assert part.classes == tuple("01234"), "classes are of the set, not of the fraction"


def test_validation_stands_for_the_test_set_and_is_trained_on_by_nobody(arrays):
    whole = load(Data(name="npz", dir=arrays, fraction=0.5), Rng(3))
    part = load(Data(name="npz", dir=arrays, fraction=0.5, validation=0.25), Rng(3))
    held = (part.test.x[:, 0, 0, 0] * 255).round().int().tolist()
    assert len(held) == 25
    assert sorted(held + rows(part)) == rows(whole), "of what was taken, and nothing twice"
    assert rows(part) == sorted(rows(part))
    assert held == sorted(held)
    assert held != rows(whole)[:25]
    for shard, kept in ((part.train, rows(part)), (part.test, held)):
        assert torch.equal(shard.y, torch.tensor(kept) % 5)
    assert part.name == "npz, validation 0.25"


def test_validation_depends_on_the_seed_and_on_no_other_stream(arrays):
    def held(seed, *streams):
        rng = Rng(seed)
        for stream in streams:
            rng.numpy(stream).random(10)
        return load(Data(name="npz", dir=arrays, validation=0.1), rng).test.y.tolist()

    assert held(3) == held(3, "fraction", "partition", "validation")
    assert held(3) != held(4)


@pytest.mark.parametrize("part", [0.001, 0.999])
def test_validation_leaves_some_to_train_and_some_to_score(arrays, part):
    with pytest.raises(ConfigError, match=r"must hold out some of 200 .* and leave some") as told:
        load(Data(name="npz", dir=arrays, validation=part), Rng(0))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"validation": -0.1},
        {"validation": 1.0},
        {"fraction": 0.0},
        {"fraction": 1.1},
        {"size": 30},
        {"size": 0},
        {"nmae": "digits"},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        Data(**wrong)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cifr10", 'did you mean "cifar10"?'),
        ("xyzzy", "choose from cifar10, cifar100, digits, fmnist, folder, hf:NAME, npz"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load(Data(name=name), Rng(0))


def test_a_path_in_place_of_a_name_is_told_its_place(tmp_path):
    with pytest.raises(ConfigError, match="--data npz or folder, and the path as --data-dir"):
        load(Data(name=str(tmp_path)), Rng(0))


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "npz", "folder"])
def test_missing_dir_says_what_to_give(refused, name):
    with refused(ConfigError, name, "data.dir (--data-dir)", "give a"):
        load(Data(name=name), Rng(0))


def test_available_lists_every_set_and_what_is_there(arrays):
    table = {name: (found, where) for name, _, found, where in available(arrays)}
    assert list(table) == list(DATASETS)
    assert table["digits"] == (True, "in the package")
    assert table["npz"][0]
    assert not table["cifar10"][0]
    assert not table["folder"][0]
    assert not any(found for name, _, found, _ in available() if name in ("npz", "folder"))


def test_digits_load_without_image_or_parquet_libraries():
    code = (
        "import sys; from feddpms.data import Data, load; from feddpms.rng import Rng;"
        "load(Data(), Rng(0));"
        "print({'PIL', 'pyarrow', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")
