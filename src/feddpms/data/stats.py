"""Who holds what: class counts of each client, and a picture of them for the terminal."""

from collections.abc import Sequence

import numpy as np

WIDTH = 100
BAR = 10
EIGHTHS = " ▏▎▍▌▋▊▉"


def counts(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """How many examples of each class each client holds.

    Args:
        labels: labels [n] in 0..classes-1.
        parts: rows of each client.
        classes: number of classes of the data set.

    Returns:
        int64 [clients, classes].
    """
    labels = np.asarray(labels)
    return np.stack([np.bincount(labels[rows], minlength=classes) for rows in parts])


def levels(counts: np.ndarray) -> np.ndarray:
    """Coarse counts for a log: per cent of the largest, to the nearest quarter.

    A few records and none look the same, and no count can be read off.

    Args:
        counts: examples [clients, classes].

    Returns:
        int64 [clients, classes] in 0..100.
    """
    return 25 * np.rint(4 * counts / max(int(counts.max(initial=1)), 1)).astype(np.int64)


def effective_classes(counts: np.ndarray) -> np.ndarray:
    """How many classes a client holds, weighed by how evenly: exp of the entropy of its labels.

    Args:
        counts: examples [clients, classes].

    Returns:
        float64 [clients]; from 1 (one class) to the number of classes (all equal), 0 for a client
        without examples.
    """
    sizes = counts.sum(1, keepdims=True)
    p = counts / np.maximum(sizes, 1)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1)
    return np.where(sizes[:, 0] > 0, np.exp(entropy), 0.0)


def table(counts: np.ndarray, classes: Sequence[str]) -> str:
    """The counts as text, at most 100 columns wide.

    A column for each class if they fit, else a summary: how many classes a client holds, and which
    it holds most of. A bar shows the client's size relative to the largest.

    Args:
        counts: examples [clients, classes].
        classes: class names.

    Returns:
        Lines without a final newline: a head, one for each client, the total.
    """
    total = counts.sum(0)
    digits = len(str(int(total.sum())))
    room = WIDTH - len("client  ") - max(digits, 4) - 2 - BAR
    cell = room // len(classes) - 1
    if cell < max(len(str(int(total.max()))), 4):
        return _summary(counts, classes)
    cell = min(cell, max(len(str(int(total.max()))), *map(len, classes)))
    rows = [["client", "size", *(name[:cell].rstrip() for name in classes), ""]]
    for client, own in enumerate(counts):
        cells = [str(number) if number else "·" for number in own.tolist()]
        rows.append([str(client), str(own.sum()), *cells, bar(own.sum(), counts.sum(1).max())])
    rows.append(["total", str(total.sum()), *map(str, total.tolist()), ""])
    return _aligned(rows)


def _summary(counts: np.ndarray, classes: Sequence[str]) -> str:
    """One line for each client where a column for each class would not fit."""
    largest = counts.sum(1).max()
    rows = [["client", "size", "held", "effective", "", "most of"]]
    for client, (own, effective) in enumerate(zip(counts, effective_classes(counts), strict=True)):
        order = np.argsort(-own, kind="stable")[:3]
        most = ", ".join(f"{classes[k][:14]} {own[k]}" for k in order if own[k])
        held = str(np.count_nonzero(own))
        size = bar(own.sum(), largest).ljust(BAR)
        rows.append([str(client), str(own.sum()), held, f"{effective:.1f}", size, most])
    total = counts.sum(0)
    rows.append(["total", str(total.sum()), str(np.count_nonzero(total)), "", "", ""])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns; the last is left as it is."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = [
        " ".join(
            [*(text.rjust(width) for text, width in zip(row[:-1], widths, strict=True)), row[-1]]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def bar(value: float, largest: float, width: int = BAR) -> str:
    """A bar of eighths of a character.

    Args:
        value: what it shows, 0..largest.
        largest: value of the full width.
        width: full width in characters.

    Returns:
        At most `width` characters; at least a sliver if value is above 0.
    """
    eighths = max(round(8 * width * value / largest), 1) if value > 0 else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
