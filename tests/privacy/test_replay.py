"""Whole client paths on neighbouring data sets, and what the same harness says of planted bugs."""

import copy
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from plant import planted
from replay import ODD, Pair, Path, Side, Violation, check, difference
from torch import Tensor

from feddpms.algorithms import FedAvg, FedDPMS, FedProx, Moon, Training, batches, fit, private
from feddpms.algorithms.fit import load
from feddpms.models import NetSettings, VaeSettings, build, split, trunk
from feddpms.privacy import Account, DpTraining, Privacy, mechanism, release
from feddpms.privacy.dpsgd import ClippedGradients
from feddpms.privacy.mechanism import ClassSums, FixedMeans, Histogram
from feddpms.rng import Rng
from feddpms.synthesis import Drawing, Matching, encode, means
from feddpms.types import Memory, Message, Shard, Task, Tree
from small import CLASSES, GOES_ON, client

TASK = Task(classes=CLASSES, clients=3, rounds=4, latent=6)
M, LEAST, BATCH = 4, 3, 8
"""records in a fixed mean, least count of a class, expected batch size: all within reach"""
BASE = {
    "target_epsilon": 50.0,
    "count_noise_multiplier": 0.5,
    "min_class_count": float(LEAST),
    "l2_clip": 0.6,  # half the radius of the cube, so that corners are clipped
    "mean_size": M,
}
TRAINING = DpTraining(kind="dpsgd", l2_clip=0.1, expected_batch_size=BATCH, expected_examples=16)
PAID = {"weights": "noisy", "training": TRAINING}
LOCAL = Training(epochs=1, batch_size=8, lr=0.05)
MANY = 200

needs_opacus = pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")


@pytest.fixture(autouse=True, scope="module")
def quick_calibration():
    """Multipliers that are asked for again and again; their size is tested elsewhere."""
    module = importlib.import_module("feddpms.privacy.calibrate")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "get_sigma_gaussian", cache(module.get_sigma_gaussian))
        monkeypatch.setattr(module, "training_multiplier", lambda *_: 1.0)
        yield


@cache
def built(norm: str):
    """Batch norm on 4x4 images; group norm on 8x8, where it has more than one value a group."""
    side = 4 if norm == "batch" else 8
    settings = NetSettings(width=0.25, latent=6, hidden=8, norm=norm)
    net = build((1, side, side), CLASSES, settings, Rng(0))
    return net, {k: v.clone() for k, v in net.state_dict().items()}


def network(norm: str):
    """The same small network again, as it was built."""
    net, tree = built(norm)
    return load(net, tree).train()


@cache
def images(norm: str) -> Tensor:
    side = 4 if norm == "batch" else 8
    g = torch.Generator().manual_seed(4)
    return torch.rand(MANY, 1, side, side, generator=g)


@cache
def broadcast(norm: str, steepness: float = 20.0) -> Tree:
    """A model chosen by an adversary: codes of ordinary images lie in the corners of the cube."""
    net, x = network(norm).eval(), images(norm)
    with torch.no_grad():
        h = net.mean(net.encoder(x))
        scale = steepness / h.std(0)
        net.mean.weight.mul_(scale[:, None])
        net.mean.bias.sub_(h.median(0).values).mul_(scale)
    return {k: v.clone() for k, v in net.state_dict().items()}


@cache
def far(norm: str) -> tuple[Tensor, Tensor]:
    """The two images whose codes are furthest apart under the broadcast model."""
    codes = encode(load(network(norm), broadcast(norm)), images(norm))
    i, j = divmod(int(torch.cdist(codes, codes).argmax()), MANY)
    return images(norm)[i], images(norm)[j]


# Pairs


COUNTS = [
    (2, 3, 3),  # a tie, and a class one short of it and of being released
    (0, 4, 4),  # an empty class, and a tie of classes that are full for a fixed mean
    (1, 5, 2),  # a class of one
    (8, 0, 0),  # as many as a batch is expected to have
    (0, 0, 0),
    (5, 4, 3),
]
KINDS = ["corner", "ordinary", "outlier", "nan", "inf"]


def odd_image(kind: str, norm: str, seed: int) -> Tensor:
    image = images(norm)[seed % MANY].clone()
    if kind == "outlier":
        return image * (1e6 if seed % 2 else -1e6)
    if kind in ("nan", "inf"):
        image[0, 0, 0] = float(kind)
        return image
    return far(norm)[1] if kind == "corner" else image


