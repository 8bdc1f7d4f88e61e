"""Audits of what is shipped: the release by its own code, and a finished run by attacks on it.

`attack` reads the records that the run trained on, and its picture shows some of them: both stay
where the data are.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import ge
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from feddpms import config, records
from feddpms.algorithms import FedDPMS
from feddpms.algorithms.fit import load as with_weights
from feddpms.config import Run
from feddpms.data import Dataset, load
from feddpms.errors import ConfigError, RunFolderError
from feddpms.models import split, trunk
from feddpms.prepare import prepare
from feddpms.privacy import Account, Privacy, calibrate, class_statistics, histogram, source
from feddpms.privacy.attack import Membership, auc_limit, membership, nearest
from feddpms.privacy.audit import ReleaseAudit, audit
from feddpms.privacy.mechanism import Histogram
from feddpms.privacy.release import shape
from feddpms.report import plots
from feddpms.rng import Rng
from feddpms.synthesis import Drawing, encode, generate
from feddpms.types import Shard, Task, Tree

CLASSES = 2
MOST = 10_000
"""records of each side that an attack looks at, at the most"""
MADE = 200
"""synthetic images of each class that an attack draws from each release"""
COLUMNS = 8
"""classes on the picture, at the most"""


def audit_release(
    privacy: Privacy, latent: int, size: int, count: int, seed: int = 0
) -> ReleaseAudit:
    """Audit the product's own release on its worst pair of neighbours.

    Every call goes through `histogram` and `class_statistics` with an account of its own, as a
    client's release does.

    Args:
        privacy: target and shape; without private training.
        latent: latent length.
        size: records of the class that a record joins.
        count: releases on each side.
        seed: of a seeded source.

    Raises:
        ConfigError: the paper's release, which makes no claim.
    """
    if privacy.release == "paper":
        raise ConfigError(
            "expected a release with a claim, got paper; see feddpms calibrate --paper"
        )
    pair = worst_pair(privacy, latent, size)
    stream = Rng(seed).numpy("audit")

    def draw(present: bool) -> np.ndarray:
        codes, labels = pair[present]
        account, noise = Account(privacy), lambda channel: source(privacy.noise, stream)
        values, _ = class_statistics(codes, labels, CLASSES, privacy, False, account, noise, 1)
        counts, _ = histogram(labels, CLASSES, privacy, account, noise, 1)
        return torch.cat([values.flatten(), counts]).numpy()

    base, moved = (_exact(privacy, *side) for side in pair)
    claimed = (privacy.target_epsilon, privacy.target_delta)
    return audit(draw, base, moved - base, _stds(privacy, latent), count, *claimed)


def worst_pair(privacy: Privacy, latent: int, size: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Neighbours that move the release furthest: records in opposite corners of the cube.

    Returns:
        Codes [n, latent] and labels [n], without and with the record.
    """
    zeros, one = torch.zeros(2 * size, latent), torch.ones(1, latent)
    labels = torch.arange(2 * size) % CLASSES
    with_one = torch.cat([one, zeros])
    if privacy.adjacency == "add_remove":
        return (zeros, labels), (with_one, torch.cat([torch.tensor([0]), labels]))
    if privacy.release == "class_sum":  # replaced within its class, from corner to corner
        return (torch.cat([zeros[:1], zeros]), torch.cat([torch.tensor([0]), labels])), (
            with_one,
            torch.cat([torch.tensor([0]), labels]),
        )
    return tuple((with_one, torch.cat([torch.tensor([c]), labels])) for c in (0, 1))


def _exact(privacy: Privacy, codes: Tensor, labels: Tensor) -> np.ndarray:
    """The release without noise."""
    values = shape(privacy, codes.shape[1]).value(codes, labels, CLASSES)
    counts = Histogram(privacy.adjacency).value(labels, CLASSES)
    return torch.cat([values.flatten(), counts]).numpy()


def _stds(privacy: Privacy, latent: int) -> np.ndarray:
    """Standard deviation of each coordinate's noise, as claimed."""
    multipliers, statistic = calibrate(privacy), shape(privacy, latent)
    counts = Histogram(privacy.adjacency)
    return np.repeat(
        [
            multipliers.latent * statistic.l2_sensitivity,
            multipliers.counts * counts.l2_sensitivity,
        ],
        [CLASSES * latent, CLASSES],
    )


