"""Private training against the algorithm written out, and whole private runs against their price.

What the ledger of a run comes to is computed again from its JSON lines, without the product.
"""

import copy
import importlib.util
import json
import math
import re
import sys
import warnings
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from plant import planted
from scipy import optimize, stats
from torch.nn import functional as F

from feddpms import config, records, runs
from feddpms.algorithms import FedAvg, FedDPMS, FedProx, Training, batches, fit, private
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.flat import Flat
from feddpms.algorithms.method import Client
from feddpms.engine import Crew, Engine, simulate
from feddpms.engine.grid import unfold
from feddpms.errors import ConfigError, PrivacyError
from feddpms.models import NetSettings, VaeSettings, build, trunk
from feddpms.prepare import prepare
from feddpms.privacy import DpTraining, Ledger, Privacy, calibrate, epsilon, mechanism
from feddpms.privacy.calibrate import Multipliers
from feddpms.privacy.ledger import read as ledger_entries
from feddpms.report.load import load as load_folder
from feddpms.rng import Rng
from feddpms.synthesis import Drawing
from feddpms.types import Batch, Shard, Task
from small import CLASSES, GOES_ON, LOOSE, TASK, client, small_net, three_shards, unseen

pytest.importorskip("opacus")

# One round of private training, written out


NOISE, CLIP, BATCH, EXPECTED, EPOCHS, OWN, EXTRA = 0.1, 0.7, 4, 20, 2, 11, 17
"""What the reference needs; the shard has fewer examples than is publicly expected."""
TABLE = torch.linspace(0.1, 3.0, OWN + EXTRA, dtype=torch.float64)


def private_settings(adjacency="add_remove", **training) -> Privacy:
    values = {"l2_clip": CLIP, "expected_batch_size": BATCH, "expected_examples": EXPECTED}
    dp = DpTraining(kind="dpsgd", **{**values, **training})
    return Privacy(weights="noisy", adjacency=adjacency, training=dp)


def images(n: int, seed: int, dtype=torch.float64, weight: float = 1.0) -> Shard:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 8, 8, generator=g, dtype=torch.float64).to(dtype)
    return Shard(x, torch.arange(n) % CLASSES, weight)


def group_net(dtype=torch.float64):
    """As `build` makes it: several channels a layer, in the channels-last memory format."""
    settings = NetSettings(width=0.25, latent=6, hidden=8, norm="group")
    net = build((1, 8, 8), CLASSES, settings, Rng(0)).to(dtype)
    kernel = net.encoder.layers[3].weight
    assert not kernel.is_contiguous()
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    return net


def by_place(net, batch: Batch):
    """A loss that needs to know which example it looks at, as MOON's does."""
    table = TABLE.to(batch.x.dtype)
    return (table[batch.index] * F.cross_entropy(net(batch.x), batch.y, reduction="none")).mean()


def private_client(optimizer="sgd", adjacency="add_remove", dtype=torch.float64, **changes):
    local = Training(
        epochs=EPOCHS, optimizer=optimizer, lr=0.05, momentum=0.0, weight_decay=changes.pop("wd", 0)
    )
    privacy = private_settings(adjacency)
    shard = images(OWN, 1, dtype)
    return client(shard, group_net(dtype), local=local, privacy=privacy, **changes)


@pytest.fixture
def given_noise(monkeypatch):
    """The noise multiplier is a given here; that it is the calibrated one is tested on runs."""

    def given(privacy: Privacy, steps: int) -> Multipliers:
        assert steps == TASK.rounds * EPOCHS * 5
        return Multipliers(1.0, 1.0, 1.0, NOISE)

    monkeypatch.setattr(private, "calibrate", given)


def clipped(net, loss, names, shard: Shard, place: int, index: int):
    """One example's gradient by autograd, as a vector, clipped over all parameters; its norm."""
    one = slice(place, place + 1)
    value = loss(net, Batch(shard.x[one], shard.y[one], None, torch.tensor([index])))
    named = dict(net.named_parameters())
    grads = torch.autograd.grad(value, [named[k] for k in names], materialize_grads=True)
    flat = torch.cat([g.contiguous().flatten().double() for g in grads])
    norm = math.sqrt(float((flat * flat).sum()))
    return flat * min(1.0, CLIP / norm), norm


