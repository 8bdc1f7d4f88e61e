"""Pictures: SVG for the page, PNG for image sheets; the only place that imports matplotlib.

Every function takes plain values and gives text or bytes; none touches pyplot or a file. The same
values give the same bytes. Every SVG has a prefix of its own on its ids and its style rules, so
that several of them can stand in one page.
"""

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter

from feddpms.report.compare import clean
from feddpms.report.epsilon import Line

if TYPE_CHECKING:
    from PIL import Image

COLOURS = ("#3d3d3d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; dark grey for the first."""
LINES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    "text.parse_math": False,  # class names may hold a dollar sign
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so measures are the same everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.labelcolor": "#222222",
    "legend.frameon": False,
    "lines.linewidth": 1.7,
}
CELLS_WITH_TEXT = 250
"""A heat map with more cells than this, or more than 30 columns, shows colours only."""
KINDS = ("real", "reconstructed", "synthetic")
"""what an image sheet may show, from left to right"""
SHEET_CLASSES = 20
"""An image sheet shows this many classes at most."""
SHEET_IMAGES = 8
"""An image sheet shows this many images of a kind at most."""
SHEET_WIDTH = 850
"""An image sheet is at most this wide, in pixels, unless one image of a kind needs more."""


@dataclass(frozen=True)
class Curve:
    """One line over rounds.

    Attributes:
        name: in the legend.
        values: [seeds, rounds]; NaN where there is no value.
        phases: the phase of each round.
        colour: place of the colour, from 0.
        faint: drawn thin, for a run that is in no mean.
    """

    name: str
    values: np.ndarray
    phases: tuple[str, ...]
    colour: int
    faint: bool = False


def accuracy_svg(curves: Sequence[Curve], name: str = "accuracy") -> str:
    """Test accuracy over rounds, values in [0, 1]: mean line, and band from least to most.

    Args:
        curves: one for each method.
        name: prefix of the ids, one for each picture of a page.
    """
    label = "Test accuracy over rounds, one line a method: " + _list([c.name for c in curves])
    scaled = [Curve(c.name, 100 * c.values, c.phases, c.colour, c.faint) for c in curves]
    return _svg(name, label, (8.2, 3.6), lambda f: _curves(f, scaled, "test accuracy, %"))


def loss_svg(curves: Sequence[Curve], name: str = "loss") -> str:
    """Test loss over rounds, in nats; the axis is logarithmic where values span decades."""
    label = "Test loss over rounds, one line a method: " + _list([c.name for c in curves])
    return _svg(name, label, (8.2, 3.2), lambda f: _curves(f, curves, "test loss, nats", log=True))


def per_class_svg(
    methods: Sequence[str], values: np.ndarray, classes: Sequence[str], name: str = "per-class"
) -> str:
    """Final test accuracy by method and class.

    Args:
        methods: name of each row.
        values: [methods, classes] in [0, 1]; NaN for a class without a test example.
        classes: name of each class.
        name: prefix of the ids.
    """

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        _heat(ax, 100 * values, classes, methods, limits=(0, 100), unit="accuracy, %")
        ax.set_xlabel("class")

    size = (8.2, 1.3 + 0.34 * len(methods) + 0.035 * _longest(classes))
    label = "Final test accuracy by class (columns) and method (rows): " + _list(methods)
    return _svg(name, label, size, paint)


def partition_svg(
    counts: Sequence[Sequence[int]], classes: Sequence[str], name: str = "partition"
) -> str:
    """Examples of each class at each client.

    Args:
        counts: [clients][classes].
        classes: name of each class.
        name: prefix of the ids.
    """
    label = f"Examples of each of {len(classes)} classes at each of {len(counts)} clients"
    size, paint = _partition(counts, classes)
    return _svg(name, label, size, paint)