@dataclass(frozen=True)
class Attacks:
    """What attacks on a finished run found.

    Attributes:
        model: membership by the final model's loss (Yeom et al. 2018).
        synthetic: membership by the distance to the nearest synthetic image; None without any, or
            without a decoder to make them.
        means: membership by the distance of a record's code, under the final model, to its class's
            nearest released mean; None without any.
        baseline: membership by the images alone, which no model was needed for; far from 1/2 it
            says that members and others differ, and the rows above mean less.
        limit: AUC that no attack on the releases alone can exceed, since they are mu-GDP; None
            without any, or for the paper's.
        picture: what an eavesdropper decodes from the released means; None without any, or without
            a decoder: one that it trains on images of its own is not tried.
    """

    model: Membership
    synthetic: Membership | None
    means: Membership | None
    baseline: Membership
    limit: float | None
    picture: Path | None


def attack(folder: Path) -> Attacks:
    """Attack a finished run: is a record one of those it was trained on?

    Members are the clients' records, others the test set. Writes `attack.json`, and `attack.png`
    if anything was released and can be decoded.

    Raises:
        FeddpmsError: the folder is not that of a finished run, or its data cannot be read.
    """
    settings = config.parse(config.load(folder / "run.toml"))
    if settings.method.about.scope == "local":
        raise ConfigError(
            "expected a run with a model that was sent, got local, which sends none; audit another"
        )
    data = load(settings.data, Rng(settings.seed))
    prepared = prepare(settings, data, train=False)
    rng, shards = Rng(settings.seed).at("attack"), prepared.shards
    pooled = Shard(torch.cat([s.x for s in shards]), torch.cat([s.y for s in shards]))
    members = _some(pooled, rng.torch("members"))
    others = _some(data.test, rng.torch("others"))
    released = _released(folder / "released.safetensors", prepared.task)
    decodes = bool(released) and _trains_a_decoder(settings)
    net = _loaded(prepared.net, folder / "model.safetensors", decodes).eval()
    made = _draw(settings, net, released, rng) if decodes else None
    found = Attacks(
        model=membership(-_losses(net, members), -_losses(net, others)),
        synthetic=_by_distance(members, others, made) if made else None,
        means=_by_code(net, members, others, released) if released else None,
        baseline=_baseline(members, others),
        limit=_limit(settings.privacy) if released else None,
        picture=folder / "attack.png" if made else None,
    )
    plain = {k: v for k, v in asdict(found).items() if k != "picture"}
    plain["simulated"] = settings.privacy.noise == "seeded"
    try:
        if found.picture:
            drawn = _picture(net, data, shards, released, plain["simulated"])
            records.write_file(found.picture, drawn)
        said = json.dumps(plain, indent=2) + "\n"
        records.write_file(folder / "attack.json", said.encode())
    except OSError as error:
        raise RunFolderError(f"cannot write to {folder}: {error.strerror}; mend it") from None
    return found


def _limit(privacy: Privacy) -> float | None:
    """The limit of an attack on histogram and latent means."""
    return None if privacy.release == "paper" else auc_limit(1 / calibrate(privacy).total)


