"""Noisy class means -> synthetic examples. Post-processing: no argument holds private data."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from feddpms.clock import clock
from feddpms.types import Shard, Tree, settings


@settings
class Drawing:
    """How many synthetic examples are drawn, and how."""

    per_class: Annotated[int, Ge(0), Le(100_000)] = 100
    """synthetic examples of each needed class, at the most"""
    amount: Literal["deficit", "per_class"] = "deficit"
    """fill a class up to the client's mean count, by its noisy histogram; or per_class of each"""
    spread: Annotated[float, Ge(0)] | Literal["released"] = 0.3
    """tau: public standard deviation of a draw around a released mean; released: the data's own,
    by noisy second moments in the same release"""
    filter: Literal["none", "global"] = "none"
    """keep every draw, or only what the global classifier calls by its class"""
    tries: Annotated[int, Ge(1), Le(10_000)] = 10
    """passes of the filter at the most; each decodes what is still missing"""
    weight: Annotated[float, Gt(0)] = 1.0
    """weight of a synthetic example in the loss"""


@dataclass(frozen=True)
class Synthesis:
    """Synthetic examples, and how hard they were to get.

    Attributes:
        shard: the accepted examples, in the order of their classes.
        tried: images decoded.
        accepted: images that passed the filter.
    """

    shard: Shard
    tried: int
    accepted: int


def extend(
    old: Shard | None, net, matched: Tree, drawing: Drawing, rng: torch.Generator
) -> tuple[Shard, dict[str, float]]:
    """A client's synthetic examples with those of newly matched means, and the counts to report.

    Args: `old` is what was made before; the others as for `generate`.
    """
    with clock.part("synthesis"):
        made = generate(net, matched, drawing, rng)
        shard = made.shard
        if old is not None:
            shard = Shard(torch.cat([old.x, shard.x]), torch.cat([old.y, shard.y]), shard.weight)
    return shard, {"synthetic_tried": made.tried, "synthetic_kept": made.accepted}


def generate(net, matched: Tree, drawing: Drawing, rng: torch.Generator) -> Synthesis:
    """Decode z = mean + spread * N(0, I) and keep what passes the filter.

    The filter `global` drops the very classes that the global classifier does not know yet.

    Args:
        net: a network that holds the global weights and the global decoder.
        matched: `classes` [m], `means` [m, latent], for the amount `deficit` `deficits` [m] and for
            the spread `released` `spreads` [m, latent]; several means of a class are used in turn.
        drawing: number (at least 1), spread and cap.
        rng: stream of the draws.

    Returns:
        The amount of each class, or less where the filter is hard to pass.
    """
    was_training = net.training
    net.eval()
    missing = _amounts(matched, drawing)
    images, labels, tried = [], [], 0
    for _ in range(drawing.tries):
        wanted = matched["classes"].new_tensor([c for c, n in missing.items() for _ in range(n)])
        decoded = _decode(net, matched, missing, drawing, rng)
        right = _passes(net, decoded, wanted, drawing.filter)
        images.append(decoded[right])
        labels.append(wanted[right])
        tried += len(wanted)
        for c in labels[-1].tolist():
            missing[c] -= 1
        if not any(missing.values()):
            break
    net.train(was_training)
    y = torch.cat(labels)
    by_class = y.argsort(stable=True)
    return Synthesis(Shard(torch.cat(images)[by_class], y[by_class], drawing.weight), tried, len(y))


def _amounts(matched: Tree, drawing: Drawing) -> dict[int, int]:
    """How many examples of each class to make, by class."""
    classes, most = matched["classes"].tolist(), drawing.per_class
    if drawing.amount == "per_class":
        return dict.fromkeys(sorted(set(classes)), most)
    lacking = zip(classes, matched["deficits"].tolist(), strict=True)
    return {c: min(most, n) for c, n in sorted(set(lacking))}


def _decode(net, matched: Tree, missing: dict[int, int], drawing: Drawing, rng) -> Tensor:
    """One image for each missing example, by class."""
    rows = [_rows(matched["classes"], c, n) for c, n in missing.items() if n]
    chosen = torch.cat(rows)
    means = matched["means"][chosen]
    spread = matched["spreads"][chosen] if drawing.spread == "released" else drawing.spread
    noise = torch.randn(means.shape, generator=rng, dtype=means.dtype).to(means.device)
    with torch.no_grad():
        return net.decode((means + spread * noise).clamp(0, 1))


def _passes(net, images: Tensor, labels: Tensor, rule: str) -> Tensor:
    """Whether each image passes the filter."""
    if rule == "none":
        return torch.ones_like(labels, dtype=torch.bool)
    with torch.no_grad():
        return net(images).argmax(1) == labels


def _rows(classes: Tensor, c: int, n: int) -> Tensor:
    """Take n places in `classes` that hold c, taking several in turn."""
    places = (classes == c).nonzero().flatten()
    return places.repeat(-(-n // len(places)))[:n]
