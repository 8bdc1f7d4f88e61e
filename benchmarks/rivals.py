"""Seconds of a round of FedAvg in feddpms, Flower, pfl and fluke: same network, data and steps.

Usage: python benchmarks/rivals.py

The rivals live in virtual environments of their own, which the first run makes in
`benchmarks/.rivals` with the exact versions in `benchmarks/rivals/*.txt`.

Every side runs in a process of its own and says when each round ended, its evaluation included,
and how many optimiser steps the round took. A side's time is the median of the seconds between the
ends of rounds: no import, no start of processes and no reading of data is in it. Sides take turns.
What can use the cores in several ways is measured in each; its fastest way counts.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ratios, save, spread
from rivals.case import Settings

from feddpms.engine import cores
from feddpms.models import NetSettings, build, trunk
from feddpms.rng import Rng

HERE = Path(__file__).parent
OWN = "feddpms"
LIMIT = 600
"""seconds after which a side is given up"""
CASES = {
    "silo": Settings(clients=10, examples=500, cohort=10, batch_size=64, epochs=2, rounds=4),
    "device": Settings(clients=1000, examples=50, cohort=50, batch_size=10, epochs=1, rounds=6),
}


@dataclass(frozen=True)
class Rival:
    """What an environment holds beside torch and NumPy.

    Attributes:
        requirement: what pip installs.
        packages: those whose versions are told.
        unwanted: what pip removes again.
    """

    requirement: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


RIVALS = {
    "flower": Rival("flwr[simulation]", ("flwr", "ray")),
    "pfl": Rival("pfl", ("pfl",)),
    # fluke uses torchvision for its own data sets and networks alone, and torchvision does not load
    # beside every build of torch
    "fluke": Rival("fluke-fl", ("fluke-fl", "torchmetrics"), ("torchvision",)),
}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Side:
    """One way to run one simulator.

    Attributes:
        of: the simulator.
        processes: how many train.
        threads: torch's threads in each.
        launcher: what Python runs the script with, if not itself.
    """

    of: str
    processes: int
    threads: int
    launcher: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.of}, {self.processes} x {self.threads}"


@dataclass(frozen=True)
class Measured:
    """What a side did in one turn.

    Attributes:
        seconds: of a round, median of all but the first.
        accuracy: of the last global model.
    """

    seconds: float
    accuracy: float


def sides() -> list[Side]:
    """Everything that is measured; with one core, no side has a second process."""
    n = cores()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n))
    found = [
        Side(OWN, 1, 1),
        Side(OWN, n, 1),
        Side("flower", n, 1),
        Side("pfl", 1, n),
        Side("pfl", n, 1, torchrun if n > 1 else ()),
        Side("fluke", 1, n),
        Side("fluke", 1, 1),
    ]
    return list(dict.fromkeys(found))


def write_case(settings: Settings, path: Path) -> None:
    """Seeded images of ten classes, a pattern under noise each, and the initial weights."""
    rng = np.random.default_rng(0)
    patterns = rng.uniform(size=(10, 1, 28, 28))

    def draw(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, 10, shape)
        noise = rng.uniform(size=(*shape, 1, 28, 28)).astype(np.float32)
        x = (255 * (0.3 * patterns[y] + 0.7 * noise)).astype(np.uint8)
        return x, y

    x, y = draw(settings.clients, settings.examples)
    test_x, test_y = draw(settings.tested)
    net = build((1, 28, 28), 10, NetSettings(), Rng(0))
    weights = trunk(net.state_dict()).items()
    held: dict[str, Any] = {k: np.ascontiguousarray(v.numpy()) for k, v in weights}
    held |= {"x": x, "y": y, "test_x": test_x, "test_y": test_y}
    np.savez(path, settings=json.dumps(asdict(settings)), **held)


def environments(folder: Path, make: bool) -> dict[str, Path]:
    """The Python of each rival.

    Args:
        folder: with one environment a rival, named after it.
        make: make those that are not there.
    """
    for name in RIVALS:
        if make and not (folder / name / "ready").exists():
            print(f"making the environment of {name} in {folder / name}", flush=True)
            _make(name, folder / name)
    return {name: folder / name / "bin" / "python" for name in RIVALS}


def _make(name: str, folder: Path) -> None:
    """Make the environment of a rival, with the exact versions."""
    venv.create(folder, with_pip=True, clear=True)
    rival, pip = RIVALS[name], [folder / "bin" / "python", "-m", "pip", "--quiet"]
    pins = HERE / "rivals" / f"{name}.txt"
    commands = [[*pip, "install", "-c", pins, rival.requirement, "torch", "numpy"]]
    if rival.unwanted:
        commands.append([*pip, "uninstall", "--yes", *rival.unwanted])
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{name}: pip could not make its environment")
    (folder / "ready").touch()


def require_pinned(name: str, python: Path) -> dict[str, str]:
    """The versions of a rival's packages, which must be the pinned ones."""
    lines = (HERE / "rivals" / f"{name}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    packages = [*RIVALS[name].packages, "torch", "numpy"]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    try:
        done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"{name}: expected a Python at {python}: {error.strerror}") from None
    versions = dict(zip(packages, done.stdout.split(), strict=False))
    for package in packages:
        has = versions.get(package, "none").partition("+")[0]
        if has != pins[package]:
            raise SystemExit(f"{name}: expected {package} {pins[package]} at {python}, found {has}")
    return versions


