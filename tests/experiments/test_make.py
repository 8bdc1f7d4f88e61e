"""Cells are made once, kept as lines, and gone on with after a stop."""

import json
import shlex
import sys
from dataclasses import replace

import pytest

from feddpms import config, runs
from feddpms.cli import main
from feddpms.config import merge
from feddpms.errors import ConfigError, RunFolderError
from feddpms.experiments import make, missing, predicted, read
from feddpms.experiments.lines import command, line, write
from feddpms.experiments.presets import Scale, cell
from feddpms.experiments.tables import tables
from feddpms.report.load import find

TINY = Scale(fraction=0.1, rounds=2, epochs=1, width=0.25)
DPMS = {"method": {"preliminary_rounds": 1}}
PAPER = {"privacy": {"release": "paper"}}


@pytest.fixture(autouse=True)
def on_digits(monkeypatch):
    """The digits stand for a data set of the paper; the whole of them are 1,438."""
    from feddpms.experiments import lines, presets

    sizes = {**presets.WHOLE, "digits": 1438}
    for module in (lines, sys.modules["feddpms.experiments.make"]):
        monkeypatch.setattr(module, "WHOLE", sizes)


def small(method="fedavg", seed=0, changes=None):
    return cell(TINY, seed, "digits", method, beta=5.0, clients=3, changes=changes)


class Counted:
    """Which runs were started."""

    def __init__(self):
        self.seeds = []

    def __call__(self, run):
        self.seeds.append(run.seed)


def test_a_line_says_what_was_run_and_what_it_came_to(tmp_path):
    todo = [small(), replace(small("feddpms", 1, DPMS), ablation="something")]
    plain, dpms = make(todo, tmp_path / "r/x.jsonl", tmp_path / "out", {})
    assert (plain.data, plain.fraction, plain.beta) == ("digits", pytest.approx(0.1, abs=1e-3), 5)
    assert (plain.clients, plain.rounds, plain.local_epochs, plain.seed) == (3, 2, 1, 0)
    assert (plain.method, plain.epsilon, plain.delta, plain.ablation) == ("fedavg", *[None] * 3)
    assert (dpms.method, dpms.epsilon, dpms.delta, dpms.seed) == ("feddpms", 2.0, 1e-5, 1)
    assert dpms.ablation == "something"
    paper = small("feddpms", 1, merge(DPMS, PAPER))
    (unsound,) = make([paper], tmp_path / "r/z.jsonl", tmp_path / "paper", {})
    assert (unsound.epsilon, unsound.delta) == (None, None)  # no epsilon covers it
    result = runs.run(config.parse(todo[0].values))
    assert plain.accuracies == pytest.approx([r.test_accuracy for r in result.rounds], abs=1e-6)
    assert plain.final_accuracy == plain.accuracies[-1]
    assert plain.last5_accuracy == pytest.approx(sum(plain.accuracies) / 2, abs=1e-6)
    assert set(plain.versions) == {"python", "feddpms", "torch"}
    assert read(tmp_path / "r/x.jsonl") == [plain, dpms]
    page = (tmp_path / "out/report.html").read_text()
    (ours,) = tables("x", [plain, dpms])
    assert page.count(f"<h2>{ours.title}</h2>") == 1
    for words in (*ours.head, *(one for row in ours.rows for one in row)):
        assert f">{words}<" in page
    assert "arXiv 2206.00686" in page
    keys = json.loads((tmp_path / "r/x.jsonl").read_text().splitlines()[0])
    assert list(keys)[:16] == [
        *("data", "fraction", "beta", "clients", "rounds", "local_epochs", "method", "seed"),
        *("epsilon", "delta", "final_accuracy", "last5_accuracy", "ablation", "command"),
        *("minutes", "versions"),
    ]


def test_a_line_of_held_out_examples_says_so(tmp_path):
    (one,) = make(
        [small(changes={"data": {"validation": 0.2}})], tmp_path / "x.jsonl", tmp_path, {}
    )
    assert one.validation == 0.2
    assert one.fraction == pytest.approx(0.1, abs=1e-3), "of what was taken, the held out as well"
    assert "--set data.validation=0.2" in one.command
    (plain,) = make([small()], tmp_path / "x.jsonl", tmp_path, {})
    assert plain.validation == 0


def test_accuracy_is_the_last_rounds_and_never_the_best(tmp_path):
    make([small()], tmp_path / "x.jsonl", tmp_path / "out", {})
    (folder,) = find([tmp_path / "out"])
    curve = (0.1, 0.9, 0.5, 0.8, 0.3, 0.6, 0.2)
    rounds = tuple(
        replace(folder.rounds[0], round=i, test_accuracy=a) for i, a in enumerate(curve, 1)
    )
    run = replace(folder.run, rounds=len(curve))
    one = line(small(), replace(folder, run=run, rounds=rounds))
    assert one.final_accuracy == 0.2
    assert one.last5_accuracy == pytest.approx((0.5 + 0.8 + 0.3 + 0.6 + 0.2) / 5)
    assert one.accuracies == curve


@pytest.mark.parametrize(
    "method", ["fedavg", "feddpms", "feddpms+moon", "fedmix"], ids=lambda name: name
)
def test_the_command_of_a_line_repeats_its_run(method, tmp_path, monkeypatch):
    """What the command line makes of it is the cell's own run."""
    extra = {"method": {"synthesis": {"per_class": 7}}} if "feddpms" in method else {}
    one = small(method, 4, extra)
    given = []
    monkeypatch.setattr(runs, "run", lambda settings, *_: given.append(settings) or 1 / 0)
    monkeypatch.setattr(sys, "argv", shlex.split(command(one)))
    with pytest.raises(SystemExit):
        main()
    assert given == [config.parse(one.values)]