def partition_png(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> bytes:
    """The picture of `partition_svg` as a PNG file."""
    size, paint = _partition(counts, classes)
    return _draw("partition", size, paint, "png")


def bytes_svg(
    methods: Sequence[str], up: Sequence[float], down: Sequence[float], name: str = "bytes"
) -> str:
    """Bytes of a whole run by method, to the server and from it."""

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        rows = np.arange(len(methods))
        ax.barh(rows - 0.2, up, 0.38, color=COLOURS[1], label="up: clients to server")
        ax.barh(rows + 0.2, down, 0.38, color=COLOURS[6], label="down: server to clients")
        ax.set_yticks(rows, [_short(m) for m in methods])
        ax.set_ylim(len(methods) - 0.4, -0.6)
        ax.xaxis.set_major_formatter(EngFormatter(unit="B"))
        ax.grid(visible=False, axis="y")
        ax.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper right", ncols=2)

    label = "Bytes of a whole run by method, up and down: " + _list(methods)
    return _svg(name, label, (8.2, 1.1 + 0.42 * len(methods)), paint)


def _curves(figure: Figure, curves: Sequence[Curve], ylabel: str, log: bool = False) -> None:
    """Lines, bands, and a dotted line where a phase changes."""
    ax = figure.subplots()
    for c in curves:
        rounds = np.arange(1, c.values.shape[1] + 1)
        style = LINES[c.colour // len(COLOURS) % len(LINES)]
        colour = COLOURS[c.colour % len(COLOURS)]
        mean = c.values.mean(0)
        (line,) = ax.plot(rounds, mean, color=colour, linestyle=style, label=_short(c.name))
        if c.faint:
            line.set(linewidth=0.9, linestyle=(0, (2, 2)))
        if len(rounds) <= 3:
            line.set_marker("o")
        if len(c.values) > 1:
            low, high = c.values.min(0), c.values.max(0)
            ax.fill_between(rounds, low, high, color=colour, alpha=0.14, linewidth=0)
    found = np.concatenate([c.values.ravel() for c in curves])
    found = found[np.isfinite(found)]
    if log and found.size and found.min() > 0 and found.max() > 30 * found.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    _mark_phases(ax, curves)
    longest = max(c.values.shape[1] for c in curves)
    ax.set_xlim(min(1, longest - 0.5), longest + (0.5 if longest == 1 else 0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("round")
    ax.set_ylabel(ylabel)
    across = max(1, min(len(curves), 100 // (8 + max(len(_short(c.name)) for c in curves))))
    figure.legend(loc="outside lower center", ncols=across)


def epsilon_svg(lines: Sequence[Line], name: str) -> str:
    """Accuracy in per cent against epsilon on a logarithmic axis; levels are dashed.

    Args:
        lines: what `epsilon.lines` gave.
        name: the element's id, unique on its page.
    """

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        for i, line in enumerate(lines):
            colour = COLOURS[i % len(COLOURS)]
            values = [100 * np.array(finals) for finals in line.points.values()]
            means = np.array([v.mean() for v in values])
            if line.delta is None:
                ax.axhline(means[0], color=colour, linestyle="--", label=_short(line.name, 40))
                continue
            low, high = ([end(v) for v in values] for end in (np.min, np.max))
            x = np.array(list(line.points), float)
            bars, label = [means - low, high - means], _short(line.name)
            ax.errorbar(x, means, bars, color=colour, marker="o", capsize=3, label=label)
        marks = sorted({e for line in lines for e in line.points if e is not None})
        ax.set_xscale("log")
        ax.set_xticks(marks, [f"{e:g}" for e in marks])
        ax.set_xticks([], minor=True)
        ax.set_xlabel("target epsilon of a client's noisy channels, per record")
        ax.set_ylabel("test accuracy, %")
        figure.legend(loc="outside lower center", ncols=3)

    return _svg(name, "Accuracy against epsilon", (8.2, 3.6), paint)


def _mark_phases(ax: Axes, curves: Sequence[Curve]) -> None:
    """A dotted line where a phase changes, with the new phase's name above the axes."""
    changes: dict[float, dict[str, None]] = {}
    for c in curves:
        for i, (old, new) in enumerate(zip(c.phases, c.phases[1:], strict=False), 1):
            if old != new:
                changes.setdefault(i + 0.5, {})[f"{_short(old, 12)} → {_short(new, 12)}"] = None
    for x, names in changes.items():
        ax.axvline(x, color="#777777", linewidth=1, linestyle=":")
        if len(changes) <= 4:
            place = ax.get_xaxis_transform()
            text = ax.text(x, 1.01, "\n".join(names), transform=place, ha="center", va="bottom")
            text.set(fontsize=8, color="#555555")


def _partition(
    counts: Sequence[Sequence[int]], classes: Sequence[str]
) -> tuple[tuple[float, float], Callable[[Figure], None]]:
    """Size and painter of the partition picture."""
    table = np.asarray(counts, dtype=float).reshape(len(counts), len(classes))

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        _heat(ax, table, classes, [str(i) for i in range(len(table))], None, "examples")
        ax.set_ylabel("client")
        ax.set_xlabel("class")

    rows = len(table)
    height = 0.27 * rows if rows <= 30 else 8.1
    return (8.2, 1.2 + height + 0.035 * _longest(classes)), paint


def _heat(
    ax: Axes,
    table: np.ndarray,
    columns: Sequence[str],
    rows: Sequence[str],
    limits: tuple[float, float] | None,
    unit: str,
) -> None:
    """A heat map with its numbers written in where there is room; zero and NaN stay white."""
    low, high = limits or (0, max(1.0, float(np.nanmax(table, initial=1))))
    norm = PowerNorm(1 if limits else 0.6, low, high)
    colours = mpl.colormaps["Blues"].with_extremes(bad="white")
    seen = np.ma.masked_invalid(table)
    picture = ax.imshow(seen, cmap=colours, norm=norm, aspect="auto", interpolation="none")
    _ticks(ax, columns, rows)
    if table.size > CELLS_WITH_TEXT or len(columns) > 30:
        figure = ax.get_figure(root=True)
        assert figure is not None
        thin = 6 * figure.get_size_inches()[1]
        figure.colorbar(picture, ax=ax, label=unit, pad=0.01, aspect=thin)
        return
    for (i, j), value in np.ndenumerate(table):
        text = "-" if math.isnan(value) else f"{value:.0f}"
        if limits is None and value == 0:
            continue
        shade = "white" if not math.isnan(value) and norm(value) > 0.55 else "#222222"
        ax.text(float(j), float(i), text, ha="center", va="center", fontsize=8, color=shade)


def _ticks(ax: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Names on both axes; numbers in steps where there are too many for names."""
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if len(columns) <= 30:
        long = max((len(c) for c in columns), default=0) * len(columns) > 80
        ax.set_xticks(range(len(columns)), [_short(c, 16) for c in columns])
        if long:
            ax.tick_params(axis="x", labelrotation=90)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(11, integer=True))
    if len(rows) <= 30:
        ax.set_yticks(range(len(rows)), [_short(r) for r in rows])
    else:
        ax.yaxis.set_major_locator(MaxNLocator(11, integer=True))
    ax.set_xticks(np.arange(0.5, len(columns) - 1), minor=True)
    ax.set_yticks(np.arange(0.5, len(rows) - 1), minor=True)
    ax.tick_params(which="minor", length=0)
    if len(columns) * len(rows) <= CELLS_WITH_TEXT:
        ax.grid(which="minor", color="#f0f0f0", linewidth=1)


def _longest(classes: Sequence[str]) -> int:
    """Letters of the longest class name that stands upright below a heat map."""
    return max((min(len(c), 16) for c in classes), default=0) if len(classes) <= 30 else 0


def _list(names: Sequence[str]) -> str:
    """Names in one line."""
    return ", ".join(names)


def _short(text: str, most: int = 28) -> str:
    """A name that fits its place."""
    text = clean(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _svg(name: str, label: str, size: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    """A picture as an `svg` element that can stand in a page among others."""
    text = _draw(name, size, paint, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    text = re.sub(r'(?<=\sid=")(?=[^"]+")', f"{prefix}-", text)
    text = re.sub(r'(?<=href="#)(?=[^"]+")', f"{prefix}-", text)
    text = re.sub(r"(?<=url\(#)(?=[^)]+\))", f"{prefix}-", text)
    text = text.replace('<style type="text/css">*{', f'<style type="text/css">#{prefix} *{{')
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif")
    safe = html.escape(clean(label), quote=True)
    return text.replace("<svg ", f'<svg id="{prefix}" role="img" aria-label="{safe}" ', 1).strip()


def _draw(
    name: str, size: tuple[float, float], paint: Callable[[Figure], None], kind: str
) -> bytes:
    """The bytes of a picture, the same for the same values."""
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a browser has it
        mpl.rcdefaults()
        mpl.rc("svg", hashsalt=name)
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        paint(figure)
        file = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()


def grid_png(rows: Mapping[str, np.ndarray], columns: Sequence[str], title: str) -> bytes:
    """Images in named rows and columns, as a PNG file.

    Args:
        rows: by name, images in [0, 1], float [columns, 1 or 3, height, width].
        columns: names.
        title: one line above.
    """
    across, down = len(columns), len(rows)

    def paint(figure: Figure) -> None:
        axes = figure.subplots(down, across, squeeze=False)
        figure.suptitle(title, fontsize=10)
        for (name, images), line in zip(rows.items(), axes, strict=True):
            line[0].set_ylabel(name, rotation=0, ha="right", va="center")
            for image, ax in zip(images, line, strict=True):
                pixels = np.clip(image, 0, 1).transpose(1, 2, 0)
                ax.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="none")
                ax.set(xticks=[], yticks=[])
                ax.grid(visible=False)
        for column, ax in zip(columns, axes[0], strict=True):
            ax.set_title(_short(column, 14), fontsize=9)

    return _draw("grid", (2.4 + 1.05 * max(across, 4), 0.5 + 1.1 * down), paint, "png")


def sheet(images: Mapping[str, np.ndarray], classes: Sequence[str]) -> bytes:
    """Real, reconstructed and synthetic images side by side, one row a class, as a PNG file.

    With more than 20 classes, the first 20 that have synthetic images are shown.

    Args:
        images: those of `KINDS`, uint8 [classes, n, 1 or 3, height, width], and `synthetic_count`
            [classes]; all but the synthetic ones may be missing.
        classes: name of each class.

    Raises:
        ValueError: there is no synthetic image.
    """
    made = np.clip(images.get("synthetic_count", np.zeros(len(classes))), 0, None).astype(int)
    if "synthetic" not in images or not made.any():
        raise ValueError("no synthetic images to show")
    columns = [
        (name, images[name], made if name == "synthetic" else None)
        for name in KINDS
        if name in images and images[name].shape[1]
    ]
    shown = list(range(len(classes)))
    if len(shown) > SHEET_CLASSES:
        shown = [k for k in shown if made[k]][:SHEET_CLASSES]
    return _sheet(columns, shown, [_short(classes[k], 20) for k in shown])


Column = tuple[str, np.ndarray, np.ndarray | None]
"""What images are, the images, and how many of each class there are; None for all of them."""


def _sheet(columns: list[Column], shown: list[int], names: list[str]) -> bytes:
    """Draw the rows of an image sheet."""
    from PIL import Image, ImageDraw, ImageFont

    size = columns[0][1].shape[-2:]
    scale = max(1, round(48 / size[0]))
    down, across = (scale * n + 4 for n in size)
    font = ImageFont.load_default(15)
    left = max(70, 20 + math.ceil(max(font.getlength(n) for n in names)))
    room = (SHEET_WIDTH - left - 8) // len(columns) - 24
    most = max(1, min(SHEET_IMAGES, room // across))
    titles = [math.ceil(font.getlength(title)) for title, _, _ in columns]
    strips = [across * min(most, pictures.shape[1]) for _, pictures, _ in columns]
    widths = list(map(max, titles, strips))
    starts = [left + sum(widths[:i]) + 24 * i for i in range(len(columns))]
    canvas = Image.new("RGB", (starts[-1] + widths[-1] + 8, 34 + down * len(shown) + 4), "white")
    draw = ImageDraw.Draw(canvas)
    for row, name in enumerate(names):
        draw.text((8, 34 + (row + 0.5) * down - 10), name, fill="#222222", font=font)
    for (title, pictures, filled), x in zip(columns, starts, strict=True):
        draw.text((x, 8), title, fill="#222222", font=font)
        for row, k in enumerate(shown):
            top = 34 + row * down
            count = most if filled is None else min(most, int(filled[k]))
            _strip(canvas, pictures[k], count, (x, top), scale)
            if not count:
                draw.text((x, top + down / 2 - 10), "none", fill="#777777", font=font)
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()


def _strip(
    canvas: "Image.Image", images: np.ndarray, filled: int, at: tuple[int, int], scale: int
) -> None:
    """Paste images side by side, each pixel as a square."""
    from PIL import Image

    for i, image in enumerate(images[:filled]):
        pixels = np.repeat(np.repeat(image, scale, -1), scale, -2)
        pixels = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)
        picture = Image.fromarray(np.ascontiguousarray(pixels))
        canvas.paste(picture, (at[0] + i * (picture.width + 4), at[1]))
