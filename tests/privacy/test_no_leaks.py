"""Whole runs, and a search for anything exact in all they print, log and write.

The class counts of the clients are numbers that nothing else in a run has a reason to hold; exact
statistics and their noise are noted where they arise.
"""

import contextlib
import importlib.util
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from plant import planted
from safetensors import safe_open

from feddpms import prepare
from feddpms.algorithms import fit
from feddpms.cli import main
from feddpms.engine import loop
from feddpms.privacy import noise
from feddpms.privacy.mechanism import ClassSums, Histogram

COUNTS = np.array([[641, 0, 283], [0, 557, 389], [727, 311, 0]])
"""Examples of each class at each client; above 255, so that no pixel is one of them."""
TOTAL = int(COUNTS.sum())
"""public: the size of the data set"""
RUN = """
seed = 5
rounds = 3
data = {name = "npz", dir = "images.npz"}
partition = {kind = "file", path = "rows.json", clients = 3}
net = {width = 0.25, latent = 8, hidden = 16}
local = {epochs = 1, batch_size = 256}

[method]
name = "feddpms"
secondary = "train"
preliminary_rounds = 1
synthesis = {per_class = 4}
"""
PRIVATE = [  # at the rate and for the steps of test_private_training: calibration is kept in mind
    "local.epochs=2",
    "privacy.count_noise_multiplier=4.0",
    "net.norm=group",
    "privacy.weights=noisy",
    "privacy.target_epsilon=8.0",
    "privacy.training.kind=dpsgd",
    "privacy.training.expected_batch_size=16",
    "privacy.training.expected_examples=64",
]
NUMBER = re.compile(r"(?<![0-9A-Za-z.])\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
CHANCE = 1
"""of the float32 values in a file of tensors, so many may equal an exact one by chance"""


@dataclass
class Seen:
    """What must not be found, and where it could be.

    Attributes:
        exact: exact statistics that were computed, without the counts and without zeros.
        noise: what was added to them, and to counts above 0; with 0, it is what is released.
        text: all that was printed, logged or warned.
        folder: the run's.
    """

    exact: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    text: str = ""
    folder: Path = Path()
    counts: set[int] = field(default_factory=lambda: {*COUNTS.ravel(), *COUNTS.sum(1)} - {0})

    def note(self, statistic: ClassSums | Histogram, value: np.ndarray) -> None:
        """Remember an exact statistic; of sums, the means that follow from them as well."""
        if isinstance(statistic, Histogram):
            assert set(value.tolist()) <= {*COUNTS.ravel().tolist()}
            return
        (own,) = [row for row in COUNTS if ((row > 0) == value.any(1)).all()]
        means = 0.5 + value / np.maximum(own, 1)[:, None]
        self.exact += [*value[own > 0].ravel().tolist(), *means[own > 0].ravel().tolist()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where images and rows are; paths are given as names, so no path holds a number."""
    home, rng = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    owners = np.repeat(np.repeat(np.arange(3), 3), COUNTS.ravel())
    labels = np.repeat(np.tile(np.arange(3), 3), COUNTS.ravel())
    order = rng.permutation(TOTAL)
    owners, labels = owners[order], labels[order]
    patterns = rng.integers(0, 200, (3, 8, 8))

    def drawn(y):
        return (patterns[y] + rng.integers(0, 50, (len(y), 8, 8))).astype(np.uint8)

    y_test = np.arange(30) % 3
    arrays = {"x": drawn(labels), "y": labels, "x_test": drawn(y_test), "y_test": y_test}
    np.savez(home / "images.npz", **arrays)
    rows = [np.flatnonzero(owners == k).tolist() for k in range(3)]
    (home / "rows.json").write_text(json.dumps({"clients": rows}))
    (home / "run.toml").write_text(RUN)
    return home


@contextlib.contextmanager
def hooked(seen: Seen) -> Iterator[None]:
    """Note exact statistics and noise."""

    def value(real):
        def noted(statistic, *arguments):
            exact = real(statistic, *arguments)
            seen.note(statistic, exact.numpy())
            return exact

        return noted

    def discrete(real):
        def noted(source, exact, std):
            output = real(source, exact, std)
            seen.noise += (output - exact)[exact != 0].tolist()
            return output

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for cls in (ClassSums, Histogram):
            patch.setattr(cls, "value", value(cls.value))
        for cls in (noise.Seeded, noise.Secure):
            patch.setattr(cls, "discrete", discrete(cls.discrete))
        yield


@contextlib.contextmanager
def listening(seen: Seen) -> Iterator[None]:
    """Catch all that is printed, warned, and logged at any level."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with (
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    seen.text = text.getvalue() + "\n".join(str(w.message) for w in warned)


def go(place: Path, name: str, *settings: str) -> Seen:
    """A run by the command, watched."""
    seen = Seen(folder=place / name)
    with pytest.MonkeyPatch.context() as patch, hooked(seen), listening(seen):
        patch.chdir(place)
        assigned = [part for value in settings for part in ("--set", value)]
        patch.setattr(sys, "argv", ["feddpms", "run", "run.toml", "--out", name, *assigned])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    assert not code, seen.text
    seen.text = seen.text.replace(str(place), "")  # a temporary folder may have any number
    return seen


def search(seen: Seen) -> list[str]:
    """Every place where something exact is told."""
    found = in_text("output", seen.text, seen)
    for path in sorted(p for p in seen.folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(seen.folder))
        if path.suffix == ".safetensors":
            found += in_tensors(name, path, seen)
        else:
            pictures = r"base64,[A-Za-z0-9+/=]+"  # what they show is in the file of images
            found += in_text(name, re.sub(pictures, "", path.read_text()), seen)
    return found


def in_text(name: str, text: str, seen: Seen) -> list[str]:
    """Counts as numbers of their own, and exact values to six digits."""
    tokens = NUMBER.findall(text)
    found = [f"{name}: count {t}" for t in tokens if float(t) in seen.counts]
    for what in ("exact", "noise"):
        secret = {f"{abs(v):.6g}" for v in getattr(seen, what)}
        long = [t for t in tokens if len(re.sub(r"[eE].*|\.", "", t).lstrip("0")) >= 6]
        found += [f"{name}: {what} value {t}" for t in long if f"{float(t):.6g}" in secret]
    return found


def in_tensors(name: str, path: Path, seen: Seen) -> list[str]:
    """Counts as values, and exact values in single precision."""
    with safe_open(path, "np") as file:
        values = {key: np.abs(file.get_tensor(key).astype(np.float64)) for key in file.keys()}  # noqa: SIM118
        found = in_text(name, json.dumps(file.metadata() or {}), seen)
    for key, tensor in values.items():
        near = [c for c in seen.counts if (abs(tensor - c) <= 1e-6 * c).any()]
        found += [f"{name}: count {c} in {key}" for c in near]
    whole = {np.float32(v) for tensor in values.values() for v in tensor.ravel()}
    for what in ("exact", "noise"):
        both = whole & {np.float32(abs(v)) for v in getattr(seen, what)}
        if len(both) > CHANCE:
            found.append(f"{name}: {len(both)} {what} values")
    return found


RUNS = {
    "default": [],
    "private": PRIVATE,
    "one-a-round": ["engine.cohort=0.3"],
    "secure": [*PRIVATE, "privacy.noise=secure"],
}
SECURE = pytest.mark.skipif(not importlib.util.find_spec("opendp"), reason="needs OpenDP")
NEEDS_OPACUS = pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")
MARKS = {"private": [NEEDS_OPACUS], "secure": [NEEDS_OPACUS, SECURE]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, [])) for n in RUNS])
def test_a_run_tells_nothing_exact(name, place):
    seen = go(place, name, *RUNS[name])
    if name != "one-a-round":
        held = int((COUNTS > 0).sum())
        assert len(seen.exact) == held * 2 * 8  # sums and means
        assert len(seen.noise) == held * (1 + 8)
    files = {p.name for p in seen.folder.iterdir()}
    expected = {"run.toml", "records.jsonl", "ledger.jsonl", "report.html", "model.safetensors"}
    assert expected | {"released.safetensors", "images.safetensors"} <= files
    assert "round" in seen.text  # the output was heard
    assert ("clients" in files) == (name == "secure")
    if name == "secure":
        kept = {p.name for p in (seen.folder / "clients" / "0").iterdir()}
        assert {"class-histogram.safetensors", "latent-means.safetensors", "ledger.jsonl"} <= kept
    assert search(seen) == []
    assert str(TOTAL) in (seen.folder / "records.jsonl").read_text()


