"""A network as a chain of layers, whose hidden units may stand in any order.

An entry of two or more dimensions opens a layer; those after it (bias, batch norm) belong to its
units. The order of a layer's units is the order of the next layer's inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from feddpms.algorithms.trees import empty
from feddpms.errors import ConfigError
from feddpms.models import GENERATIVE
from feddpms.types import Tree


def layers(tree: Tree) -> list[list[str]]:
    """The names of each layer's entries, its weight first."""
    found: list[list[str]] = []
    for key, value in tree.items():
        found += [[]] if value.ndim > 1 else []
        found[-1].append(key)
    return found


def require_chain(method: str, tree: Tree) -> None:
    """Refuse a network whose hidden units cannot be put in another order.

    Raises:
        ConfigError: it has a decoder, or group normalisation.
    """
    if any(key.startswith(GENERATIVE) for key in tree):
        raise ConfigError(
            f"{method} puts hidden units in another order, which the decoders at the clients would "
            "not follow; wrap a method that leaves them in place, such as fedavg"
        )
    scales = [k for k, v in tree.items() if v.ndim == 1 and k.endswith(".weight")]
    if any(k.removesuffix("weight") + "running_mean" not in tree for k in scales):
        raise ConfigError(
            f"{method} matches channels one by one, and group normalisation ties some together; "
            "set net.norm=batch"
        )


def part(tree: Tree, places: Sequence[Tensor]) -> Tree:
    """The part of a global tree with these units of its hidden layers, in this order."""
    names = layers(tree)
    whole = [torch.arange(len(tree[keys[0]])) for keys in names]
    if all(map(torch.equal, places, whole)):
        return tree
    found: Tree = {}
    for i, (keys, units) in enumerate(zip(names, [*places, *whole[-1:]], strict=True)):
        for key in keys:
            value = tree[key]
            rows = value[units] if value.ndim else value
            if value.ndim > 1 and i:
                rows = as_weight(columns(rows, len(whole[i - 1]))[..., places[i - 1]], value)
            found[key] = empty(value, rows.shape).copy_(rows)
    return found


def columns(weight: Tensor, units: int) -> Tensor:
    """A weight as [out, taps, units]: what lies at the units of the layer before is last.

    A convolution has its kernel's places as taps; a linear layer behind one, the pixels, since the
    encoder flattens all channels of a pixel before those of the next.
    """
    return weight.movedim(1, -1).reshape(len(weight), -1, units)


def as_weight(columns: Tensor, like: Tensor) -> Tensor:
    """What `columns` made of a weight, as a weight again."""
    if like.ndim == 2:
        return columns.flatten(1)
    return columns.unflatten(1, like.shape[2:]).movedim(-1, 1)
