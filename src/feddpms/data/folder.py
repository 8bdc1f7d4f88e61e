"""Image files in folders named after their classes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from feddpms.data.files import place
from feddpms.data.images import SUFFIXES, Blob, common_mode, resized
from feddpms.data.shards import Choose, Parts, held_out, shard
from feddpms.errors import DataError

ACCEPTS = (
    "a folder with one folder of images for each class, DIR/CLASS/*.png, or with "
    "DIR/train/CLASS and DIR/test/CLASS"
)

Listed = tuple[list[Path], np.ndarray]
"""Image files, and their labels."""


def read(given: str, choose: Choose, size: int) -> Parts:
    """Class-named folders of PNG, JPEG, BMP, WebP, GIF or TIFF images of any size.

    Images are resized to squares without keeping the aspect ratio; of an animation, the first
    frame is taken; transparency is dropped. They are grayscale if every file is, else colour.
    Classes are in alphabetical order; other files and folders that start with a dot are left out.
    Without the folders train and test, one fifth of every class is held out, the same for every
    seed.

    Args:
        given: the folder.
        choose: the training rows to keep; only these and the test part are decoded.
        size: side length in pixels.

    Returns:
        Training part, test part, class names.

    Raises:
        ConfigError: no folder was given.
        DataError: a class has no image, an image does not decode, or test has a class of its own.
    """
    path = place("folder", given, ACCEPTS)
    split = (path / "train").is_dir() and (path / "test").is_dir()
    classes = _classes(path / "train" if split else path)
    (train, y), (test, y_test) = (_given if split else _made)(path, classes)
    mode = common_mode(_blobs([*train, *test]))
    rows = choose(len(y))
    x = resized(_blobs([train[i] for i in rows]), size, mode)
    return shard(x, y[rows]), shard(resized(_blobs(test), size, mode), y_test), tuple(classes)


def _given(path: Path, classes: list[str]) -> tuple[Listed, Listed]:
    """Both parts as the folders train and test say."""
    tested = _classes(path / "test")
    strange = [name for name in tested if name not in classes]
    if strange:
        raise DataError(
            f"{path / 'test' / strange[0]}: expected a class that {path / 'train'} has, got "
            f'"{strange[0]}"; add training images or remove the folder'
        )
    test, y_test = _listed(path / "test", tested)
    order = np.array([classes.index(name) for name in tested], np.int64)
    return _listed(path / "train", classes), (test, order[y_test])


def _made(path: Path, classes: list[str]) -> tuple[Listed, Listed]:
    """Both parts by the fixed split."""
    files, labels = _listed(path, classes)
    train, test = held_out(labels, str(path))
    return ([files[i] for i in train], labels[train]), ([files[i] for i in test], labels[test])


def _classes(path: Path) -> list[str]:
    """The class folders here, alphabetical."""
    if not path.is_dir():
        raise DataError(f"{path}: expected a folder, got a file; give {ACCEPTS}")
    names = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{path}: expected class folders, got none; give {ACCEPTS}")
    return names


def _listed(path: Path, classes: Sequence[str]) -> Listed:
    """The image files of these classes in order, and their labels."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(p for p in (path / name).iterdir() if p.suffix.lower() in SUFFIXES)
        if not images:
            raise DataError(
                f"{path / name}: expected image files ({', '.join(SUFFIXES)}), got none; add some "
                f"or remove the class folder; {ACCEPTS} is what data.dir may be"
            )
        files += images
        labels += [label] * len(images)
    return files, np.array(labels, np.int64)


def _blobs(files: Sequence[Path]) -> Iterator[Blob]:
    """The files' bytes, one at a time."""
    for file in files:
        try:
            yield str(file), file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file}: expected a readable image file, got {error.strerror}; mend or remove it"
            ) from None
