"""The methods: one file each, client rule and server rule side by side.

A new method is one file and one import line here.
"""

from feddpms.algorithms.central import Central as Central
from feddpms.algorithms.fedadam import FedAdam as FedAdam
from feddpms.algorithms.fedavg import FedAvg as FedAvg
from feddpms.algorithms.fedavgm import FedAvgM as FedAvgM
from feddpms.algorithms.fedda import FedDA as FedDA
from feddpms.algorithms.feddc import FedDC as FedDC
from feddpms.algorithms.feddg import FedDG as FedDG
from feddpms.algorithms.feddpms import FedDPMS as FedDPMS
from feddpms.algorithms.feddyn import FedDyn as FedDyn
from feddpms.algorithms.fedma import FedMA as FedMA
from feddpms.algorithms.fedmix import FedMix as FedMix
from feddpms.algorithms.fednova import FedNova as FedNova
from feddpms.algorithms.fedprox import FedProx as FedProx
from feddpms.algorithms.fedyogi import FedYogi as FedYogi
from feddpms.algorithms.local import Local as Local
from feddpms.algorithms.method import About as About
from feddpms.algorithms.method import Client as Client
from feddpms.algorithms.method import Method as Method
from feddpms.algorithms.mixup import Mixup as Mixup
from feddpms.algorithms.moon import Moon as Moon
from feddpms.algorithms.pfnm import PFNM as PFNM
from feddpms.algorithms.scaffold import Scaffold as Scaffold
from feddpms.algorithms.sharing import Sharing as Sharing
from feddpms.algorithms.training import Training as Training
from feddpms.algorithms.zdac import Zdac as Zdac
from feddpms.algorithms.zdas import Zdas as Zdas

_FAMILIES = ("bound", "aggregation", "drift", "data")
METHODS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in sorted(
        (v for v in list(globals().values()) if isinstance(getattr(v, "about", None), About)),
        key=lambda cls: (_FAMILIES.index(cls.about.family), cls.__name__.lower()),
    )
}
"""every method that is imported above, by its name"""
