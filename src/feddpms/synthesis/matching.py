"""Which client helps which, decided at the server from released values only."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from feddpms.errors import ConfigError
from feddpms.types import Task, Tree, settings

Release = Tree
"""What a client released: `classes` [r], `means` [r, latent], `counts` [classes], and `spreads` as
`means` if they were released."""


@settings
class Matching:
    """Who helps whom, with what."""

    kind: Literal["cover", "pair"] = "cover"
    """means from every client that released a needed class, or from one partner (the paper)"""
    top_n: Annotated[int, Ge(0)] = 0
    """release only the n most abundant classes (the paper); 0 for all that are large enough"""
    bottom_n: Annotated[int, Ge(0)] = 0
    """need the n least abundant classes (the paper); 0 for those below `scarce_below`"""
    scarce_below: Annotated[float, Gt(0)] = 0.5
    """a class is needed if its noisy count is under this fraction of the client's mean count"""


def preliminary_rounds(chosen: int, task: Task, part: float = 0.4) -> int:
    """T_p, the rounds before clients share; `chosen` 0 takes a part of all, and leaves one.

    Raises:
        ConfigError: no round is left after them.
    """
    before = chosen or max(1, min(round(part * task.rounds), task.rounds - 1))
    if before < task.rounds:
        return before
    raise ConfigError(
        f"method.preliminary_rounds must be below rounds ({task.rounds}), got {before}; lower it "
        "or run more rounds"
    )


def match(
    matching: Matching, client: int, bank: Mapping[int, Release], served: frozenset[int]
) -> Tree:
    """The released means that a client needs and has not been served.

    Args:
        matching: the rules.
        client: the client in need; it has released.
        bank: releases by client.
        served: classes that were sent to it before.

    Returns:
        A tree with `classes` int64 [m], `means` [m, latent], if they were released `spreads`
        [m, latent], and `deficits` int64 [m], how many examples of the class the client lacks to
        its mean count, at least 1; empty if there is nothing to send.
    """
    counts = bank[client]["counts"]
    need = scarce(counts, matching) - served
    sources = (cover if matching.kind == "cover" else pair)(need, client, bank)
    rows = [_rows(bank[j], c) for c, js in sources.items() for j in js]
    if not rows:
        return {}
    tree = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    lacking = counts.clamp(min=0).mean() - counts[tree["classes"]].clamp(min=0)
    return {**tree, "deficits": lacking.round().long().clamp(min=1)}


def scarce(counts: Tensor, matching: Matching) -> frozenset[int]:
    """The classes that a noisy histogram [classes] calls scarce."""
    if matching.bottom_n:
        return frozenset(counts.argsort(stable=True)[: matching.bottom_n].tolist())
    limit = matching.scarce_below * counts.clamp(min=0).mean()
    return frozenset((counts < limit).nonzero().flatten().tolist())


def pair(need: frozenset[int], client: int, bank: Mapping[int, Release]) -> dict[int, list[int]]:
    """The paper's matching: the one client that released most of what is needed.

    Args:
        need: classes that the client needs.
        client: the client in need.
        bank: releases by client.

    Returns:
        Sources of each class; of equal partners the lowest number; nothing at overlap 0.
    """
    have = {j: need & set(r["classes"].tolist()) for j, r in sorted(bank.items()) if j != client}
    partner = max(have, key=lambda j: len(have[j]), default=None)
    return {} if partner is None else {c: [partner] for c in sorted(have[partner])}


def cover(need: frozenset[int], client: int, bank: Mapping[int, Release]) -> dict[int, list[int]]:
    """Every other client that released a needed class, so that the union covers what is lacking.

    Args and Returns: as `pair`.
    """
    sources: dict[int, list[int]] = {}
    for j, released in sorted(bank.items()):
        for c in sorted(set(released["classes"].tolist())):
            if c in need and j != client:
                sources.setdefault(c, []).append(j)
    return dict(sorted(sources.items()))


def _rows(released: Release, c: int) -> Tree:
    """What was released for class c."""
    places = released["classes"] == c
    return {k: v[places] for k, v in released.items() if k != "counts"}