def written_out(me, start, loss, mu=0.0, drift=None):
    """Algorithm 1 of Abadi et al. (2016) with the optimiser's own formula; no torch.optim.

    Returns the trained values by name, and the norms and batch sizes that came up.
    """
    net, training = copy.deepcopy(me.net), me.privacy.training
    names = [k for k, _ in net.named_parameters() if k in start]
    shapes = {k: start[k].shape for k in names}
    flatten = lambda tree: torch.cat([tree[k].contiguous().flatten().double() for k in names])  # noqa: E731
    ends = np.cumsum([math.prod(shapes[k]) for k in names])[:-1].tolist()

    def unflatten(flat):
        return {k: v.view(shapes[k]) for k, v in zip(names, flat.tensor_split(ends), strict=True)}

    w = centre = flatten(start)
    pull = flatten({k: (drift or {}).get(k, torch.zeros(shapes[k])) for k in names})
    moving, square, t = torch.zeros_like(w), torch.zeros_like(w), 0
    coins = me.rng.numpy("privacy noise", "batches")
    normal = me.rng.numpy("privacy noise", "training")
    order = torch.Generator().manual_seed(me.rng.number("synthetic batches"))
    steps = math.ceil(EXPECTED / BATCH)
    std = NOISE * CLIP * (2 if me.privacy.adjacency == "replace_one" else 1)
    norms, sizes = [], []
    for _ in range(me.local.epochs):
        extra = len(me.synthetic.y) if me.synthetic else 0
        left = torch.randperm(extra, generator=order).tolist()
        each = min(BATCH, math.ceil(extra / steps))
        for _ in range(steps):
            fit.load(net, unflatten(w))
            total = torch.zeros_like(w)
            coin = coins.random(len(me.shard))
            batch = [i for i, c in enumerate(coin.tolist()) if c < BATCH / EXPECTED]
            for i in batch:
                part, norm = clipped(net, loss, names, me.shard, i, i)
                total, _ = total + part, norms.append(norm)
            g = total + std * torch.from_numpy(normal.standard_normal(len(total)))
            riders, left = left[:each], left[each:]
            for i in riders:
                part, norm = clipped(net, loss, names, me.synthetic, i, len(me.shard) + i)
                g, _ = g + me.synthetic.weight * part, norms.append(norm)
            weight = me.synthetic.weight if riders else 0.0
            g = g / (training.expected_batch_size + weight * len(riders))
            sizes.append((len(batch), len(riders)))
            g = g + mu * (w - centre) + pull + me.local.weight_decay * w
            t += 1
            if me.local.optimizer == "sgd":
                w = w - me.lr * g
            else:
                moving, square = 0.9 * moving + 0.1 * g, 0.999 * square + 0.001 * g * g
                first, second = moving / (1 - 0.9**t), square / (1 - 0.999**t)
                w = w - me.lr * first / (second.sqrt() + 1e-8)
    return unflatten(w), norms, sizes


def compare(me, rtol=1e-6, atol=1e-8, **more):
    """The product's round equals the one written out; returns what came up on the way."""
    start = {k: v.clone() for k, v in me.net.state_dict().items()}
    if not more.pop("generative", False):
        start = trunk(start)
    mu = more.get("mu", 0.0)
    want, norms, sizes = written_out(me, start, by_place, **more)
    correction = Correction(more.get("drift", {}), start, mu)
    got = fit.fit(me, start, by_place, correction)
    assert set(got.tree) == set(want) == set(start)  # group norm has no buffers
    for key, value in want.items():
        named = lambda said, key=key: f"{key}: {said}"  # noqa: E731
        torch.testing.assert_close(got.tree[key].double(), value, rtol=rtol, atol=atol, msg=named)
    moved = torch.cat([(want[k] - start[k]).flatten() for k in want])
    assert float(moved.min()) < -1e-3
    assert float(moved.max()) > 1e-3
    assert got.steps == len(sizes) == EPOCHS * math.ceil(EXPECTED / BATCH)
    return norms, sizes


