"""What leaves a client, what pays for it, and where that is written down."""

from feddpms.privacy.accountant import claim, epsilon
from feddpms.privacy.calibrate import Multipliers, calibrate
from feddpms.privacy.ledger import Ledger
from feddpms.privacy.mechanism import (
    COUNTS,
    MEANS,
    ClassSums,
    Privacy,
    in_the_clear,
    noisy_class_sums,
)

__all__ = [
    "COUNTS",
    "MEANS",
    "ClassSums",
    "Ledger",
    "Multipliers",
    "Privacy",
    "calibrate",
    "claim",
    "epsilon",
    "in_the_clear",
    "noisy_class_sums",
]
