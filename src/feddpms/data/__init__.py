"""Data sets by name, how a training set is split over clients, and who then holds what."""

from feddpms.data.datasets import DATASETS, Data, Dataset, Source, available, load, training_rows
from feddpms.data.partition import Partition, describe, split
from feddpms.data.stats import counts, effective_classes, levels, table

__all__ = [
    "DATASETS",
    "Data",
    "Dataset",
    "Partition",
    "Source",
    "available",
    "counts",
    "describe",
    "effective_classes",
    "levels",
    "load",
    "split",
    "table",
    "training_rows",
]
