"""One seed, many independent named streams of random numbers.

A stream's name is its purpose and, where it matters, the round and the client:
`Rng(seed).at("client", 3, 7).torch("batches")`. Streams with different names are independent, so
a method that draws more numbers for one purpose changes nothing for another: that is what makes
"mu = 0 equals FedAvg" true bit for bit. Nothing here touches a global generator.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

Name = str | int


@dataclass(frozen=True)
class Rng:
    """A place in the tree of random streams.

    Attributes:
        seed: the run's seed.
        path: the names that lead here.
    """

    seed: int
    path: tuple[Name, ...] = ()

    def at(self, *names: Name) -> "Rng":
        """The place reached from here by these names."""
        return Rng(self.seed, (*self.path, *names))

    def number(self, *names: Name) -> int:
        """A number in 0..2^63-1 that depends on the seed and on every name on the way."""
        key = repr((self.seed, *self.path, *names)).encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1

    def torch(self, *names: Name) -> torch.Generator:
        """A fresh torch generator (CPU) for the stream of this name."""
        return torch.Generator().manual_seed(self.number(*names))

    def numpy(self, *names: Name) -> np.random.Generator:
        """A fresh NumPy generator for the stream of this name."""
        return np.random.default_rng(self.number(*names))