class SideFailed(Exception):
    """A side ended with an error; says which, and what it said last."""


def measure(side: Side, python: Path, case: Path, settings: Settings, folder: Path) -> Measured:
    """One turn of one side.

    Raises:
        SystemExit: it failed twice, or did not take the steps that it should; the side is named.
    """
    out = folder / "out.json"
    script = HERE / "rivals" / f"{side.of}_sim.py"
    use = ["--processes", str(side.processes), "--threads", str(side.threads)]
    command = [python, *side.launcher, script, "--case", case, "--out", out, *use]
    try:
        _run(side, command, folder)
    except SideFailed as failed:  # pfl's processes abort now and then
        print(f"{str(failed).splitlines()[0]}; once more", flush=True)
        try:
            _run(side, command, folder)
        except SideFailed as again:
            raise SystemExit(str(again)) from None
    found = json.loads(out.read_text())
    if found["steps"] != [settings.steps] * settings.rounds:
        raise SystemExit(f"{side}: expected {settings.steps} steps a round, got {found['steps']}")
    if found["parameters"] != _parameters(case):
        raise SystemExit(f"{side}: trained {found['parameters']} values, not {_parameters(case)}")
    return Measured(statistics.median(found["seconds"][1:]), found["accuracy"])


def _run(side: Side, command: list[Any], folder: Path) -> None:
    """Run a side to its end; what it says goes to a file, since processes of its may outlive it."""
    (folder / "out.json").unlink(missing_ok=True)
    own = () if side.of == OWN else ("PYTHONPATH",)
    dropped = ("OMP_NUM_THREADS", *own)
    env = {k: v for k, v in os.environ.items() if k not in dropped} | QUIET
    said = folder / "said.txt"
    with said.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(LIMIT)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SystemExit(f"{side}: not done after {LIMIT} s") from None
            raise
    if code or not (folder / "out.json").exists():
        last = "\n".join(said.read_text(errors="replace").splitlines()[-30:])
        raise SideFailed(f"{side}: failed with status {code}\n{last}")


def _parameters(case: Path) -> int:
    """How many values of a case's model are trained: all that batch norm does not track."""
    with np.load(case) as file:
        return sum(file[k].size for k in file.files if k.endswith((".weight", ".bias")))


def compare(name: str, pythons: dict[str, Path], repeats: int, folder: Path) -> dict[str, Any]:
    """Measure all sides on a case, in turn, and say how they did."""
    settings, case = CASES[name], folder / f"{name}.npz"
    write_case(settings, case)
    turns: dict[Side, list[Measured]] = {side: [] for side in sides()}
    for _ in range(repeats):
        for side, measured in turns.items():
            measured.append(measure(side, pythons[side.of], case, settings, folder))
    seconds = {side: [m.seconds for m in measured] for side, measured in turns.items()}
    fastest: dict[str, Side] = {}
    for side in sorted(turns, key=lambda s: statistics.median(seconds[s]), reverse=True):
        fastest[side.of] = side
    for side, values in seconds.items():
        accuracy = turns[side][-1].accuracy
        print(f"{name}: {side}: {spread(values)} s a round, accuracy {accuracy:.3f}", flush=True)
    over = {of: ratios(seconds[fastest[of]], seconds[fastest[OWN]]) for of in RIVALS}
    return {
        "settings": asdict(settings) | {"steps": settings.steps},
        "seconds_a_round": {str(side): values for side, values in seconds.items()},
        "accuracy": {str(side): turns[side][-1].accuracy for side in turns},
        "fastest": {of: str(side) for of, side in fastest.items()},
        "ratio": {of: statistics.median(values) for of, values in over.items()},
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--environments", type=Path, help="folder with flower, pfl and fluke")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error(f"--repeats: expected a number above 0, got {given.repeats}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a side ends with this program
    pythons = environments(given.environments or HERE / ".rivals", not given.environments)
    versions = {name: require_pinned(name, python) for name, python in pythons.items()}
    pythons[OWN] = Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        done = {c: compare(c, pythons, given.repeats, Path(folder)) for c in given.cases}
    if set(done) == set(CASES):
        save("rivals", {"rivals": versions, "cases": done}, ("numpy",))
    for name, values in done.items():
        told = ", ".join(f"{of} {ratio:.2f}x" for of, ratio in values["ratio"].items())
        print(f"{name}: {told}")


if __name__ == "__main__":
    main()
