"""From released class means to synthetic examples of the classes that a client lacks."""

from feddpms.synthesis.generate import Drawing, Synthesis, extend, generate
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
from feddpms.synthesis.matching import Matching, Release, match
from feddpms.synthesis.means import encode, release
from feddpms.synthesis.mixing import averages, mixed, pooled
from feddpms.synthesis.paper import paper_release

__all__ = [
    "Drawing",
    "Filling",
    "Guidance",
    "Matching",
    "Release",
    "Synthesis",
    "averages",
    "balanced",
    "encode",
    "extend",
    "fuse",
    "generate",
    "guided",
    "knowledge_rounds",
    "lacking",
    "match",
    "mixed",
    "paper_release",
    "pooled",
    "release",
    "told",
]
