"""The methods: one file each, client rule and server rule side by side.

A new method is one file and one import line here.
"""

from feddpms.algorithms.central import Central
from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.fedda import FedDA
from feddpms.algorithms.feddpms import FedDPMS
from feddpms.algorithms.fedmix import FedMix
from feddpms.algorithms.fedprox import FedProx
from feddpms.algorithms.local import Local
from feddpms.algorithms.method import About, Client, Method, Training
from feddpms.algorithms.moon import Moon

METHODS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (Local, Central, FedAvg, FedProx, Moon, FedMix, FedDA, FedDPMS)
}

__all__ = [
    "METHODS",
    "About",
    "Central",
    "Client",
    "FedAvg",
    "FedDA",
    "FedDPMS",
    "FedMix",
    "FedProx",
    "Local",
    "Method",
    "Moon",
    "Training",
]