def common(counts, kind: str, norm: str, seed: int) -> Shard:
    """The common records, classes mixed; opposite the odd one if that is in a corner."""
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor([c for c, n in enumerate(counts) for _ in range(n)], dtype=torch.int64)
    y = y[torch.randperm(len(y), generator=g)]
    x = images(norm)[torch.randint(MANY, (len(y),), generator=g)].clone()
    if kind == "corner":
        x[:] = far(norm)[0]
    if kind == "nan" and len(y) > 1:  # both neighbours have one, in a class of any size
        x[-1] = torch.nan
    return Shard(x, y)


def side(shard: Shard, place: int, image: Tensor | None, label: int = 0) -> Side:
    """The shard with the odd record put in at a place, or without it."""
    ids = torch.arange(len(shard))
    if image is None:
        return Side(shard, ids)
    put = lambda a, one: torch.cat([a[:place], one, a[place:]])  # noqa: E731
    x, y = put(shard.x, image[None]), put(shard.y, torch.tensor([label]))
    return Side(Shard(x, y), put(ids, torch.tensor([ODD])))


@cache
def neighbours(norm: str, adjacency: str) -> list[Pair]:
    """Each of: counts, kind of image, label, first or last place; directions and coins in turn."""
    pairs = []
    cases = itertools.product(COUNTS, KINDS, range(CLASSES), ("last", "first"))
    for i, (counts, kind, label, where) in enumerate(cases):
        rest = common(counts, kind, norm, i)
        place = 0 if where == "first" else len(rest)
        one = side(rest, place, odd_image(kind, norm, i), label)
        other = side(rest, place, None)
        if adjacency == "replace_one":
            before = far(norm)[0] if kind == "corner" else odd_image("ordinary", norm, i + 1)
            other = side(rest, place, before, (label + i // 2 % 2) % CLASSES)
        left, right = (one, other) if i % 2 else (other, one)
        coin = ("in", "in", "turns", "out")[i // 6 % 4]
        pairs.append(Pair(f"{counts} {kind} {label} {where} {coin}", left, right, coin))
    return pairs


def some(pairs: list[Pair], n: int) -> list[Pair]:
    """N of the pairs, spread over all kinds: the step has no factor with the period of a kind."""
    return [pairs[i * 37 % len(pairs)] for i in range(n)]


# Paths


def marked(tree: Tree, shard: Shard) -> Tree:
    """Weights that depend on the records, as local training leaves them, for any number of them."""
    total = shard.x.nan_to_num(7.0, 9.0, -9.0).clamp(-10, 10).sum() / 50
    total = total + (shard.y * torch.arange(1, len(shard) + 1)).sum() / 50
    return {k: v + total.sin().to(v.dtype) if v.is_floating_point() else v for k, v in tree.items()}


def share_path(
    privacy: Privacy,
    norm: str = "batch",
    method: FedDPMS | None = None,
    model: Tree | None = None,
) -> Path:
    """The share exchange of a client that has trained without protection, so it alone is seen."""
    method = method or FedDPMS(**GOES_ON, preliminary_rounds=1)
    ask, calls = Message("share", {"model": model or broadcast(norm)}), itertools.count()

    def path(shard: Shard) -> Iterator[Message | Account]:
        rng = Rng(next(calls) // 2)  # other noise for each pair, so that any side of a bound is met
        local = marked(network(norm).state_dict(), shard)
        inner = Memory({"previous": local})
        me = client(shard, load(network(norm), local), round=2, task=TASK, privacy=privacy)
        memory = Memory({"local": local}, inner=inner)
        me = replace(me, memory=memory, rng=rng.at("client", 0, 2))
        reply, memory = method.client(ask, me)
        yield reply
        yield me.account
        if norm == "group":  # asked again in a later round, it sends the same
            later = replace(me, round=3, memory=memory, rng=rng.at("client", 0, 3))
            yield method.client(ask, later)[0]

    return path


def matched(released: bool) -> Tree:
    """Means of other clients' releases."""
    tree = {"classes": torch.tensor([0, 2, 2]), "means": torch.rand(3, 6, generator=Rng(0).torch())}
    tree["deficits"] = torch.tensor([5, 2, 2])
    return {**tree, "spreads": torch.full((3, 6), 0.1)} if released else tree


def dpms_path(privacy: Privacy, method: FedDPMS, later: int = 1) -> Path:
    """Preparation, share, and rounds of training with synthetic examples: all that leaves."""
    model = broadcast("group", 1.0)
    rest, decoder = split(model)
    trees = {"decoder": decoder}
    means = {"matched": matched(method.synthesis.spread == "released"), **trees}
    train = Message("train", {"model": trunk(model)})
    prepare = Message("train", {"model": rest})
    asks = [
        Message("vae", trees, {"send_decoder": 1}, inner=prepare),
        Message("share", {"model": broadcast("group")}),
        Message("classify", means, inner=train),
        *[Message("classify", inner=train)] * (later - 1),
    ]
    return conversation(privacy, method, asks)


def train_path(privacy: Privacy, method) -> Path:
    """Two rounds of a training method; MOON's contrast is on in the second."""
    return conversation(privacy, method, [Message("train", {"model": broadcast("group", 1.0)})] * 2)


def conversation(privacy: Privacy, method, asks: list[Message]) -> Path:
    def path(shard: Shard) -> Iterator[Message | Account]:
        net, account, memory = network("group"), Account(privacy), Memory()
        for round, ask in enumerate(asks, 1):
            me = client(shard, net, round, task=TASK, privacy=privacy, local=LOCAL, account=account)
            reply, memory = method.client(ask, replace(me, memory=memory))
            yield reply
        yield account

    return path


# The product


def small_dpms(**more) -> FedDPMS:
    values = {**GOES_ON, "preliminary_rounds": 1, "vae": VaeSettings(weight=0.05)}
    return FedDPMS(**{**values, "synthesis": Drawing(per_class=3), **more})


SPREAD = Drawing(per_class=3, spread="released")
FIXED, REPLACE = {"release": "fixed_m_mean"}, {"adjacency": "replace_one"}
SHARES: dict[str, tuple[dict, FedDPMS | None]] = {
    "class sums": ({}, None),
    "class sums, replace": (REPLACE, None),
    "fixed means": (FIXED, None),
    "fixed means, replace": ({**FIXED, **REPLACE}, None),
    "second moments": ({}, small_dpms(synthesis=SPREAD)),
    "second moments, replace": (REPLACE, small_dpms(synthesis=SPREAD)),
    "two classes": ({}, small_dpms(matching=Matching(top_n=2))),
}
PATHS: dict[str, tuple[dict, Callable[[Privacy], Path]]] = {
    "feddpms": ({}, lambda p: dpms_path(p, small_dpms())),
    "feddpms, replace": (REPLACE, lambda p: dpms_path(p, small_dpms())),
    "feddpms, fixed means": (FIXED, lambda p: dpms_path(p, small_dpms())),
    "feddpms, second moments": ({}, lambda p: dpms_path(p, small_dpms(synthesis=SPREAD))),
    "feddpms+moon": ({}, lambda p: dpms_path(p, small_dpms(inner=Moon()), later=2)),
    "fedavg": ({}, lambda p: train_path(p, FedAvg())),
    "fedavg, replace": (REPLACE, lambda p: train_path(p, FedAvg())),
    "fedprox": ({}, lambda p: train_path(p, FedProx(mu=0.1))),
    "moon": ({}, lambda p: train_path(p, Moon())),
}


def share_case(name: str, norm: str = "batch") -> tuple[Path, list[Pair]]:
    changes, method = SHARES[name]
    privacy = Privacy(**{**BASE, **changes})
    return share_path(privacy, norm, method), neighbours(norm, privacy.adjacency)


def paid_case(name: str) -> tuple[Path, list[Pair]]:
    changes, path = PATHS[name]
    privacy = Privacy(**{**BASE, **PAID, **changes})
    return path(privacy), neighbours("group", privacy.adjacency)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", SHARES)
def test_a_share_tells_no_more_than_was_paid_for(name, norm):
    path, pairs = share_case(name, norm)
    for pair in pairs if (name, norm) == ("class sums", "batch") else some(pairs, 20):
        assert check(path, pair) == 2, pair.name


EVERY = list(PATHS)


@needs_opacus
@pytest.mark.parametrize("name", EVERY)
def test_a_private_run_tells_no_more_than_was_paid_for(name):
    path, pairs = paid_case(name)
    steps = LOCAL.epochs * TRAINING.steps_per_epoch
    for pair in some(pairs, 8 if name == "feddpms" else 4):
        assert check(path, pair) > 2 * steps, pair.name  # and the releases


@pytest.mark.skipif(not importlib.util.find_spec("opendp"), reason="needs OpenDP")
def test_a_share_with_secure_noise_tells_no_more_either():
    """No seed repeats this noise: what is recorded is forced all the same."""
    path = share_path(Privacy(**{**BASE, "noise": "secure"}))
    for pair in some(neighbours("batch", "add_remove"), 10):
        assert check(path, pair) == 2, pair.name


def aimed(norm: str) -> tuple[Tree, Pair]:
    """A model by an adversary who knows a record, and a neighbour with one record more.

    The model cuts between what the latent layer gives for the record alone, and in a batch of two.
    """
    net, x = load(network(norm), broadcast(norm)).eval(), images(norm)
    with torch.no_grad():
        latent = lambda rows: net.mean(net.encoder(x[rows]))[0]  # noqa: E731
        gaps = [(latent([i]) - latent([i, 0])).abs().sum() for i in range(MANY)]
        i = int(torch.stack(gaps).argmax())
        net.mean.bias.sub_(latent([i]))
        for p in net.mean.parameters():
            p.mul_(2.0**40)  # exact
    known = Shard(x[i : i + 1], torch.tensor([0]))
    odd = side(known, 1, x[0], 1)
    return {k: v.clone() for k, v in net.state_dict().items()}, Pair("", side(known, 1, None), odd)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_no_broadcast_model_makes_the_codes_of_common_records_differ(norm):
    model, pair = aimed(norm)
    check(share_path(Privacy(**BASE), norm, model=model), pair)


def test_the_digest_of_a_release_follows_from_the_seed():
    shard = share_case("class sums")[1][0].left.shard
    paths = [share_case("class sums")[0] for _ in range(15)]
    assert len({next(iter(path(shard))).events for path in paths}) == 1


# The harness on what is known to tell more


def caught(path: Path, pairs: list[Pair]) -> str:
    """The rule that the first pair to tell more breaks; "" if none does."""
    for pair in pairs:
        try:
            check(path, pair)
        except Violation as violation:
            return violation.rule
    return ""


def test_the_papers_release_tells_more():
    path, pairs = (
        share_path(Privacy(**{**BASE, "release": "paper"})),
        neighbours("batch", "add_remove"),
    )
    assert caught(path, some(pairs, 20))


def test_training_in_the_clear_tells_more():
    path, pairs = train_path(Privacy(**BASE), FedAvg()), neighbours("group", "add_remove")
    assert caught(path, some(pairs, 20)) == "sent"


# name: rule that catches it, case, then (function, old, new) of each change
Change = tuple[Callable | property, str, str]
CLASS_MEANS = "tree = class_means(values, counts, privacy.min_class_count, top_n, clip)"
EXACT = "torch.bincount(shard.y, minlength=classes)"
CLIP = "rows = rows * (self.l2_clip / norms.clamp(min=self.l2_clip))"
LOAD = """        net = load(me.net, ask.trees["model"])
        squares = self.synthesis.spread == "released"
        released, events = release(net, *common, squares, *paid)
"""
NORMS = "norms = rows.norm(dim=1, keepdim=True)"
GAUSSIAN = "gaussian(exact, statistic, multiplier, source)"
DRAW = f'return {{"values": {GAUSSIAN}}}'
ENCODED = """net.eval()
    with torch.no_grad():
        codes = torch.cat([net.code(part) for part in x.split(1)])"""
NOT_FINITE: Change = (
    mechanism._in_cube,
    "torch.where(codes.isfinite().all(1, keepdim=True), codes, CENTRE)",
    "codes",
)
BUGS: dict[str, tuple[str, str, list[Change]]] = {
    "sensitivity of one coordinate": (
        "value",
        "fixed means",
        [(FixedMeans.l2_sensitivity, "math.sqrt(both * self.latent)", "math.sqrt(both)")],
    ),
    "radius for diameter": (
        "value",
        "class sums, replace",
        [(ClassSums.l2_sensitivity, '(1 if self.adjacency == "add_remove" else 2)', "1")],
    ),
    "one class of two in a replacement": (
        "value",
        "fixed means, replace",
        [(FixedMeans.l2_sensitivity, '1 if self.adjacency == "add_remove" else 2', "1")],
    ),
    "one count of two in a replacement": (
        "value",
        "class sums, replace",
        [(Histogram.l2_sensitivity, 'if self.adjacency == "add_remove" else math.sqrt(2)', "")],
    ),
    "codes of the weights that were left in the network": (
        "value",
        "class sums",
        [(FedDPMS._share, 'net = load(me.net, ask.trees["model"])', "net = me.net")],
    ),
    "codes of the local model": (
        "value",
        "class sums",
        [
            (
                FedDPMS._share,
                'net = load(me.net, ask.trees["model"])',
                'net = load(me.net, {**ask.trees["model"], **me.memory.inner.trees["previous"]})',
            )
        ],
    ),
    "encoding in train mode": (
        "value",
        "class sums",
        [(encode, ENCODED, ENCODED.replace("eval", "train").replace("split(1)", "split(99)"))],
    ),
    "NaN let through": ("value", "class sums", [NOT_FINITE]),
    "NaN let through to fixed means": ("value", "fixed means", [NOT_FINITE]),
    "means of present classes": (
        "calls",
        "fixed means",
        [(FixedMeans.value, "for c in range(classes)", "for c in labels.unique()")],
    ),
    "counts of present classes": (
        "calls",
        "class sums",
        [(Histogram.value, "torch.bincount(labels, minlength=classes)", "labels.bincount()")],
    ),
    "classes with enough records": (
        "sent",
        "class sums",
        [
            (
                means.release,
                CLASS_MEANS,
                f"""{CLASS_MEANS}
        enough = {EXACT}[tree["classes"]] >= privacy.min_class_count
        tree = {{k: v if k == "counts" else v[enough] for k, v in tree.items()}}""",
            )
        ],
    ),
    "the truly most abundant classes": (
        "sent",
        "two classes",
        [
            (
                means.release,
                CLASS_MEANS,
                f"""tree = class_means(values, counts, privacy.min_class_count, 0, clip)
        top = {EXACT}.argsort(descending=True, stable=True)[:top_n]
        top = torch.isin(tree["classes"], top)
        tree = {{k: v if k == "counts" else v[top] for k, v in tree.items()}}""",
            )
        ],
    ),
    "exact counts sent": (
        "sent",
        "class sums",
        [(means.release, "return floats,", f'return {{**floats, "counts": {EXACT}}},')],
    ),
    "exact divisor of a sum": (
        "sent",
        "class sums",
        [
            (
                means.release,
                CLASS_MEANS,
                CLASS_MEANS.replace(
                    "(values", f"(values * counts[:, None] / ({EXACT} + 1)[:, None]"
                ),
            )
        ],
    ),
    "exact divisor of a mean": (
        "value",
        "fixed means",
        [
            (
                FixedMeans.value,
                "/ self.size",
                "/ torch.bincount(labels, minlength=classes).clamp(1, self.size)[:, None]",
            )
        ],
    ),
    "means that the local classifier calls by their class": (
        "sent",
        "class sums",
        [
            (
                FedDPMS._share,
                LOAD,
                LOAD
                + """        local = load(net, me.memory.trees["local"]).eval()
        right = local.classify(released["means"]).argmax(1) == released["classes"]
        released = {k: v if k == "counts" else v[right] for k, v in released.items()}
""",
            )
        ],
    ),
    "drawn again until it is near": (
        "paid",
        "class sums",
        [
            (
                release.class_statistics,
                DRAW,
                f"""noisy = {GAUSSIAN}
        while (noisy - exact).abs().max() > multiplier * statistic.l2_sensitivity:
            noisy = {GAUSSIAN}
        return {{"values": noisy}}""",
            )
        ],
    ),
    "drawn again by the records": (
        "calls",
        "class sums",
        [
            (
                release.class_statistics,
                DRAW,
                f"""if labels.bincount(minlength=classes).min() < 1:
            {GAUSSIAN}
        {DRAW}""",
            )
        ],
    ),
    "a norm printed": (
        "told",
        "class sums",
        [(ClassSums.value, NORMS, f"{NORMS}; print(norms.sum())")],
    ),
    "a count logged for debugging": (
        "told",
        "class sums",
        [
            (
                ClassSums.value,
                NORMS,
                f"{NORMS}; __import__('logging').getLogger('a').debug('%s', len(norms))",
            )
        ],
    ),
    "a warning about a class": (
        "told",
        "class sums",
        [
            (
                ClassSums.value,
                NORMS,
                f"{NORMS}; len(set(labels.tolist())) < 3 and __import__('warnings').warn('few')",
            )
        ],
    ),
    "a refusal of few records": (
        "raised",
        "class sums",
        [(means.release, CLASS_MEANS, f"{CLASS_MEANS}; 1 // len(shard.y)")],
    ),
    "the sum clipped": (
        "value",
        "class sums",
        [
            (
                ClassSums.value,
                f"{NORMS}\n    {CLIP}",
                f"""rows = rows.new_zeros(classes, rows.shape[1]).index_add(0, labels, rows)
    labels = torch.arange(classes)
    {NORMS}
    {CLIP}""",
            )
        ],
    ),
    "nothing clipped": ("value", "class sums", [(ClassSums.value, CLIP, "pass")]),
    "squares beside the clip": (
        "value",
        "second moments",
        [(ClassSums.value, NORMS, "norms = rows.chunk(2, 1)[0].norm(dim=1, keepdim=True)")],
    ),
    "a coordinate without noise": (
        "noise",
        "class sums",
        [
            (
                mechanism.gaussian,
                "return source.discrete(value, std)",
                "return torch.cat([source.discrete(value, std)[:-1], value[-1:]])",
            )
        ],
    ),
    "a class without noise": (
        "sent",
        "class sums",
        [
            (
                release.class_statistics,
                DRAW,
                f"""noisy = {GAUSSIAN}
        noisy[-1] = exact[-1]
        return {{"values": noisy}}""",
            )
        ],
    ),
    "noise beside the primitive": (
        "source",
        "class sums",
        [
            (
                release.class_statistics,
                DRAW,
                'return {"values": source.discrete(exact, multiplier * statistic.l2_sensitivity)}',
            )
        ],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_share_is_caught(bug):
    rule, case, changes = BUGS[bug]
    path, pairs = share_case(case)
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(planted(*change))
        assert caught(path, some(pairs, len(pairs))) == rule


FACTOR = "factor = (self.l2_clip / (norm * (1 + SLACK))).clamp(max=1)"
PAID_BUGS: dict[str, tuple[str, str, list[Change]]] = {
    "gradients not clipped": (
        "value",
        "fedavg",
        [(ClippedGradients._clip, FACTOR, "factor = torch.ones_like(norm)")],
    ),
    "each layer clipped": (
        "value",
        "fedavg",
        [
            (
                ClippedGradients._clip,
                "(factor.nan_to_num(0) @ r)",
                "((self.l2_clip / r.norm(dim=1)).clamp(max=1).nan_to_num(0) @ r)",
            )
        ],
    ),
    "the sum of gradients clipped": (
        "value",
        "fedavg, replace",
        [(ClippedGradients._clip, FACTOR, f"{FACTOR} * 0 + 2.5 * self.l2_clip / norm.sum()")],
    ),
    "a broken gradient let through": (
        "value",
        "fedavg",
        [(ClippedGradients._clip, "r[~norm.isfinite()] = 0", "pass")],
    ),
    "the clip for twice the clip": (
        "value",
        "fedavg, replace",
        [
            (
                mechanism.GradientSum.l2_sensitivity,
                '(1 if self.adjacency == "add_remove" else 2)',
                "1",
            )
        ],
    ),
    "normaliser of the true batch": (
        "sent",
        "fedavg",
        [(private.noisy_gradients, "(training.expected_batch_size +", "(max(1, len(own.y)) +")],
    ),
    "all records in every batch": (
        "value",
        "fedavg",
        [
            (
                batches.poisson,
                "(coins.uniform(n) < training.sample_rate)",
                "(coins.uniform(n) < 2)",
            )
        ],
    ),
    "steps by the number of records": (
        "paid",
        "fedavg",
        [
            (
                batches.poisson,
                "steps, size = training.steps_per_epoch,",
                "steps, size = max(1, -(-n // training.expected_batch_size)),",
            )
        ],
    ),
    "steps by the number of records, paid for": (
        "value",
        "fedavg",
        [
            (
                batches.poisson,
                "steps, size = training.steps_per_epoch,",
                "steps, size = max(1, -(-n // training.expected_batch_size)),",
            ),
            (
                private.training_event,
                "me.local.epochs * training.steps_per_epoch",
                "max(1, -(-len(me.shard) // training.expected_batch_size))",
            ),
        ],
    ),
    "sampling rate by the number of records": (
        "sent",
        "fedavg",
        [
            (
                private.training_event,
                "training.sample_rate",
                "training.expected_batch_size / max(8, len(me.shard))",
            )
        ],
    ),
    "training loss sent": (
        "sent",
        "fedavg",
        [
            (
                fit.fit,
                "tree, events = me.account.release("
                "me.round, event, lambda: train(noisy_gradients)[0])\n"
                "    return Fitted(tree, event.times, math.nan, events)",
                """tree, _, loss = train(noisy_gradients)
    tree, events = me.account.release(me.round, event, lambda: tree)
    return Fitted(tree, event.times, loss, events)""",
            ),
            (
                fit.Fitted.reply,
                '"steps": self.steps, **more}',
                '"steps": self.steps, "train_loss": self.loss, **more}',
            ),
        ],
    ),
    "number of examples sent": (
        "sent",
        "fedavg",
        [(fit._weight, "return max(1.0, float(counts.sum())),", "return len(me.shard),")],
    ),
    "examples weighed by their number in the reply of FedDPMS": (
        "sent",
        "feddpms",
        [(fit._weight, "return max(1.0, float(counts.sum())),", "return len(me.shard),")],
    ),
    "a layer without noise": (
        "noise",
        "fedavg",
        [
            (
                mechanism.gaussian,
                "return source.floating(value, std)",
                "return torch.cat([source.floating(value, std)[:-1], value[-1:]])",
            )
        ],
    ),
}


@needs_opacus
@pytest.mark.parametrize("bug", PAID_BUGS)
def test_a_bug_in_private_training_is_caught(bug):
    rule, case, changes = PAID_BUGS[bug]
    path, pairs = paid_case(case)
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(planted(*change))
        assert caught(path, some(pairs, 60)) == rule


# The tools


def test_a_planted_bug_is_gone_afterwards_and_must_fit():
    statistic = Histogram("replace_one")
    with planted(Histogram.l2_sensitivity, "math.sqrt(2)", "7.0"):
        assert statistic.l2_sensitivity == 7
    assert statistic.l2_sensitivity == pytest.approx(2**0.5)
    with pytest.raises(NameError), planted(Histogram.l2_sensitivity, "math.sqrt(2)", "nothing"):
        print(statistic.l2_sensitivity)
    assert statistic.l2_sensitivity == pytest.approx(2**0.5)
    for old in ("not there", "self"):
        with pytest.raises(ValueError, match="expected one"), planted(ClassSums.value, old, ""):
            pass
    with pytest.raises(ValueError, match="closure"), planted(share_path(Privacy()), "yield r", ""):
        pass


def test_the_bit_for_bit_comparison():
    nan, zero = torch.tensor([torch.nan]), torch.tensor([0.0])
    message = Message("a", {"t": {"x": nan}}, {"n": float("nan")}, inner=Message("b"))
    assert difference(message, copy.deepcopy(message)) == ""
    for other in (
        replace(message, inner=Message("c")),
        replace(message, numbers={}),
        replace(message, trees={"t": {"x": zero}}),
    ):
        assert difference(message, other)
    assert difference([zero], [-zero])
    assert difference([1], [1, 2])
    assert difference(1, 1.0)


def test_neighbours_differ_in_one_record():
    for norm, adjacency in itertools.product(("batch", "group"), ("add_remove", "replace_one")):
        pairs = neighbours(norm, adjacency)
        assert len(pairs) == 180
        for pair in pairs:
            kept = []
            for side in (pair.left, pair.right):
                rest = side.ids != ODD
                assert (~rest).sum() <= 1
                kept.append([t[rest] for t in (side.shard.x, side.shard.y, side.ids)])
            assert difference(*kept) == ""
            assert len(pair.left.ids) - len(pair.right.ids) in (
                (0,) if adjacency == "replace_one" else (-1, 1)
            )
