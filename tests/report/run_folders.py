"""Run folders with made-up but plausible values."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from feddpms import records
from feddpms.records import PartitionRecord, PrivacyRecord, RoundRecord, RunRecord

PRIVACY = (
    "latent means: (epsilon, delta) = (8.0, 1e-5) for one record under add or remove.\n"
    "Not covered: the model updates, which leave each client in the clear."
)
LEVEL = {"fedavg": 0.72, "feddpms": 0.81, "moon": 0.74, "local": 0.41}


def partition(seed: int, clients: int, classes: int) -> PartitionRecord:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(clients, 0.5), classes).T
    return PartitionRecord(levels=tuple(map(tuple, (shares * 20).astype(int).tolist())))


def rounds(method: str, seed: int, n: int, classes: int) -> list[RoundRecord]:
    rng = np.random.default_rng([seed, len(method), ord(method[-1])])
    tail = (1 - np.exp(-np.arange(1, n + 1) / 5)) * (LEVEL.get(method, 0.6) + 0.02 * rng.normal())
    out: list[RoundRecord] = []
    for i, accuracy in enumerate(tail, 1):
        accuracy = float(np.clip(accuracy + 0.01 * rng.normal(), 0.02, 0.99))
        by_class = np.clip(accuracy + 0.12 * rng.normal(size=classes), 0, 1)
        phase = "train" if method != "feddpms" else "vae" if i <= 6 else "classify"
        out.append(
            RoundRecord(
                round=i,
                phase=phase,
                test_accuracy=accuracy,
                test_loss=float(2.3 * np.exp(-1.6 * accuracy)),
                per_class_accuracy=tuple(by_class.tolist()),
                train_loss=float(2.2 * np.exp(-2.2 * accuracy)),
                numbers={"steps": 460.0},
                seconds=1.25,
                timing={
                    "train": 1.0,
                    "synthesis": 0.05 if phase == "classify" else 0.0,
                    "evaluate": 0.125,
                    "exchange": 0.075 if phase == "classify" else 0.125,
                    "images_per_second": 5120.0 if i % 2 else 5100.0,
                },
                bytes_up=0 if method == "local" else 2_440_000 * (2 if phase == "vae" else 1),
                bytes_down=0 if method == "local" else 2_440_000,
            )
        )
    return out


def ledger(method: str, clients: int) -> list[dict[str, Any]]:
    """Each channel of a client once, as the ledger writes it down."""
    clear = {"mechanism": "none", "noise_multiplier": None, "l2_sensitivity": None}
    events = [
        {"round": 1, "client": k, "channel": "model", **clear, "neighbours": None}
        for k in range(clients)
        if method != "local"
    ]
    noisy = {"mechanism": "gaussian", "noise_multiplier": 1.3, "l2_sensitivity": 0.04419417}
    if method == "feddpms":
        events += [
            {"round": 7, "client": k, "channel": "means", **noisy, "neighbours": "add_remove"}
            for k in range(clients)
        ]
    return [event | {"simulated": True, "digest": ""} for event in events]


def images(classes: int, made: list[int], channels: int = 1, side: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    grid = np.linspace(0, 3, side)
    base = np.sin(np.outer(grid, grid)[None] * np.arange(1, classes + 1)[:, None, None])
    base = (127 + 100 * base)[:, None, None]
    noise = rng.normal(0, 15, (classes, 8, channels, side, side))
    real = np.clip(base + noise, 0, 255).astype(np.uint8)
    fake = np.clip(base + 2 * noise, 0, 255).astype(np.uint8)
    return {"real": real, "synthetic": fake, "synthetic_count": np.array(made, dtype=np.int64)}


Change = Callable[[list[RoundRecord]], list[RoundRecord]]


class Maker:
    """Writes run folders below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        method: str = "fedavg",
        seed: int = 0,
        *,
        classes: tuple[str, ...] = tuple(map(str, range(10))),
        clients: int = 10,
        planned: int = 20,
        change: Change = lambda lines: lines,
        settings: str = "",
        pictures: dict[str, Any] | None = None,
        name: str = "",
        claim: str = "",
        **run: Any,
    ) -> Path:
        folder = self.root / (name or f"{method}-{seed}")
        folder.mkdir(parents=True)
        first = RunRecord(
            version="0.1.0",
            method=method,
            data="digits",
            seed=seed,
            clients=clients,
            rounds=planned,
            classes=classes,
            parameters=61_706,
            train_examples=1437,
            test_examples=360,
            partition="dirichlet beta=0.5",
        )
        with (folder / "records.jsonl").open("w") as file:
            records.write(replace(first, **run), file)
            records.write(partition(seed, clients, len(classes)), file)
            lines = change(rounds(method, seed, planned, len(classes)))
            for line in lines:
                records.write(line, file)
            if len(lines) == planned:
                words = claim or (PRIVACY if method == "feddpms" else "Not covered: the model.")
                records.write(PrivacyRecord(claim=words), file)
        text = f"seed = {seed}\n{settings}\n[train]\nlr = 0.05\nepochs = 5\n"
        text += f"[method]\nname = {json.dumps(method)}\n"
        (folder / "run.toml").write_text(text)
        lines = [json.dumps(event) + "\n" for event in ledger(method, clients)]
        (folder / "ledger.jsonl").write_text("".join(lines))
        if pictures:
            save_file(pictures, folder / "images.safetensors")
        return folder


def diverge(lines: list[RoundRecord]) -> list[RoundRecord]:
    """The run with no finite loss from round 14 on, at the accuracy of a guess."""
    nan = float("nan")
    bad = [replace(r, test_loss=nan, train_loss=nan, test_accuracy=0.1) for r in lines[13:]]
    return lines[:13] + bad
