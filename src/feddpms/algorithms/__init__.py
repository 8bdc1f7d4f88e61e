"""The methods: one file each, client rule and server rule side by side.

A new method is one file and one import line here.
"""

from feddpms.algorithms.central import Central
from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.feddc import FedDC
from feddpms.algorithms.feddpms import FedDPMS
from feddpms.algorithms.feddyn import FedDyn
from feddpms.algorithms.fedmix import FedMix
from feddpms.algorithms.fednova import FedNova
from feddpms.algorithms.fedprox import FedProx
from feddpms.algorithms.local import Local
from feddpms.algorithms.method import About, Client, Method
from feddpms.algorithms.moon import Moon
from feddpms.algorithms.scaffold import Scaffold
from feddpms.algorithms.training import Training

METHODS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (
        Local,
        Central,
        FedAvg,
        FedNova,
        FedProx,
        Scaffold,
        Moon,
        FedDyn,
        FedDC,
        FedMix,
        FedDPMS,
    )
}

__all__ = [
    "METHODS",
    "About",
    "Central",
    "Client",
    "FedAvg",
    "FedDC",
    "FedDPMS",
    "FedDyn",
    "FedMix",
    "FedNova",
    "FedProx",
    "Local",
    "Method",
    "Moon",
    "Scaffold",
    "Training",
]
