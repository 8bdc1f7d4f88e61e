"""A split that was made elsewhere: a JSON file of row numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from feddpms.data.files import first_line
from feddpms.errors import ConfigError, DataError

FORMAT = '{"clients": [[row, ...], ...]}'


def read(given: str, n: int, clients: int) -> list[np.ndarray]:
    """The rows of every client.

    Args:
        given: path of the file, {"clients": [[row, ...], ...]}; rows count from 0 in the training
            set after `data.fraction` is taken.
        n: number of training examples.
        clients: number of clients that the file must list.

    Returns:
        One int64 array for each client, ascending, disjoint; they need not cover all rows.

    Raises:
        ConfigError: no path was given, or the file lists another number of clients.
        DataError: the file is missing or broken, or rows are out of range, twice, or none.
    """
    if not given:
        raise ConfigError(
            f"partition.kind=file: expected partition.path, got none; give a JSON file {FORMAT}"
        )
    path = Path(given).expanduser()
    lists = _lists(path)
    if len(lists) != clients:
        raise ConfigError(
            f"{path}: expected {clients} clients, got {len(lists)}; set partition.clients to "
            f"{len(lists)}"
        )
    parts = [_rows(path, client, rows, n) for client, rows in enumerate(lists)]
    every = np.concatenate(parts)
    values, times = np.unique(every, return_counts=True)
    if len(values) < len(every):
        raise DataError(
            f"{path}: expected every row once, got row {values[times > 1][0]} more than once; "
            "leave it to one client"
        )
    return parts


def _lists(path: Path) -> list[Any]:
    """What the file lists for each client."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path}: expected the JSON file of partition.path, got no such file; write {FORMAT}"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, got {first_line(error)}; write {FORMAT}") from None
    lists = content.get("clients") if isinstance(content, dict) else None
    if not isinstance(lists, list) or not lists:
        raise DataError(f"{path}: expected {FORMAT}, got other JSON; write it so")
    return lists


def _rows(path: Path, client: int, rows: Any, n: int) -> np.ndarray:
    """The rows of one client, checked."""
    if not isinstance(rows, list) or not rows:
        raise DataError(
            f"{path}: expected a list of rows for client {client}, got "
            f"{'an empty one' if rows == [] else type(rows).__name__}; write {FORMAT}"
        )
    for row in rows:
        if type(row) is not int or not 0 <= row < n:
            raise DataError(
                f"{path}: expected rows 0..{n - 1} of the training set (after data.fraction), got "
                f"{row!r} for client {client}; mend the file"
            )
    return np.sort(np.array(rows, np.int64))
