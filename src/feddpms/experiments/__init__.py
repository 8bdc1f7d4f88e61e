"""The paper's tables and figures as runs, and lines of what they came to."""

from feddpms.experiments.lines import Line, read
from feddpms.experiments.make import cells, make, missing
from feddpms.experiments.predict import predicted
from feddpms.experiments.presets import EXPERIMENTS, SCALES, Cell, Scale
from feddpms.experiments.tables import insert, table

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Cell",
    "Line",
    "Scale",
    "cells",
    "insert",
    "make",
    "missing",
    "predicted",
    "read",
    "table",
]
