"""The methods: one file each, client rule and server rule side by side.

A new method is one file and one import line here.
"""

from feddpms.algorithms.central import Central
from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.feddg import FedDG
from feddpms.algorithms.feddpms import FedDPMS
from feddpms.algorithms.fedmix import FedMix
from feddpms.algorithms.fedprox import FedProx
from feddpms.algorithms.local import Local
from feddpms.algorithms.method import About, Client, Method, Training
from feddpms.algorithms.moon import Moon
from feddpms.algorithms.zdac import Zdac
from feddpms.algorithms.zdas import Zdas

METHODS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (Local, Central, FedAvg, FedProx, Moon, FedMix, FedDG, Zdac, Zdas, FedDPMS)
}

__all__ = [
    "METHODS",
    "About",
    "Central",
    "Client",
    "FedAvg",
    "FedDG",
    "FedDPMS",
    "FedMix",
    "FedProx",
    "Local",
    "Method",
    "Moon",
    "Training",
    "Zdac",
    "Zdas",
]