def _read(file: Path) -> Tree:
    """The tensors of a file of a run folder."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"expected a finished run with {file.name} in {file.parent}: {error}"
        ) from None


def _loaded(net, file: Path, decodes: bool):
    """The network with the weights of a run, all that it predicts (and decodes) with."""
    tree, whole = _read(file), net.state_dict()
    needed = {*trunk(whole), *(split(whole)[1] if decodes else {})}
    fits = needed <= tree.keys() <= whole.keys()
    if not fits or not all(_holds(v.shape, whole[k].shape) for k, v in tree.items()):
        raise RunFolderError(f"expected the model of run.toml at {file}, got another; restore it")
    return with_weights(net, tree)


def _holds(shape: Sequence[int], own: Sequence[int]) -> bool:
    """Whether an entry of this shape can be one of the network; matched neurons may be more."""
    return len(shape) == len(own) and all(map(ge, shape, own))


def _released(file: Path, task: Task) -> dict[int, Tree]:
    """What each client released under noise; empty if nobody did."""
    trees: dict[int, Tree] = {}
    for name, value in (_read(file) if file.exists() else {}).items():
        client, _, key = name.partition(".")
        trees.setdefault(int(client) if client.isdecimal() else -1, {})[key] = value
    for client, tree in trees.items():
        classes, means = tree.get("classes"), tree.get("means")
        if (
            not 0 <= client < task.clients
            or classes is None
            or means is None
            or means.shape != (len(classes), task.latent)
            or not means.isfinite().all()
            or not all(0 <= c < task.classes for c in classes.tolist())
        ):
            raise RunFolderError(
                f"expected what the clients of run.toml released at {file}, got something else; "
                "restore it"
            )
    return {c: tree for c, tree in sorted(trees.items()) if len(tree["means"])}


def _some(shard: Shard, stream: torch.Generator) -> Shard:
    """Up to MOST records, taken at random."""
    chosen = torch.randperm(len(shard), generator=stream)[:MOST]
    return Shard(shard.x[chosen], shard.y[chosen])


def _losses(net, shard: Shard) -> np.ndarray:
    """Cross entropy of each record."""
    with torch.no_grad():
        parts = zip(shard.x.split(500), shard.y.split(500), strict=True)
        each = [F.cross_entropy(net(x), y, reduction="none") for x, y in parts]
    return torch.cat(each).nan_to_num(1e30).numpy()


def _trains_a_decoder(settings: Run) -> bool:
    """Whether what was released can be decoded by what was sent."""
    method = settings.method
    return not isinstance(method, FedDPMS) or method.secondary == "train"


def _draw(settings: Run, net, released: dict[int, Tree], rng: Rng) -> Shard:
    """Synthetic images, as anyone can draw them from the released means and the decoder."""
    method = settings.method
    spread = method.synthesis.spread if isinstance(method, FedDPMS) else 0.3
    drawing = Drawing(per_class=MADE, amount="per_class", spread=spread)
    made = [generate(net, t, drawing, rng.torch("draw", c)).shard for c, t in released.items()]
    return Shard(torch.cat([s.x for s in made]), torch.cat([s.y for s in made]))


def _by_distance(members: Shard, others: Shard, made: Shard) -> Membership:
    """Membership by the distance to the nearest synthetic image."""
    pool = made.x.flatten(1).numpy()
    inside, outside = (-nearest(s.x[:2000].flatten(1).numpy(), pool) for s in (members, others))
    return membership(inside, outside)


def _by_code(net, members: Shard, others: Shard, released: dict[int, Tree]) -> Membership:
    """Membership by the distance of a record's code to the nearest mean of its class."""
    means = torch.cat([t["means"] for t in released.values()]).numpy()
    classes = torch.cat([t["classes"] for t in released.values()]).numpy()

    def scores(shard: Shard) -> np.ndarray:
        codes, labels = encode(net, shard.x).numpy(), shard.y.numpy()
        held = [c for c in np.unique(classes) if (labels == c).any()]
        return np.concatenate([-nearest(codes[labels == c], means[classes == c]) for c in held])

    return membership(scores(members), scores(others))


def _baseline(members: Shard, others: Shard) -> Membership:
    """Membership by a linear rule on the images, fitted on one half and tried on the other."""
    sides = [s.x[:4000].flatten(1).double().numpy() for s in (members, others)]
    fit = [x[::2] for x in sides]
    x = np.concatenate(fit)
    centre = x.mean(0)
    y = np.concatenate([np.ones(len(fit[0])), -np.ones(len(fit[1]))])
    gram = (x - centre).T @ (x - centre) + len(x) * 1e-2 * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, (x - centre).T @ (y - y.mean()))
    inside, outside = ((side[1::2] - centre) @ weights for side in sides)
    return membership(inside, outside)


def _picture(
    net, data: Dataset, shards: list[Shard], released: dict[int, Tree], simulated: bool
) -> bytes:
    """Decoded means of the client that released most classes, beside its records."""
    client = max(released, key=lambda c: len(set(released[c]["classes"].tolist())))
    tree, own = released[client], shards[client]
    codes = encode(net, own.x)
    rows: dict[str, list[np.ndarray]] = {}
    names = []
    for c in sorted(set(tree["classes"].tolist()))[:COLUMNS]:
        mine, mean = own.y == c, tree["means"][tree["classes"] == c][:1]
        if not mine.any():
            continue
        names.append(data.classes[c])
        with torch.no_grad():
            decoded = net.decode(mean)[0]
        close = nearest(mean.numpy(), codes[mine].numpy())
        gaps = (codes[mine] - mean).norm(dim=1)
        assert np.isclose(float(gaps.min()), close[0], atol=1e-3)
        for name, image in (
            ("decoded from the release", decoded),
            ("mean of the records", own.x[mine].mean(0)),
            ("nearest record", own.x[mine][int(gaps.argmin())]),
            ("furthest record", own.x[mine][int(gaps.argmax())]),
        ):
            rows.setdefault(name, []).append(image.numpy())
    title = f"Client {client}: what an eavesdropper decodes, beside records that it never saw"
    title += " (simulated)" * simulated
    return plots.grid_png({k: np.stack(v) for k, v in rows.items()}, names, title)
