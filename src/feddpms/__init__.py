"""Federated learning on non-IID data, helped by differentially private synthetic data.

from feddpms import FedDPMS, Run, run

result = run(Run(method=FedDPMS(), rounds=10), out="runs/first")
print(result.accuracy, result.claim)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddpms.algorithms import (
        PFNM,
        Central,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedDA,
        FedDC,
        FedDG,
        FedDPMS,
        FedDyn,
        FedMA,
        FedMix,
        FedNova,
        FedProx,
        FedYogi,
        Local,
        Mixup,
        Moon,
        Scaffold,
        Sharing,
        Training,
        Zdac,
        Zdas,
    )
    from feddpms.config import Run
    from feddpms.data import Data, Partition
    from feddpms.engine import Engine
    from feddpms.errors import FeddpmsError
    from feddpms.models import NetSettings
    from feddpms.privacy import Privacy
    from feddpms.runs import Result, compare, resume, run

__version__ = version("feddpms")

_HOMES = {
    "feddpms.algorithms": (
        "Central",
        "FedAdam",
        "FedAvg",
        "FedAvgM",
        "FedDA",
        "FedDC",
        "FedDG",
        "FedDPMS",
        "FedDyn",
        "FedMA",
        "FedMix",
        "FedNova",
        "FedProx",
        "FedYogi",
        "Local",
        "Mixup",
        "Moon",
        "PFNM",
        "Scaffold",
        "Sharing",
        "Training",
        "Zdac",
        "Zdas",
    ),
    "feddpms.config": ("Run",),
    "feddpms.data": ("Data", "Partition"),
    "feddpms.engine": ("Engine",),
    "feddpms.errors": ("FeddpmsError",),
    "feddpms.models": ("NetSettings",),
    "feddpms.privacy": ("Privacy",),
    "feddpms.runs": ("Result", "compare", "resume", "run"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PFNM",
    "Central",
    "Data",
    "Engine",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDA",
    "FedDC",
    "FedDG",
    "FedDPMS",
    "FedDyn",
    "FedMA",
    "FedMix",
    "FedNova",
    "FedProx",
    "FedYogi",
    "FeddpmsError",
    "Local",
    "Mixup",
    "Moon",
    "NetSettings",
    "Partition",
    "Privacy",
    "Result",
    "Run",
    "Scaffold",
    "Sharing",
    "Training",
    "Zdac",
    "Zdas",
    "compare",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    """Public names, loaded on first use so that `feddpms --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module feddpms has no attribute {name}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
