"""What leaves a client, what pays for it, and where that is written down."""

from feddpms.privacy.account import Account, Kept
from feddpms.privacy.accountant import epsilon
from feddpms.privacy.calibrate import Multipliers, calibrate
from feddpms.privacy.claim import claim
from feddpms.privacy.ledger import Ledger
from feddpms.privacy.mechanism import COUNTS, MEANS, UPDATES
from feddpms.privacy.noise import Source, source
from feddpms.privacy.release import Noise, class_statistics, histogram
from feddpms.privacy.settings import DpTraining, Privacy

__all__ = [
    "COUNTS",
    "MEANS",
    "UPDATES",
    "Account",
    "DpTraining",
    "Kept",
    "Ledger",
    "Multipliers",
    "Noise",
    "Privacy",
    "Source",
    "calibrate",
    "claim",
    "class_statistics",
    "epsilon",
    "histogram",
    "source",
]
