"""How a client trains, as settings."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator

from feddpms.types import settings


def read_range(given: Any) -> tuple[int, ...]:
    """Two numbers of epochs, from a list or from `1,5`; none from what is empty.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(given, str):
        given = given.split(",") if given.strip() else ()
    if isinstance(given, list | tuple):
        parts = [int(p) if isinstance(p, str) and p.strip().isdecimal() else p for p in given]
        numbers = tuple(p for p in parts if type(p) is int)
        if not parts or (len(parts) == len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]):
            return numbers
    raise ValueError("should be two whole numbers from 1 on, not the higher first, such as 1,5")


@settings
class Training:
    """How a client trains."""

    epochs: Annotated[int, Ge(1)] = 5
    """passes over the client's own examples in a round"""
    epochs_range: Annotated[tuple[int, ...], BeforeValidator(read_range)] = ()
    """lowest and highest, such as [1, 5]: a client draws its epochs anew each round; [] for none"""
    batch_size: Annotated[int, Ge(2), Le(1_000_000)] = 64
    """examples in a step"""
    optimizer: Literal["adam", "sgd"] = "adam"
    """made anew for each client and round"""
    lr: Annotated[float, Gt(0)] = 1e-3
    """learning rate of the first rounds"""
    lr_decay: Annotated[float, Gt(0), Le(1)] = 0.5
    """factor on the learning rate after each period"""
    lr_period: Annotated[int, Ge(1)] = 10
    """rounds in a period"""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """of sgd"""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """l2 penalty in the gradient"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """of convolutions and matrix products in a loss and its gradient; weights stay float32"""

    def lr_at(self, round: int) -> float:
        """Learning rate of a round (1..rounds)."""
        return self.lr * self.lr_decay ** ((round - 1) // self.lr_period)

    @property
    def mean_epochs(self) -> float:
        """What a client and round take on average."""
        return sum(self.epochs_range) / 2 if self.epochs_range else self.epochs
