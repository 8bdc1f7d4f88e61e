from pathlib import Path

import pytest
from run_folders import Maker, diverge, images


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "runs")


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, three seeds, and one run each that is unfinished and diverged."""
    make = Maker(tmp_path_factory.mktemp("three"))
    for seed in (0, 1, 2):
        make("fedavg", seed)
        make("moon", seed)
        make("feddpms", seed, pictures=images(10, [8, 8, 0, 8, 3, 8, 8, 8, 8, 8]))
    make("moon", 3, change=lambda lines: lines[:12])
    make("fedavg", 3, change=diverge)
    return make.root


@pytest.fixture(scope="session")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one seed, a hundred classes, colour images for thirty of them."""
    make = Maker(tmp_path_factory.mktemp("hundred"))
    names = tuple(f"class {i}" for i in range(100))
    made = [8 if i % 3 == 0 else 0 for i in range(100)]
    make("fedavg", classes=names)
    make("feddpms", classes=names, pictures=images(100, made, 3, 32))
    return make.root
