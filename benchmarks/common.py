"""What the benchmarks share: sides measured in turn, ratios, and results with what they ran on."""

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from feddpms.engine import cores
from feddpms.errors import FeddpmsError
from feddpms.records import write_file

RESULTS = Path(__file__).parent / "results"


def in_turn(sides: Mapping[str, Callable[[], Any]], times: int) -> dict[str, list[float]]:
    """Seconds of each side, measured in turn, `times` times; a first turn is not kept.

    Taking turns puts all sides under the same disturbances, so ratios are steadier than seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(times + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of each turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Median, and the range, in words."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3f} (from {low:.3f} to {high:.3f}, {len(values)} turns)"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {"cpu": cpu, "cores": cores(), "system": platform.system()}


Turns = Annotated[int, typer.Option(min=1, help="How often each side is measured.")]
Batch = Annotated[int, typer.Option(min=2, help="Images in a step.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of a client in a round.")]
Record = Annotated[bool, typer.Option("--record", help="Write benchmarks/results, too.")]
"""A trial writes nothing over what was recorded."""


class Images(StrEnum):
    """What images are made of."""

    grey = "grey"
    colour = "colour"


def run(main: Callable[..., None]) -> None:
    """Run a benchmark's command; a setting that does not fit is one line."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
    app.command()(main)
    try:
        app()
    except FeddpmsError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def save(name: str, values: Mapping[str, Any], packages: Sequence[str] = ()) -> None:
    """Write results to `results/NAME.json`, with the command, the machine and the versions."""
    packages = ("feddpms", "torch", *packages)
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    content = {
        "command": shlex.join(command),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in packages}},
        **values,
    }
    RESULTS.mkdir(exist_ok=True)
    write_file(RESULTS / f"{name}.json", (json.dumps(content, indent=1) + "\n").encode())
