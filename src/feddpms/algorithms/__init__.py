"""The methods: one file each, client rule and server rule side by side.

A new method is one file and one import line here.
"""

from feddpms.algorithms.central import Central
from feddpms.algorithms.fedadam import FedAdam
from feddpms.algorithms.fedavg import FedAvg
from feddpms.algorithms.fedavgm import FedAvgM
from feddpms.algorithms.fedda import FedDA
from feddpms.algorithms.feddc import FedDC
from feddpms.algorithms.feddg import FedDG
from feddpms.algorithms.feddpms import FedDPMS
from feddpms.algorithms.feddyn import FedDyn
from feddpms.algorithms.fedma import FedMA
from feddpms.algorithms.fedmix import FedMix
from feddpms.algorithms.fednova import FedNova
from feddpms.algorithms.fedprox import FedProx
from feddpms.algorithms.fedyogi import FedYogi
from feddpms.algorithms.local import Local
from feddpms.algorithms.method import About, Client, Method
from feddpms.algorithms.mixup import Mixup
from feddpms.algorithms.moon import Moon
from feddpms.algorithms.pfnm import PFNM
from feddpms.algorithms.scaffold import Scaffold
from feddpms.algorithms.training import Training
from feddpms.algorithms.zdac import Zdac
from feddpms.algorithms.zdas import Zdas

METHODS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (
        *(Local, Central, FedAvg),
        *(FedAvgM, FedAdam, FedYogi, FedNova, PFNM, FedMA),
        *(FedProx, Scaffold, Moon, FedDyn, FedDC),
        *(Mixup, FedMix, FedDG, Zdac, Zdas, FedDA, FedDPMS),
    )
}

__all__ = [
    "METHODS",
    "PFNM",
    "About",
    "Central",
    "Client",
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
    "Method",
    "Mixup",
    "Moon",
    "Scaffold",
    "Training",
    "Zdac",
    "Zdas",
]
