"""Examples that no client has: decoded from class means, mixed, restyled, or made of a model."""

from feddpms.synthesis.calibration import Calibration, calibrated
from feddpms.synthesis.generate import Drawing, Synthesis, extend, generate
from feddpms.synthesis.inversion import (
    Inversion,
    fine_tune,
    invert,
    require_inversion,
    scarce,
    warm_up,
)
from feddpms.synthesis.knowledge import (
    Filling,
    Guidance,
    balanced,
    fuse,
    guided,
    knowledge_rounds,
    lacking,
    told,
)
from feddpms.synthesis.matching import Matching, Release, match, preliminary_rounds
from feddpms.synthesis.means import encode, release
from feddpms.synthesis.mixing import averages, mixed, pooled
from feddpms.synthesis.paper import paper_release
from feddpms.synthesis.sharing import Pool, candidates, completed, shared, wanted
from feddpms.synthesis.spectrum import amplitudes, interpolated, require_window, spectra, styled

__all__ = [
    "Calibration",
    "Drawing",
    "Filling",
    "Guidance",
    "Inversion",
    "Matching",
    "Pool",
    "Release",
    "Synthesis",
    "amplitudes",
    "averages",
    "balanced",
    "calibrated",
    "candidates",
    "completed",
    "encode",
    "extend",
    "fine_tune",
    "fuse",
    "generate",
    "guided",
    "interpolated",
    "invert",
    "knowledge_rounds",
    "lacking",
    "match",
    "mixed",
    "paper_release",
    "pooled",
    "preliminary_rounds",
    "release",
    "require_inversion",
    "require_window",
    "scarce",
    "shared",
    "spectra",
    "styled",
    "told",
    "wanted",
    "warm_up",
]