# The search finds what is there


BINCOUNT = "return torch.bincount(labels, minlength=classes).double()"
ADDED = "return rows.new_zeros(classes, rows.shape[1]).index_add(0, labels, rows)"
DRAWN = "return self.floating(value, std)"
LOG = '__import__("logging").getLogger("feddpms").debug("%s", {})'
SHORT = ["rounds=2"]
Plant = tuple[Callable, str, str]


def telling(function: Callable, line: str, tell: str) -> Plant:
    """The function with its `return` line telling of what it returns, by the name of `it`."""
    return function, line, f"{line.replace('return', 'it =')}; {tell}; return it"


PLANTS: dict[str, tuple[Plant, str, list[str]]] = {
    "counts are printed": (
        telling(Histogram.value, BINCOUNT, "print(it)"),
        r"^output: count 641$",
        SHORT,
    ),
    "sums are logged": (
        telling(ClassSums.value, ADDED, LOG.format("it.tolist()")),
        r"^output: exact value \d",
        SHORT,
    ),
    "noise is logged": (
        telling(noise.Seeded.discrete, DRAWN, LOG.format("(it - value).flatten().tolist()")),
        r"^output: noise value \d",
        SHORT,
    ),
    "a client's size is warned of": (
        (
            fit._weight,
            "return len(me.shard),",
            '__import__("warnings").warn(f"{len(me.shard)} examples"); return len(me.shard),',
        ),
        r"^output: count 946$",
        SHORT,
    ),
    "there is no noise": (
        (noise.Seeded.discrete, DRAWN, "return value + 0"),
        r"^released.safetensors: count 641 in 0.counts$",
        SHORT,
    ),
    "the noise is tiny": (
        (noise.Seeded.discrete, DRAWN, "return self.floating(value, 1e-6)"),
        r"^released.safetensors: count 557 in 1.counts$",
        SHORT,
    ),
    "what is stored of the means is exact": (
        (noise.Secure.discrete, "return torch.tensor(draw(flat)", "return torch.tensor(flat"),
        r"^clients/2/latent-means.safetensors: \d+ exact values$",
        [*SHORT, "privacy.noise=secure"],
    ),
    "the weights of a round are recorded": (
        (loop._record, "if name not in PRIVATE", "if name not in ()"),
        r"^records.jsonl: count 9(24|46)\.0$|^records.jsonl: count (924|946|1038)$",
        [*SHORT, "engine.cohort=0.3"],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[SECURE] if "stored" in n else []) for n in PLANTS]
)
def test_the_search_finds(name, place, tmp_path):
    plant, line, settings = PLANTS[name]
    with planted(*plant):
        found = search(go(place, str(tmp_path), *settings))
    assert any(re.search(line, f) for f in found), found


def test_the_search_finds_counts_in_a_record_and_in_the_report(place, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "levels", lambda counts: counts)
    found = search(go(place, str(tmp_path), *SHORT))
    assert {f"records.jsonl: count {c}" for c in COUNTS.ravel() if c} <= set(found)
    assert any(f.startswith("report.html: count") for f in found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("641", True),
        ("[641.0, 0]", True),
        ("tensor([641., 0.])", True),
        ("held 641, of all", True),
        ('{"n": 641}', True),
        ("n_641", True),
        ("6.41e2", True),
        ("1641", False),
        ("0.641", False),
        ("641.5", False),
        ("a641f", False),
        ("1.23456789", True),
        ("-1.23457e+00", True),
        ("0.00123457", False),
        ("1.2346", False),
        ("7.65432", True),
    ],
)
def test_numbers_are_found_as_numbers(text, found):
    seen = Seen(exact=[-1.23456789], noise=[7.654321])
    assert bool(in_text("a file", text, seen)) == found
