"""The engine: who carries messages, and the loop of rounds."""

from feddpms.engine.evaluate import Score, evaluate
from feddpms.engine.grid import Grid
from feddpms.engine.inprocess import Crew, InProcess
from feddpms.engine.loop import Engine, Outcome, Progress, require_engine, simulate
from feddpms.engine.shelf import Shelf
from feddpms.engine.workers import Workers, cores

__all__ = [
    "Crew",
    "Engine",
    "Grid",
    "InProcess",
    "Outcome",
    "Progress",
    "Score",
    "Shelf",
    "Workers",
    "cores",
    "evaluate",
    "require_engine",
    "simulate",
]
