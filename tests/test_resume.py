"""A run that was stopped goes on, and ends in the same bytes as one that was not."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from feddpms import config, runs
from feddpms.errors import RunFolderError
from feddpms.folder import CHECKPOINT, MEMORIES
from small import GOES_ON

SMALL = {
    "rounds": 4,
    "data": {"name": "digits", "fraction": 0.08},
    "partition": {"clients": 3, "beta": 5.0},
    "local": {"epochs": 1},
    "net": {"width": 0.25},
    "privacy": {"target_epsilon": 50.0, "count_noise_multiplier": 0.5, "min_class_count": 3.0},
}
PAID = {"weights": "noisy", "training": {"kind": "dpsgd", "expected_examples": 64}}
CASES = {
    "feddpms": {"name": "feddpms", **GOES_ON, "preliminary_rounds": 2},
    "resting": {"name": "feddpms", "preliminary_rounds": 1},
    "feddpms+moon": {
        "name": "feddpms+moon",
        **GOES_ON,
        "preliminary_rounds": 1,
        "decoder_period": 0,
    },
    "fedmix": {"name": "fedmix"},
    "fedda": {"name": "fedda", "preliminary_rounds": 2},
    "feddpms+fedadam": {"name": "feddpms+fedadam", **GOES_ON, "preliminary_rounds": 2},
    "pfnm": {"name": "pfnm", "prior": {"gamma": 7.0}},
    "fedma": {"name": "fedma", "prior": {"gamma": 7.0}},
    "feddg": {"name": "feddg"},
    "zdac": {"name": "zdac+moon", "inversion": {"steps": 5}},
    "zdas": {"name": "zdas", "inversion": {"steps": 5}},
    "sharing": {"name": "sharing+moon", "preliminary_rounds": 1, "scarce_below": 0.9},
    "sharing, some": {"name": "sharing", "preliminary_rounds": 1, "scarce_below": 0.9},
    "local": {"name": "local"},
    "central": {"name": "central"},
    "some": {"name": "feddpms+moon", **GOES_ON, "preliminary_rounds": 2},
    "private": {"name": "feddpms", **GOES_ON, "preliminary_rounds": 2},
    "silent": {"name": "feddpms+moon", **GOES_ON, "preliminary_rounds": 1, "decoder_period": 1},
}


def settings(case: str, **more):
    values = {**SMALL, "method": CASES[case], **more}
    if case == "private":
        values["privacy"] = {**SMALL["privacy"], **PAID}
        values["net"] = {"width": 0.25, "norm": "group"}
    if case == "pfnm":
        values["net"] = {"width": 0.25, "kind": "mlp"}
    if case in ("some", "sharing, some"):  # not all memories fit in memory
        values["engine"] = {"cohort": 0.4}
    if case == "silent":  # two of three clients in rounds 2 and 4
        values["engine"] = {"dropout": 0.4}
        values["local"] = {"epochs_range": [1, 3]}
    return config.parse(values)


class Stopped(BaseException):
    """A run stopped from outside."""


def stop_after(number: int):
    def on_round(record):
        if record.round == number:
            raise Stopped

    return on_round


FILES = (
    "run.toml",
    "ledger.jsonl",
    "model.safetensors",
    "released.safetensors",
    "images.safetensors",
)


def assert_same(one: Path, other: Path) -> None:
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
    for name in FILES:
        if (one / name).exists():
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    logs = [runs.records.read(folder / "records.jsonl") for folder in (one, other)]
    assert [timeless(r) for r in logs[0]] == [timeless(r) for r in logs[1]]


def timeless(record):
    return {k: v for k, v in asdict(record).items() if k not in ("seconds", "timing") and v == v}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Each case run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    for case in CASES:
        runs.run(settings(case), folder / case)
    return folder


@pytest.mark.parametrize(
    ("case", "after"),
    [("feddpms", 1), ("feddpms", 4), *((case, after) for case in CASES for after in (2, 3))],
)
def test_a_resumed_run_ends_in_the_same_bytes(case, after, whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        runs.run(settings(case), folder, stop_after(after))
    assert (folder / CHECKPOINT).exists()
    (result,) = runs.resume(folder)
    assert_same(folder, whole / case)
    assert [r.round for r in result.rounds] == [1, 2, 3, 4]
    assert runs.resume(folder) == []  # nothing is left to do


def test_a_run_stopped_within_a_round_ends_in_the_same_bytes(whole, tmp_path):
    """What the round had written to ledger and log beyond the checkpoint is cut off."""
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        runs.run(settings("feddpms"), folder, stop_after(2))
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"state": "received", "round": 3, "client": 0, "channel": "x", "mechanism"')
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"type": "round", "round": 3,')
    runs.resume(folder)
    assert_same(folder, whole / "feddpms")


def test_a_run_killed_before_its_first_checkpoint_begins_anew(whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        runs.run(settings("feddpms"), folder, stop_after(1))
    (folder / CHECKPOINT).unlink()
    runs.resume(folder)
    assert_same(folder, whole / "feddpms")


def test_a_run_killed_while_it_finished_is_finished(whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        runs.run(settings("feddpms"), folder, stop_after(4))
    shutil.copytree(folder, tmp_path / "kept")
    runs.resume(folder)
    for name in (CHECKPOINT, MEMORIES):  # as if killed before it was removed
        (tmp_path / "kept" / name).rename(folder / name)
    runs.resume(folder)
    assert_same(folder, whole / "feddpms")


def test_workers_and_a_stop_change_no_byte(whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        runs.run(settings("feddpms"), folder, stop_after(2), workers=2)
    runs.resume(folder, workers=2)
    assert_same(folder, whole / "feddpms")


def test_a_comparison_goes_on_where_it_was_stopped(tmp_path):
    methods = [{"name": "fedavg"}, {"name": "fedprox"}]
    begun = []

    def stop_in_the_second(run):
        begun.append(run)
        return stop_after(2) if len(begun) == 2 else None

    runs.compare(settings("local"), methods, [0, 1], tmp_path / "whole")
    with pytest.raises(Stopped):
        runs.compare(settings("local"), methods, [0, 1], tmp_path / "cut", stop_in_the_second)
    done = runs.resume(tmp_path / "cut")
    assert len(done) == 3
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "cut").iterdir())
    for name in names:
        if name != "report.html":
            assert_same(tmp_path / "whole" / name, tmp_path / "cut" / name)


def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(tmp_path):
    with pytest.raises(RunFolderError, match="expected a folder of a run or of a comparison"):
        runs.resume(tmp_path)
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        runs.run(settings("local"), folder, stop_after(2))
    log = folder / "records.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole.replace(b'"train_examples": 1', b'"train_examples": 2', 1))
    with pytest.raises(RunFolderError, match="expected the data and the split"):
        runs.resume(folder)
    log.write_bytes(whole[:-200])
    with pytest.raises(RunFolderError, match="as long as at the last checkpoint"):
        runs.resume(folder)
    assert log.read_bytes() == whole[:-200]
    log.write_bytes(whole)
    kept = (folder / CHECKPOINT).read_bytes()
    (folder / CHECKPOINT).write_bytes(kept[:-9])
    with pytest.raises(RunFolderError, match="damaged bytes"):
        runs.resume(folder)
    (folder / CHECKPOINT).write_bytes(kept)
    runs.resume(folder)
