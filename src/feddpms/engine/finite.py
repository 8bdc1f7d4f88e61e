"""Whether what was sent or averaged are numbers: what is not finite must not be averaged."""

import math
from collections.abc import Mapping

import torch

from feddpms.engine.grid import unfold
from feddpms.types import Message, Tree

NAMED = 8
"""clients that are named, at the most"""


def all_finite(tree: Tree) -> bool:
    """Whether every value of a tree is finite."""
    values = [v.reshape(-1) for v in tree.values() if v.is_floating_point()]
    return not values or bool(torch.cat(values).isfinite().all())


def not_finite(replies: Mapping[int, Message]) -> str:
    """What in the replies is not finite, and who sent it: `model of clients 0, 2 not finite`.

    Args:
        replies: by client.

    Returns:
        The words; empty if everything is finite.
    """
    found = {c: names for c, reply in sorted(replies.items()) if (names := _broken(reply))}
    if not found:
        return ""
    what = ", ".join(dict.fromkeys(name for names in found.values() for name in names))
    who = ", ".join(map(str, list(found)[:NAMED]))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{what} of client{'s' if len(found) > 1 else ''} {who}{more} not finite"


def _broken(reply: Message) -> list[str]:
    """The names of a reply's trees and numbers that are not finite, at any depth."""
    names = []
    for message in unfold(reply):
        names += [name for name, tree in message.trees.items() if not all_finite(tree)]
        names += [name for name, value in message.numbers.items() if not math.isfinite(value)]
    return names
