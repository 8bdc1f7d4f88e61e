import numpy as np
import pytest
import torch
from PIL import Image

from feddpms.data import Data, images, load
from feddpms.errors import DataError
from feddpms.rng import Rng


def save(path, colour, size=(20, 12), mode="RGB", **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **more)


def read(folder, size=8, seed=0, **more):
    return load(Data(name="folder", dir=str(folder), size=size, **more), Rng(seed))


@pytest.fixture
def coloured(tmp_path):
    """Two classes of five images each, told apart by colour, in several formats and sizes."""
    suffixes = ["png", "bmp", "webp", "tif", "GIF"]
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        for i, suffix in enumerate(suffixes):
            more = {"lossless": True} if suffix == "webp" else {}
            save(tmp_path / name / f"{i}.{suffix}", colour, (5 + 9 * i, 40 - 8 * i), **more)
    (tmp_path / "red" / "notes.txt").write_text("left out")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_class_folders_with_a_fixed_split(coloured):
    part = read(coloured)
    assert part.classes == ("blue", "red")
    assert part.train.x.shape == (8, 3, 8, 8)
    assert part.test.y.tolist() == [0, 1]
    assert part.train.y.tolist() == [0] * 4 + [1] * 4
    for shard in (part.train, part.test):
        wanted = torch.tensor([[0.0, 0, 1], [1, 0, 0]])[shard.y]
        assert torch.equal(shard.x, wanted[:, :, None, None].expand(-1, -1, 8, 8))
    assert torch.equal(read(coloured, seed=1).test.x, part.test.x)


def test_train_and_test_folders(tmp_path):
    for name, n in (("train/a", 2), ("train/b", 3), ("test/b", 1)):
        for i in range(n):
            save(tmp_path / name / f"{i}.png", (10 * n, 0, 0))
    part = read(tmp_path)
    assert part.train.y.tolist() == [0, 0, 1, 1, 1]
    assert part.test.y.tolist() == [1]
    assert part.classes == ("a", "b")
    assert len(read(tmp_path, fraction=0.4).train) == 2


def test_a_class_called_train_is_a_class(tmp_path):
    for name in ("train", "plane"):
        for i in range(2):
            save(tmp_path / name / f"{i}.png", (1, 2, 3))
    assert read(tmp_path).classes == ("plane", "train")


def test_gray_if_every_image_is(tmp_path):
    for i in range(4):
        save(tmp_path / "a" / f"{i}.png", 51, mode="L")
    save(tmp_path / "b" / "0.png", (51, 7), mode="LA")
    part = read(tmp_path)
    assert part.train.x.shape == (4, 1, 8, 8)
    assert part.train.x.unique().tolist() == pytest.approx([0.2])
    save(tmp_path / "b" / "1.png", (0, 0, 255), mode="RGB")
    for seed in range(6):
        mixed = read(tmp_path, seed=seed, fraction=0.1)
        assert mixed.train.x.shape == (1, 3, 8, 8), "must not depend on the rows chosen"


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "1"])
def test_other_modes_become_colour(tmp_path, mode):
    for i in range(2):
        Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(
            (tmp_path / f"{i}.tif") if mode == "CMYK" else (tmp_path / f"{i}.png")
        )
        folder = tmp_path / "a"
        folder.mkdir(exist_ok=True)
        for path in tmp_path.glob(f"{i}.*"):
            path.rename(folder / path.name)
    part = read(tmp_path)
    assert part.train.x.shape[1] == (1 if mode == "1" else 3)
    assert part.train.x.min() == 1


def test_palette_with_transparency(tmp_path):
    for i in range(2):
        (tmp_path / "a").mkdir(exist_ok=True)
        image = Image.new("P", (8, 8), 1)
        image.putpalette([0, 0, 0, 255, 0, 0])
        image.save(tmp_path / "a" / f"{i}.png", transparency=bytes([0, 128]))
    assert read(tmp_path).train.x[0, :, 0, 0].tolist() == [1, 0, 0]


def test_shrinking_averages(tmp_path):
    """A fine checkerboard becomes gray, not black or white: the resize is antialiased."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    (tmp_path / "a").mkdir()
    for i in range(2):
        Image.fromarray(board).save(tmp_path / "a" / f"{i}.png")
    x = read(tmp_path).train.x
    assert x.min() > 0.4
    assert x.max() < 0.6


def test_wrong_folders_are_refused(coloured, refused):
    path = coloured / "red" / "0.png"
    whole = path.read_bytes()
    for content in (whole[:50], b"no image", b""):
        path.write_bytes(content)
        with refused(DataError, str(path), "not decode"):
            read(coloured)
    path.write_bytes(whole)
    (coloured / "green").mkdir()
    with refused(DataError, str(coloured / "green"), "image files", "got none"):
        read(coloured)


def test_unreadable_file_is_refused(coloured, refused):
    (coloured / "red" / "9.png").mkdir()
    with refused(DataError, "9.png", "readable image file"):
        read(coloured)


def test_wrong_layouts_are_refused(tmp_path, refused):
    with refused(DataError, "class folders", "got none"):
        read(tmp_path)
    save(tmp_path / "a.png", (0, 0, 0))
    with refused(DataError, "a folder, got a file"):
        read(tmp_path / "a.png")
    with refused(DataError, "looked for", "nowhere"):
        read(tmp_path / "nowhere")
    for name in ("train/a", "test/a", "test/b"):
        save(tmp_path / name / "0.png", (0, 0, 0))
    with refused(DataError, "test/b", "a class that", '"b"'):
        read(tmp_path)


def test_sixteen_bits_are_refused(tmp_path, refused):
    (tmp_path / "a").mkdir()
    for i in range(2):
        Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "a" / f"{i}.png")
    with refused(DataError, ".png", "8 bits a channel", "I;16"):
        read(tmp_path)


@pytest.mark.parametrize("limit", [150, 100])
def test_decompression_bombs_are_refused(coloured, refused, monkeypatch, limit):
    """Pillow warns above its limit and refuses above twice the limit; both are errors here."""
    save(coloured / "blue" / "bomb.png", (0, 0, 0), (16, 16))
    for path in coloured.glob("*/[0-4].*"):
        save(path.with_suffix(".png"), (0, 0, 0), (4, 4))
        if path.suffix != ".png":
            path.unlink()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with refused(DataError, "bomb.png", f"at most {limit} pixels"):
        read(coloured)


def test_formats_other_than_the_listed_are_not_tried():
    assert not {"EPS", "PDF", "PSD"} & set(images.FORMATS)