def test_the_place_of_the_data_is_not_in_the_command():
    one = small()
    there = replace(one, values=merge(one.values, {"data": {"dir": "/some/where"}}))
    assert command(there) == command(one).replace(" --set", " --data-dir DIR --set", 1)


def test_what_is_made_is_not_made_again(tmp_path):
    started, file = Counted(), tmp_path / "x.jsonl"
    first = make([small(), small(seed=1)], file, tmp_path / "out", {}, started)
    again = make([small(seed=1), small(), small(seed=2)], file, tmp_path / "out", {}, started)
    assert started.seeds == [0, 1, 2]
    assert again[:2] == [first[1], first[0]]
    assert [one.seed for one in read(file)] == [0, 1, 2]
    assert missing([small(), small(seed=3)], file, {}) == [small(seed=3)]


def test_another_experiment_of_the_folder_lends_its_cells(tmp_path):
    started = Counted()
    (one,) = make([small()], tmp_path / "x.jsonl", tmp_path / "out", {}, started)
    named = replace(small(), ablation="as it is")
    assert missing([named], tmp_path / "y.jsonl", {}) == []
    (lent,) = make([named], tmp_path / "y.jsonl", tmp_path / "other", {}, started)
    assert started.seeds == [0]
    assert lent == replace(one, ablation="as it is")
    assert read(tmp_path / "y.jsonl") == [lent]


class Stopped(BaseException):
    """A run stopped from outside."""


def test_a_stopped_run_goes_on_and_ends_the_same(tmp_path):
    (whole,) = make([small()], tmp_path / "a/x.jsonl", tmp_path / "a/out", {})

    def stop(record):
        raise Stopped

    with pytest.raises(Stopped):
        make(
            [small(seed=1), small()],
            tmp_path / "b/x.jsonl",
            tmp_path / "b/out",
            {},
            lambda run: None if run.seed else stop,
        )
    assert [one.seed for one in read(tmp_path / "b/x.jsonl")] == [1], "kept as soon as made"
    seen = []
    (after,) = make(
        [small()], tmp_path / "b/x.jsonl", tmp_path / "b/out", {}, lambda run: seen.append
    )
    assert [record.round for record in seen] == [2], "the first round is not run again"
    assert replace(after, minutes=0) == replace(whole, minutes=0)


def test_a_finished_run_without_its_line_is_read_not_run(tmp_path):
    (one,) = make([small()], tmp_path / "x.jsonl", tmp_path / "out", {})
    (tmp_path / "x.jsonl").unlink()
    started = Counted()
    (same,) = make([small()], tmp_path / "x.jsonl", tmp_path / "out", {}, started)
    assert same == one
    assert started.seeds == []


def test_a_run_that_diverges_has_no_accuracy(tmp_path):
    wild = small(changes={"local": {"optimizer": "sgd", "lr": 1e30}})
    (one,) = make([wild], tmp_path / "x.jsonl", tmp_path / "out", {})
    assert one.final_accuracy is None
    assert one.last5_accuracy is None
    assert read(tmp_path / "x.jsonl") == [one]


def test_a_part_is_of_the_whole_set_wherever_a_part_of_it_lies(tmp_path, monkeypatch):
    """Half of a set in the folder: a tenth of the whole is a fifth of that."""
    where = sys.modules["feddpms.experiments.make"]
    monkeypatch.setitem(where.WHOLE, "digits", 2 * 1438)
    (one,) = make([small()], tmp_path / "x.jsonl", tmp_path / "out", {})
    assert "--fraction 0.2 " in one.command
    assert one.fraction == pytest.approx(0.1, abs=1e-3)
    large = small(changes={"data": {"fraction": 0.6}})
    with pytest.raises(ConfigError, match=r"expected 1,726 .* got 1,438"):
        make([large], tmp_path / "x.jsonl", tmp_path / "out", {})


def test_nothing_is_made_before_all_fit(tmp_path):
    wrong = small(changes={"local": {"epochs": 0}})
    with pytest.raises(ConfigError):
        make([small(), wrong], tmp_path / "x.jsonl", tmp_path / "out", {})
    assert not (tmp_path / "x.jsonl").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{}", "[1]", "no json", '{"data": "digits"}'])
def test_a_broken_line_is_named(text, tmp_path):
    (one,) = make([small()], tmp_path / "x.jsonl", tmp_path / "out", {})
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(RunFolderError, match="line 2: expected a JSON object with data") as told:
        read(tmp_path / "x.jsonl")
    assert "\n" not in str(told.value)
    write(tmp_path / "x.jsonl", [one])
    assert read(tmp_path / "x.jsonl") == [one]


def test_the_prediction_grows_with_the_work():
    scale = Scale(fraction=0.1, rounds=20, epochs=3, width=0.5)
    plain, moon, longer = (
        cell(scale, 0, "fmnist", "fedavg"),
        cell(scale, 0, "fmnist", "moon"),
        cell(replace(scale, rounds=40), 0, "fmnist", "fedavg"),
    )
    one, other, twice = predicted([plain, moon, longer], workers=1)
    assert 0 < one < other
    assert twice == pytest.approx(2 * one)
    assert predicted([plain], workers=2) == pytest.approx([one / 2])
    images = {"method": {"secondary": "train"}}
    resting, decoding = predicted(
        [cell(scale, 0, "fmnist", "feddpms", changes=c) for c in ({}, images)], workers=1
    )
    assert decoding == pytest.approx(1.5 * resting)