DRIFT = {"encoder.layers.3.weight": torch.linspace(-1, 1, 8 * 4 * 9).view(8, 4, 3, 3).double()}
EVERYTHING = {"mu": 0.3, "drift": DRIFT, "generative": True}


def with_everything(optimizer):
    """Synthetic examples that weigh half, a weight decay, and replacement as the relation."""
    extra = images(EXTRA, 2, weight=0.5)
    return private_client(optimizer, "replace_one", synthetic=extra, wd=0.05)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_round_is_the_algorithm_written_out(optimizer, given_noise):
    norms, sizes = compare(private_client(optimizer))
    assert min(norms) < CLIP < max(norms)
    drawn = [own for own, _ in sizes]
    assert min(drawn) == 0  # a step without an example still has its noise
    assert len(set(drawn)) > 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_synthetic_examples_and_corrections_are_added_after_the_noise(optimizer, given_noise):
    norms, sizes = compare(with_everything(optimizer), **EVERYTHING)
    assert min(norms) < CLIP < max(norms)
    assert [extra for _, extra in sizes] == [4, 4, 4, 4, 1] * EPOCHS


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_round_in_the_precision_of_a_run(optimizer, given_noise):
    compare(private_client(optimizer, dtype=torch.float32), rtol=1e-3, atol=2e-4)


