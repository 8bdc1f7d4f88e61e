"""Examples that no client has: decoded from class means, mixed, restyled, or made of a model."""

from feddpms.synthesis.generate import Drawing, Synthesis, extend, generate
from feddpms.synthesis.inversion import (
    Inversion,
    fine_tune,
    invert,
    lacking,
    require_inversion,
    warm_up,
)
from feddpms.synthesis.matching import Matching, Release, match
from feddpms.synthesis.means import encode, release
from feddpms.synthesis.mixing import averages, mixed, pooled
from feddpms.synthesis.paper import paper_release
from feddpms.synthesis.spectrum import amplitudes, interpolated, spectra, styled

__all__ = [
    "Drawing",
    "Inversion",
    "Matching",
    "Release",
    "Synthesis",
    "amplitudes",
    "averages",
    "encode",
    "extend",
    "fine_tune",
    "generate",
    "interpolated",
    "invert",
    "lacking",
    "match",
    "mixed",
    "paper_release",
    "pooled",
    "release",
    "require_inversion",
    "spectra",
    "styled",
    "warm_up",
]
