"""Parquet files in the Hugging Face layout: a column of encoded images and one of labels.

Only the columns that are needed, and of the images only the row groups with chosen rows, are read.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from feddpms.data.files import first_line
from feddpms.data.images import Blob, decoded
from feddpms.data.shards import Choose, check_labels
from feddpms.errors import DataError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

IMAGE_COLUMNS = ("img", "image")
SHARD_NAME = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


def files(folder: Path, part: str) -> list[Path]:
    """The files of one part, such as train-00000-of-00002.parquet, in order.

    Args:
        folder: where they lie, directly.
        part: "train" or "test".

    Raises:
        DataError: there is none, or one of several is missing.
    """
    paths = sorted(folder.glob(f"{part}-*.parquet"))
    match = SHARD_NAME.search(paths[0].name) if paths else None
    wanted = int(match[2]) if match else max(len(paths), 1)
    if len(paths) != wanted:
        raise DataError(
            f"{folder / part}-*.parquet: expected {wanted} file(s), got {len(paths)}; "
            "get the missing ones"
        )
    return paths


def read(
    paths: Sequence[Path], choose: Choose, labels: Sequence[str], classes: int, side: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """The chosen rows of one part.

    Args:
        paths: its files, in order.
        choose: the rows to keep.
        labels: names that the label column may have, first choice first.
        classes: number of classes that the data set has.
        side: width and height that every image must have, in pixels.

    Returns:
        Images uint8 [n, side, side, 3], labels int64 [n], and the class names that the files
        state ("0", "1", ... if they state none).

    Raises:
        DataError: a file is truncated, lacks a column, or holds what it should not.
    """
    columns = [_columns(path, labels) for path in paths]
    names = [
        _class_names(path, label, classes) for path, (_, label) in zip(paths, columns, strict=True)
    ]
    if len(set(names)) > 1:
        raise DataError(
            f"{paths[0].parent}: expected the same class names in every file, got different ones; "
            "keep the files of one data set in a folder"
        )
    y = [_labels(path, label, classes) for path, (_, label) in zip(paths, columns, strict=True)]
    rows = choose(sum(map(len, y)))
    blobs = _blobs(paths, [image for image, _ in columns], [len(part) for part in y], rows)
    return decoded(blobs, side), np.concatenate(y)[rows], names[0]


@contextmanager
def _opened(path: Path) -> "Iterator[ParquetFile]":
    """The opened file; what pyarrow says about a broken one becomes one line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: expected a whole parquet file, got one that does not read "
            f"({first_line(error)}); get it again"
        ) from None


def _columns(path: Path, labels: Sequence[str]) -> tuple[str, str]:
    """The names of the image and of the label column."""
    import pyarrow as pa

    with _opened(path) as file:
        schema = file.schema_arrow
    image = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    label = next((name for name in labels if name in schema.names), None)
    if image is None or label is None:
        raise DataError(
            f"{path}: expected a column {' or '.join(IMAGE_COLUMNS)} and a column "
            f"{' or '.join(labels)}, got {', '.join(schema.names)}; check that this is the data set"
        )
    kind = schema.field(image).type
    has_bytes = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if not has_bytes or not pa.types.is_integer(schema.field(label).type):
        raise DataError(
            f"{path}: expected {image} as struct<bytes, path> and {label} as integers, got {kind} "
            f"and {schema.field(label).type}; save the set in the Hugging Face layout"
        )
    return image, label


def _class_names(path: Path, label: str, classes: int) -> tuple[str, ...]:
    """The class names in the schema's metadata."""
    with _opened(path) as file:
        metadata = file.schema_arrow.metadata or {}
    try:
        stated: Any = json.loads(metadata[b"huggingface"])
        names = tuple(map(str, stated["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return tuple(map(str, range(classes)))
    if len(names) != classes:
        raise DataError(
            f"{path}: expected {classes} class names, got {len(names)}; "
            "check that data.name is the data set in this folder"
        )
    return names


def _labels(path: Path, label: str, classes: int) -> np.ndarray:
    """All labels of one file, int64, checked: an error must not depend on the rows chosen."""
    with _opened(path) as file:
        column = file.read(columns=[label]).column(label)
    if column.null_count:
        raise DataError(
            f"{path}, column {label}: expected a label in every row, got {column.null_count} "
            "without; leave unlabelled rows out"
        )
    y = column.to_numpy().astype(np.int64)
    check_labels(y, classes, f"{path}, column {label}")
    return y


def _blobs(
    paths: Sequence[Path], columns: Sequence[str], lengths: Sequence[int], rows: np.ndarray
) -> Iterator[Blob]:
    """The encoded images of these rows of all files together, one row group at a time."""
    start = 0
    for path, column, length in zip(paths, columns, lengths, strict=True):
        inside = rows[(rows >= start) & (rows < start + length)] - start
        start += length
        for row, blob in _of_file(path, column, inside):
            yield f"{path}, column {column}, row {row}", blob


def _of_file(path: Path, column: str, rows: np.ndarray) -> Iterator[tuple[int, bytes | None]]:
    """The encoded images of these rows of one file."""
    with _opened(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    start = 0
    for i, size in enumerate(sizes):
        inside = rows[(rows >= start) & (rows < start + size)]
        if len(inside):
            yield from zip(inside.tolist(), _of_group(path, column, i, inside - start), strict=True)
        start += size


def _of_group(path: Path, column: str, group: int, rows: np.ndarray) -> list[bytes | None]:
    """The encoded images of these rows of one row group."""
    with _opened(path) as file:
        table = file.read_row_group(group, columns=[f"{column}.bytes"])
    images = table.column(column).combine_chunks()
    return images.field("bytes").take(rows).to_pylist()
