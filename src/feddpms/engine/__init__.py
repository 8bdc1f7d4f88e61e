"""The engine: who carries messages, and the loop of rounds."""

from feddpms.engine.evaluate import Score, evaluate
from feddpms.engine.grid import Grid
from feddpms.engine.inprocess import InProcess
from feddpms.engine.loop import Engine, Outcome, simulate

__all__ = ["Engine", "Grid", "InProcess", "Outcome", "Score", "evaluate", "simulate"]