BUGS = {
    "the true batch size as divisor": (
        private.noisy_gradients,
        "(training.expected_batch_size +",
        "(max(1, len(own.y)) +",
    ),
    "the shard's size in the divisor": (
        private.noisy_gradients,
        "(training.expected_batch_size +",
        "(training.sample_rate * len(me.shard) +",
    ),
    "synthetic examples at full weight": (
        private.noisy_gradients,
        "weight = me.synthetic.weight if me.synthetic else 0.0",
        "weight = 1.0",
    ),
    "synthetic examples not in the divisor": (
        private.noisy_gradients,
        "training.expected_batch_size + weight * len(extra.y)",
        "training.expected_batch_size",
    ),
    "the same noise in every step": (
        private.noisy_gradients,
        "statistic, multiplier, noise)",
        'statistic, multiplier, me.noise("training"))',
    ),
    "half of the noise under replacement": (
        mechanism.gaussian,
        "noise_multiplier * statistic.l2_sensitivity",
        "noise_multiplier * getattr(statistic, 'l2_clip', 1)",
    ),
    "coins at another rate": (
        batches.poisson,
        "< training.sample_rate",
        "< 1.5 * training.sample_rate",
    ),
    "batches of one size": (
        batches.poisson,
        "(coins.uniform(n) < training.sample_rate).nonzero().flatten()",
        "coins.uniform(n).argsort()[: round(n * training.sample_rate)]",
    ),
    "a lost correction": (fit._train, "flat.gradient += steer()", "pass"),
    "a correction over the batch size": (
        fit._train,
        "flat.gradient += steer()",
        "flat.gradient += steer() / 4",
    ),
    "a lost pull": (Correction.over, "drift + pull *", "drift + 0 *"),
    "a pull from zero": (Correction.over, "flat.vector.detach() - point", "flat.vector.detach()"),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_catches(bug, optimizer, given_noise):
    with planted(*BUGS[bug]), pytest.raises(AssertionError, match="are not close"):
        compare(with_everything(optimizer), **EVERYTHING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_comparison_catches_a_gradient_in_another_memory_layout(optimizer, dtype, given_noise):
    """Fused optimisers read it in the wrong order; autograd warns of it once, if at all."""
    laid_out = "view.copy_(part.view(view.shape))"
    as_it_comes = "view.as_strided((view.numel(),), (1,)).copy_(part)"
    with (
        planted(Flat.set, laid_out, as_it_comes),
        pytest.raises(AssertionError, match=r"layers\.\d\.weight: Tensor-likes are not close"),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        compare(private_client(optimizer, dtype=dtype), rtol=1e-3, atol=2e-4)


# Batches by coins


N, RATE, MANY = 40, 0.2, 800
IMPROBABLE = 1e-6
"""chance of a sound sampler to fail one of the tests"""

sources = pytest.mark.parametrize(
    "noise",
    [
        "seeded",
        pytest.param(
            "secure",
            marks=pytest.mark.skipif(not importlib.util.find_spec("opendp"), reason="needs OpenDP"),
        ),
    ],
)


def drawn(noise="seeded", n=N, epochs=MANY) -> np.ndarray:
    """Who is in which step's batch [steps, n], over many epochs."""
    training = DpTraining(kind="dpsgd", expected_batch_size=8, expected_examples=40)
    privacy = Privacy(weights="noisy", noise=noise, training=training)
    shard = Shard(torch.zeros(n, 1, 1, 1), torch.zeros(n, dtype=torch.int64))
    me = client(shard, None, privacy=privacy, local=Training(epochs=epochs))
    steps = [own.index for own, _ in batches.poisson(me)]
    table = np.zeros((len(steps), n))
    for row, index in zip(table, steps, strict=True):
        row[index.numpy()] = 1
    return table


def binomial_sizes(table) -> bool:
    """Mean, variance and histogram of the batch sizes are those of Binomial(n, q)."""
    sizes, n = table.sum(1), table.shape[1]
    expected, variance, steps = n * RATE, n * RATE * (1 - RATE), len(table)
    mean = stats.norm.sf(abs(sizes.mean() - expected) / math.sqrt(variance / steps))
    spread = ((sizes - expected) ** 2).sum() / variance
    tails = [stats.chi2.sf(spread, steps), stats.chi2.cdf(spread, steps)]
    law = stats.binom(n, RATE)
    cuts = np.unique(law.ppf(np.linspace(0.1, 0.9, 9)))  # bins with about as many steps in each
    seen = np.bincount(np.searchsorted(cuts, sizes), minlength=len(cuts) + 1)
    want = steps * np.diff([0, *law.cdf(cuts), 1])
    return min(2 * mean, *tails, stats.chisquare(seen, want).pvalue) > IMPROBABLE


def independent_records(table) -> bool:
    """Every record is in a batch equally often, whoever else is, and whether it was in the last."""
    steps, n = table.shape
    z = (table - RATE) / math.sqrt(RATE * (1 - RATE))
    alone = (z.sum(0) ** 2 / steps).sum()
    together = ((z.T @ z)[np.triu_indices(n, 1)] ** 2 / steps).sum()
    later = ((z[1:].T @ z[:-1]) ** 2 / (steps - 1)).sum()
    tails = []
    for value, freedom in ((alone, n), (together, n * (n - 1) // 2), (later, n * n)):
        tails += [stats.chi2.sf(value, freedom), stats.chi2.cdf(value, freedom)]
    return min(tails) > IMPROBABLE


@sources
def test_batches_are_poisson_samples(noise):
    table = drawn(noise)
    assert len(table) == MANY * 5
    assert binomial_sizes(table)
    assert independent_records(table)


def test_shuffled_and_fixed_batches_are_no_poisson_samples():
    order = (batches.poisson, "(coins.uniform(n) < training.sample_rate).nonzero().flatten()")
    with planted(*order, "coins.uniform(n).argsort()[: training.expected_batch_size]"):
        table = drawn()
    assert not binomial_sizes(table)
    assert not independent_records(table)
    one_coin = "(coins.uniform(n)[:1].expand(n) < training.sample_rate).nonzero().flatten()"
    with planted(*order, one_coin):
        table = drawn()
    assert not binomial_sizes(table)
    assert not independent_records(table)
    with planted(batches.poisson, "< training.sample_rate", "< 1.03 * training.sample_rate"):
        assert not binomial_sizes(drawn())
    g = torch.Generator().manual_seed(0)
    parts = torch.cat([torch.randperm(N, generator=g).view(5, 8) for _ in range(MANY)])
    table = np.zeros((len(parts), N))
    np.put_along_axis(table, parts.numpy(), 1, axis=1)
    assert not binomial_sizes(table)
    assert not independent_records(table)


def test_neither_steps_nor_divisor_nor_event_follow_from_the_shard(given_noise, monkeypatch):
    """With one and the same gradient for everybody and no noise, a step is its batch's size / B."""
    monkeypatch.setattr(private, "gaussian", lambda value, *_: value)
    loss = lambda net, batch: 100 * net(batch.x)[:, 0].mean()  # noqa: E731
    key, events = "classifier.head.bias", set()
    for n in (1, 7, 20, 90):
        net, shard = group_net(), images(n, 3)
        me = client(shard, net, privacy=private_settings(), local=Training(epochs=EPOCHS))
        flat = Flat({key: dict(net.named_parameters())[key]})
        steps = private.noisy_gradients(me, loss)(net, flat)
        taken = [flat.gradient[0].item() * BATCH / CLIP for _ in steps]
        sizes = [len(own.y) for own, _ in batches.poisson(me)]
        assert sizes == pytest.approx(taken)
        assert len(taken) == EPOCHS * 5
        events.add(private.training_event(me))
    (event,) = events
    assert (event.times, event.sample_rate) == (EPOCHS * 5, BATCH / EXPECTED)
    with planted(batches.poisson, "= training.steps_per_epoch", "= -(-n // 4)"):
        assert len(list(batches.poisson(me))) != EPOCHS * 5


# Whole runs


TARGET, DELTA, ROUNDS, STEPS = 8.0, 1e-5, 3, 2 * 4
VALUES = {
    "seed": 3,
    "rounds": ROUNDS,
    "data": {"fraction": 0.12},
    "partition": {"clients": 3, "min_size": 20},
    "net": {"width": 0.25, "latent": 8, "hidden": 16, "norm": "group"},
    "local": {"epochs": 2},
    "privacy": {
        "target_epsilon": TARGET,
        "target_delta": DELTA,
        "weights": "noisy",
        "count_noise_multiplier": 4.0,
        "min_class_count": 4.0,
        "training": {"kind": "dpsgd", "expected_batch_size": 16, "expected_examples": 64},
    },
}
FEDDPMS = {"name": "feddpms", **GOES_ON, "preliminary_rounds": 1, "synthesis": {"per_class": 5}}
CASES = {
    "feddpms": {"method": FEDDPMS},
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox"},
    "moon": {"method": "moon"},
    "feddpms, replaced": {"method": FEDDPMS, "privacy": {"adjacency": "replace_one"}},
}
PAID = {"class histogram", "model updates"}


def settings(*changes) -> config.Run:
    values = VALUES
    for change in changes:
        values = config.merge(values, change)
    return config.parse(values)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, runs.Result]:
    home = tmp_path_factory.mktemp("runs")
    return {name: runs.run(settings(CASES[name]), home / name) for name in CASES}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def by_client(entries: list[dict]) -> dict[int, list[dict]]:
    clients = defaultdict(list)
    for entry in entries:
        clients[entry["client"]].append(entry)
    return clients


def kinds_of(entries: list[dict]) -> tuple:
    """How often each mechanism ran: its name, noise multiplier and sampling rate, and the times."""
    kinds = Counter()
    for e in entries:
        name = "swap" if e["neighbours"] == "replace_one" else "add or remove"
        name = name if e["channel"] == "model updates" else "plain"
        kinds[name, e["noise_multiplier"], e["sample_rate"]] += e["times"]
    return tuple(sorted(kinds.items()))


@cache
def by_library(kinds: tuple) -> float:
    """Epsilon of what one client's lines name, under add-or-remove, by dp-accounting."""
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation, value_discretization_interval=1e-4)
    for (_, multiplier, rate), times in kinds:
        step = dp_accounting.GaussianDpEvent(multiplier)
        if rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(rate, step)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, times))
    return accountant.get_epsilon(DELTA)


def by_fourier(entries: list[dict]) -> float:
    """The same for either relation, without a library."""
    return max(convolved(kinds_of(entries), way) for way in (1, -1))


@cache
def convolved(kinds: tuple, way: int) -> float:
    """Epsilon from the densities of the worst pair, one way round.

    In units of the clip, a sampled sum of gradients is (1-q) N(0, s^2) + q N(1, s^2) with the
    record. Without it, it is N(0, s^2); with another in its place, (1-q) N(0, s^2) + q N(-1, s^2),
    and s is twice the multiplier. What is not sampled costs the same under either relation. The
    privacy losses of independent releases add up, so their densities are convolved.
    """
    width, places = 2e-4, 2**18
    spectrum = np.ones(places // 2 + 1, dtype=complex)
    for (name, multiplier, q), times in kinds:
        replaced = name == "swap"
        s = multiplier * (2 if replaced else 1)
        x = np.linspace(-1 - 12 * s, 1 + 12 * s, 100_001)
        common, alone = (1 - q) * np.exp(-((x / s) ** 2) / 2), np.exp(-((x / s) ** 2) / 2)
        upper = common + q * np.exp(-(((x - 1) / s) ** 2) / 2)
        lower = common + q * np.exp(-(((x + 1) / s) ** 2) / 2) if replaced else alone
        upper, lower = (upper, lower)[::way]
        places_of = np.rint(np.log(upper / lower) / width).astype(int) % places
        mass = np.bincount(places_of, weights=upper / upper.sum(), minlength=places)
        spectrum *= np.fft.rfft(mass) ** times
    mass = np.fft.irfft(spectrum, places)
    total = width * np.fft.fftfreq(places, 1 / places)

    def delta(epsilon: float) -> float:
        above = total > epsilon
        return (mass[above] * -np.expm1(epsilon - total[above])).sum()

    return optimize.brentq(lambda e: delta(e) - DELTA, 0, 2 * TARGET)


def claimed(claim: str) -> float:
    """The epsilon that a claim over everything names."""
    pattern = r"everything a client sent in the whole run .*\) is \(([\d.]+), 1e-05\)-diff"
    found = re.search(pattern, claim)
    assert found, claim
    assert "in the clear" not in claim
    return float(found[1])


@pytest.mark.parametrize("name", CASES)
def test_a_private_run_sends_only_what_is_paid_for(name, finished):
    result = finished[name]
    entries = lines(result.folder)
    channels = PAID | ({"latent means"} if name.startswith("feddpms") else set())
    assert {e["mechanism"] for e in entries} == {"gaussian"}
    assert {e["channel"] for e in entries} == channels
    assert len(by_client(entries)) == 3
    for own in by_client(entries).values():
        assert sorted(e["round"] for e in own if e["channel"] == "model updates") == [1, 2, 3]
        assert sum(e["channel"] == "class histogram" for e in own) == 1
    spent = claimed(result.claim)
    assert (0.99 if name.startswith("feddpms") else 0.9) * TARGET < spent <= TARGET
    neighbours = "replaced by any other" if name.endswith("replaced") else "added or removed"
    assert f"neighbours: one record {neighbours})" in result.claim
    assert "Simulated" in result.claim


@pytest.mark.parametrize("name", CASES)
def test_the_price_is_what_other_accounting_says(name, finished):
    result = finished[name]
    own, *others = by_client(lines(result.folder)).values()
    stored = ledger_entries(result.folder / "ledger.jsonl")
    product = epsilon([e.event for e in stored if e.client == 0], DELTA)
    independent = by_fourier(own)
    assert product == pytest.approx(independent, abs=1e-3)
    if not name.endswith("replaced"):
        assert by_library(kinds_of(own)) == pytest.approx(independent, abs=1e-3)
    assert claimed(result.claim) == pytest.approx(independent, abs=2e-3)  # four digits
    assert independent <= TARGET
    keys = ("channel", "round", "noise_multiplier", "times", "sample_rate", "neighbours")
    for other in others:
        assert [[e[k] for k in keys] for e in other] == [[e[k] for k in keys] for e in own]


@pytest.mark.parametrize("name", CASES)
def test_every_client_trains_at_the_noise_of_the_whole_run(name, finished):
    """Whatever it holds: the shards of these runs differ in size, their events do not."""
    result = finished[name]
    privacy, entries = result.settings.privacy, lines(result.folder)
    multiplier = calibrate(privacy, ROUNDS * STEPS).training
    updates = [e for e in entries if e["channel"] == "model updates"]
    want = {
        "noise_multiplier": multiplier,
        "times": STEPS,
        "sample_rate": 0.25,
        "l2_sensitivity": 2.0 if privacy.adjacency == "replace_one" else 1.0,
    }
    assert all({k: e[k] for k in want} == want for e in updates)
    data = runs.load(result.settings.data, Rng(result.settings.seed))
    sizes = [len(s) for s in prepare(result.settings, data).shards]
    assert max(sizes) > 1.2 * min(sizes)


@pytest.mark.parametrize("name", CASES)
def test_a_private_run_has_no_training_loss_and_counts_as_finished(name, finished):
    result = finished[name]
    assert all(math.isnan(r.train_loss) for r in result.rounds)
    assert [r.numbers["steps"] for r in result.rounds] == [3 * STEPS] * ROUNDS
    stored = [r for r in records.read(result.folder / "records.jsonl") if hasattr(r, "train_loss")]
    assert all(math.isnan(r.train_loss) for r in stored)
    folder = load_folder(result.folder)
    assert folder.status == "finished"
    assert folder.diverged is None
    assert "diverged" not in (result.folder / "report.html").read_text()


@pytest.fixture(scope="module")
def twice(finished, tmp_path_factory) -> tuple[Path, Path]:
    again = runs.run(settings(CASES["feddpms"]), tmp_path_factory.mktemp("again") / "run")
    return finished["feddpms"].folder, again.folder


def test_a_private_run_can_be_repeated(twice):
    one, other = twice
    assert any("synthetic" in r for r in (one / "records.jsonl").read_text().splitlines())
    for file in ("model.safetensors", "released.safetensors", "run.toml"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    priced = [[{**e, "digest": ""} for e in lines(folder)] for folder in twice]
    assert priced[0] == priced[1]


def test_a_private_run_can_be_repeated_to_the_last_digest(twice):
    one, other = twice
    assert (one / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()


# What is refused


REFUSED = {
    "fedmix": ([{"method": "fedmix"}], r"^fedmix cannot train privately: .* choose another"),
    "batch norm": ([{"net": {"norm": "batch"}}], r"kind=dpsgd needs net.norm=group \("),
    "exact weights": ([{"privacy": {"weights": "exact"}}], r"dpsgd needs privacy.weights=noisy \("),
    "both": (
        [{"net": {"norm": "batch"}, "privacy": {"weights": "exact"}}],
        r"needs net.norm=group \(.*\) and privacy.weights=noisy \(",
    ),
    "an inner method that cannot": (
        [{"method": {"name": "fedmix", "inner": "fedprox"}}],
        r"^fedmix cannot train privately",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_would_not_be_private_is_refused_in_one_line(name, tmp_path):
    changes, line = REFUSED[name]
    with pytest.raises(ConfigError, match=line) as caught:
        runs.run(settings({"method": "fedavg"}, *changes), tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def without_opacus(monkeypatch):
    for name in [m for m in sys.modules if m.partition(".")[0] == "opacus"]:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_opacus_one_line_says_what_to_install(without_opacus):
    line = r'^DP training needs Opacus; pip install "feddpms\[dpsgd\]"$'
    with pytest.raises(ConfigError, match=line):
        runs.run(settings({"method": "fedavg"}))


def test_without_opacus_nothing_is_written(without_opacus, tmp_path):
    with pytest.raises(ConfigError):
        runs.run(settings({"method": "fedavg"}), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


# The budget


def test_a_run_stops_before_the_reply_that_its_budget_does_not_cover(finished, tmp_path):
    """The price of each further round is computed from the lines of the run without a budget."""
    own = by_client(lines(finished["fedavg"].folder))[0]
    prices = [by_fourier([e for e in own if e["round"] <= k]) for k in (1, 2, 3)]
    budget = (prices[0] + prices[1]) / 2
    folder = tmp_path / "stopped"
    with pytest.raises(PrivacyError) as caught:
        runs.run(settings(CASES["fedavg"], {"privacy": {"max_epsilon": budget}}), folder)
    said = str(caught.value)
    assert "\n" not in said
    assert re.search(r'client 0: "model updates" in round 2 would bring epsilon .* to ', said)
    assert f"max_epsilon {budget:g}" in said
    spelt = float(re.search(r"to ([\d.]+) at delta", said)[1])
    assert spelt == pytest.approx(prices[1], abs=2e-3)
    assert {e["round"] for e in lines(folder)} == {1}
    assert load_folder(folder).status == "unfinished (1 of 3 rounds)"
    assert load_folder(folder).claim is None
    enough = {"privacy": {"max_epsilon": prices[2] + 5e-3}}
    assert runs.run(settings(CASES["fedavg"], enough)).rounds[-1].round == ROUNDS


# Noisy weights without private training


class Spied:
    """A method that keeps every reply."""

    def __init__(self, method):
        self.method, self.about = method, method.about
        self.start, self.ask, self.server = method.start, method.ask, method.server
        self.replies: list[tuple[int, object]] = []

    def client(self, ask, me):
        reply, memory = self.method.client(ask, me)
        self.replies += [(me.id, m) for m in unfold(reply)]
        return reply, memory


def noisy_run(method, rounds=4, **privacy):
    ledger, shards, spy = Ledger(), three_shards(), Spied(method)
    noisy = config.parse({"privacy": {**config.dump(LOOSE), "weights": "noisy", **privacy}}).privacy
    task = Task(CLASSES, len(shards), rounds, TASK.latent)
    local = Training(epochs=1, batch_size=8, lr=0.01)
    crew = Crew(spy, dict(enumerate(shards)), unseen(), small_net(), task, local, noisy, Rng(0))
    return spy, ledger, simulate(crew, Engine(), ledger)


DPMS = FedDPMS(
    **GOES_ON, preliminary_rounds=2, vae=VaeSettings(weight=0.05), synthesis=Drawing(per_class=4)
)


@pytest.mark.parametrize("method", [DPMS, FedAvg(), FedProx(mu=0.1)])
def test_noisy_weights_are_the_total_of_one_stored_histogram(method):
    spy, ledger, outcome = noisy_run(method)
    for k, shard in enumerate(three_shards()):
        told = {m.numbers["examples"] for c, m in spy.replies if c == k and "steps" in m.numbers}
        (weight,) = told  # the same in every round: one draw, sent again
        assert weight >= 1
        assert weight != len(shard)
        histograms = [e for e in ledger.events(k) if e.channel == "class histogram"]
        assert len(histograms) == 1
        sent = {e for c, m in spy.replies for e in m.events if c == k}
        assert {e for e in sent if e.channel == "class histogram"} == set(histograms)
        if method is DPMS:
            counts = outcome.released[k]["counts"]
            assert weight == pytest.approx(max(1.0, float(counts.double().sum())), rel=1e-5)
            assert any(e.channel == "latent means" for e in sent)
    channels = {e.channel for e in ledger.events()}
    assert "example count" not in channels
    assert {"model", "training loss"} <= channels


def test_a_noisy_weight_is_at_least_one():
    spy, _, _ = noisy_run(FedAvg(), rounds=1, count_noise_multiplier=1e4)
    weights = [m.numbers["examples"] for _, m in spy.replies]
    assert min(weights) == 1.0 < max(weights)


def test_exact_weights_say_so():
    """The counterpart: the count itself leaves, and the ledger names it."""
    spy, ledger, _ = noisy_run(FedAvg(), rounds=1, weights="exact")
    assert [m.numbers["examples"] for _, m in spy.replies] == [len(s) for s in three_shards()]
    assert "example count" in {e.channel for e in ledger.events()}
    assert "class histogram" not in {e.channel for e in ledger.events()}


def test_a_private_reply_says_nothing_beside_what_was_paid_for(given_noise):
    me = private_client()
    start = trunk({k: v.clone() for k, v in me.net.state_dict().items()})
    reply = fit.fit(me, start).reply(me)
    assert set(reply.numbers) == {"examples", "steps"}
    assert reply.numbers["steps"] == EPOCHS * 5
    assert {e.mechanism for e in reply.events} == {"gaussian"}
    assert {e.channel for e in reply.events} == PAID


def test_what_training_draws_in_secret_follows_from_no_seed_with_secure_noise():
    """Known latent noise would tell each record's place in its batch."""
    shard, net, like = three_shards()[0], small_net(), torch.zeros(5, 2)

    def draws(kind):
        me = client(shard, net, privacy=Privacy(noise=kind))
        return [me.normals("latent noise")(like) for _ in range(2)]

    assert torch.equal(*draws("seeded"))
    assert not torch.equal(*draws("secure"))
    with planted(Client.normals, 'self.privacy.noise == "secure"', "False"):
        assert torch.equal(*draws("secure"))
