"""The methods: one file each, client rule and server rule side by side.

A new method is one file and one import line here.
"""

from feddpms.algorithms.central import Central
from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.feddpms import FedDPMS
from feddpms.algorithms.fedma import FedMA
from feddpms.algorithms.fedmix import FedMix
from feddpms.algorithms.fedprox import FedProx
from feddpms.algorithms.local import Local
from feddpms.algorithms.method import About, Client, Method, Training
from feddpms.algorithms.moon import Moon
from feddpms.algorithms.pfnm import PFNM

METHODS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (Local, Central, FedAvg, FedProx, Moon, PFNM, FedMA, FedMix, FedDPMS)
}

__all__ = [
    "METHODS",
    "PFNM",
    "About",
    "Central",
    "Client",
    "FedAvg",
    "FedDPMS",
    "FedMA",
    "FedMix",
    "FedProx",
    "Local",
    "Method",
    "Moon",
    "Training",
]
