"""From released class means to synthetic examples of the classes that a client lacks."""

from feddpms.synthesis.generate import Drawing, Synthesis, extend, generate
from feddpms.synthesis.matching import Matching, Release, match
from feddpms.synthesis.means import encode, release
from feddpms.synthesis.mixing import averages, mixed, pooled
from feddpms.synthesis.paper import paper_release

__all__ = [
    "Drawing",
    "Matching",
    "Release",
    "Synthesis",
    "averages",
    "encode",
    "extend",
    "generate",
    "match",
    "mixed",
    "paper_release",
    "pooled",
    "release",
]
