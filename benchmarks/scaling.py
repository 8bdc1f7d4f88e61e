"""Time and memory as clients and workers grow, the cohort being the same.

Each cell runs in a process of its own, so that its peak memory is its own. Every client keeps its
last model (MOON), so that the number of clients would show if what they keep stayed in memory.
"""

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bare_loop import CLASSES, images, network
from common import Images, Record, Turns, run, save

from feddpms.algorithms import FedAvg, Moon, Training
from feddpms.engine import Crew, Engine, Workers, simulate
from feddpms.errors import ConfigError
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

COHORT, IMAGES, EACH = 20, 60_000, 60
PAGE = resource.getpagesize()


def resident() -> float:
    """Memory of this process now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


def cell(clients: int, rounds: int) -> dict[str, Any]:
    """One run: seconds and memory of each round, and the peak."""
    data, apart = images(IMAGES, Images.grey, 0), IMAGES // clients
    x, y = data.x.split(apart), data.y.split(apart)
    shards = {c: Shard(x[c][:EACH], y[c][:EACH]) for c in range(clients)}  # always the same work
    net, test = network(data), images(500, Images.grey, 1)
    task = Task(CLASSES, clients, rounds, net.latent)
    crew = Crew(Moon(), shards, test, net, task, Training(epochs=1), Privacy(), Rng(0))
    seconds, memory = list[float](), list[float]()

    def note(record, progress) -> None:
        seconds.append(record.seconds)
        memory.append(resident())

    simulate(crew, Engine(cohort=COHORT / clients), Ledger(), note)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"clients": clients, "peak MB": peak, "seconds": seconds, "MB": memory}


def workers(turns: int) -> list[float]:
    """Speed of two workers over one, FedAvg on ten clients of 640 images, two epochs."""
    torch.set_num_threads(1)
    data = images(6400, Images.grey, 0)
    shards = {c: Shard(data.x[c * 640 :][:640], data.y[c * 640 :][:640]) for c in range(10)}
    net = network(data)
    task = Task(CLASSES, 10, 2, net.latent)
    local = Training(epochs=2)
    crew = Crew(FedAvg(), shards, images(500, Images.grey, 1), net, task, local, Privacy(), Rng(0))
    pool, found = Workers(2), list[float]()
    for turn in range(turns + 1):
        took = []
        for side in (None, pool):
            rounds = simulate(crew, Engine(), Ledger(), workers=side).rounds
            took.append(sum(r.seconds for r in rounds))
        if turn:
            found.append(took[0] / took[1])
    pool.close()
    return found


def slope(memory: list[float]) -> tuple[float, float]:
    """Growth in MB a round over the second half of a run, and its standard error."""
    y = np.array(memory[len(memory) // 2 :])
    x = np.arange(len(y))
    (rate, _), covariance = np.polyfit(x, y, 1, cov=True)
    return float(rate), float(covariance[0, 0] ** 0.5)


def _numbers(clients: str) -> list[int]:
    """Numbers of clients."""
    parts = clients.split(",")
    if not all(p.isdecimal() and COHORT <= int(p) <= IMAGES // EACH for p in parts):
        raise ConfigError(
            f"--clients: expected numbers from {COHORT} to {IMAGES // EACH} with commas between, "
            f'got "{clients}"'
        )
    return [int(p) for p in parts]


def main(
    clients: Annotated[str, typer.Option(help="20 to 1000, with commas between.")] = "20,100,1000",
    rounds: Annotated[int, typer.Option(min=8, help="Rounds of a run.")] = 60,
    turns: Turns = 7,
    record: Record = False,
    one: Annotated[int, typer.Option(help="Run one cell and print it as JSON.", hidden=True)] = 0,
) -> None:
    """Print seconds and memory by number of clients, and the speed of two workers over one."""
    if one:
        print(json.dumps(cell(one, rounds)))
        return
    cells = []
    for number in _numbers(clients):
        command = [sys.executable, __file__, "--one", str(number), "--rounds", str(rounds)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(said)
        rate, error = slope(found["MB"])
        found |= {"MB a round": rate, "standard error": error}
        cells.append(found)
        print(
            f"{number} clients, cohort {COHORT}: {statistics.median(found['seconds']):.3f} s a "
            f"round, peak {found['peak MB']:.0f} MB, growth {rate:+.4f} ± {error:.4f} MB a round"
        )
    speedups = workers(turns)
    if record:
        save("scaling", {"cells": cells, "two workers": speedups})
    peaks = {c["clients"]: c["peak MB"] for c in cells}
    print(f"two workers / one: {statistics.median(speedups):.3f} ({len(speedups)} turns)")
    if {100, 1000} <= peaks.keys():
        print(f"peak memory, 1000 clients / 100: {peaks[1000] / peaks[100]:.3f}")


if __name__ == "__main__":
    run(main)
