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
from common import save

from feddpms.algorithms import FedAvg, Moon, Training
from feddpms.engine import Crew, Engine, Workers, simulate
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

COHORT, IMAGES = 20, 60_000
PAGE = resource.getpagesize()


def resident() -> float:
    """Memory of this process now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


def cell(clients: int, rounds: int) -> dict[str, Any]:
    """One run: seconds and memory of each round, and the peak."""
    data, each = images(IMAGES, 1, 0), IMAGES // clients
    x, y = data.x.split(each), data.y.split(each)
    shards = {
        c: Shard(x[c][:60], y[c][:60]) for c in range(clients)
    }  # the same work for any number
    net = network(data)
    task = Task(CLASSES, clients, rounds, net.latent)
    crew = Crew(Moon(), shards, images(500, 1, 1), net, task, Training(epochs=1), Privacy(), Rng(0))
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
    data = images(6400, 1, 0)
    shards = {c: Shard(data.x[c * 640 :][:640], data.y[c * 640 :][:640]) for c in range(10)}
    net = network(data)
    task = Task(CLASSES, 10, 2, net.latent)
    local = Training(epochs=2)
    crew = Crew(FedAvg(), shards, images(500, 1, 1), net, task, local, Privacy(), Rng(0))
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


def main(
    clients: Annotated[str, typer.Option(help="Numbers, with commas between.")] = "20,100,1000",
    rounds: Annotated[int, typer.Option(help="Rounds of a run.")] = 60,
    turns: Annotated[int, typer.Option(help="How often workers are measured.")] = 7,
    one: Annotated[int, typer.Option(help="Run one cell and print it as JSON.", hidden=True)] = 0,
) -> None:
    """Measure, print the table and the ratios, and write results/scaling.json."""
    if one:
        print(json.dumps(cell(one, rounds)))
        return
    cells = []
    for number in map(int, clients.split(",")):
        command = [sys.executable, __file__, "--one", str(number), "--rounds", str(rounds)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(said)
        rate, error = slope(found["MB"])
        found |= {"MB a round": rate, "standard error": error}
        cells.append(found)
        print(
            f"{number} clients, cohort {COHORT}: {statistics.median(found['seconds']):.3f} s a "
            f"round, peak {found['peak MB']:.0f} MB, growth {rate:+.4f} ± {error:.4f} MB a round"
        )
    speedups = workers(turns)
    save("scaling", {"cells": cells, "two workers": speedups})
    peaks = {c["clients"]: c["peak MB"] for c in cells}
    print(f"two workers / one: {statistics.median(speedups):.3f} ({len(speedups)} turns)")
    if {100, 1000} <= peaks.keys():
        print(f"peak memory, 1000 clients / 100: {peaks[1000] / peaks[100]:.3f}")


if __name__ == "__main__":
    typer.run(main)
