import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_folders import PRIVACY, Maker, diverge, images

from feddpms.errors import RunFolderError
from feddpms.report.load import find, load


def test_load_gives_back_what_was_written(make: Maker):
    run = load(make("feddpms", 4, pictures=images(10, [8] * 10)))

    assert run.run.method == "feddpms"
    assert run.run.seed == 4
    assert run.partition is not None
    assert len(run.partition.levels) == 10
    assert [r.round for r in run.rounds] == list(range(1, 21))
    assert run.settings["train"] == {"lr": 0.05, "epochs": 5}
    assert len(run.ledger) == 20
    assert run.claim == PRIVACY
    assert run.images["synthetic"].shape == (10, 8, 1, 8, 8)
    assert run.status == "finished"
    assert run.finished


def test_an_interrupted_run_loads_and_says_so(make: Maker):
    run = load(make(change=lambda lines: lines[:12]))

    assert run.claim is None
    assert run.status == "unfinished (12 of 20 rounds)"
    assert not run.finished
    assert load(make("moon", change=lambda lines: [])).status == "unfinished (0 of 20 rounds)"


def test_a_run_without_finite_loss_has_diverged(make: Maker):
    assert load(make(change=diverge)).status == "diverged (loss not finite in round 14)"


def test_a_run_that_lost_only_its_training_loss_at_the_end_has_diverged(make: Maker):
    run = load(make(change=lambda lines: [*lines[:-1], replace(lines[-1], train_loss=math.nan)]))

    assert run.diverged == 20


def test_a_last_round_without_anything_to_train_on_is_no_divergence(make: Maker):
    def idle(lines):
        return [*lines[:-1], replace(lines[-1], train_loss=math.nan, numbers={"steps": 0})]

    assert load(make(change=idle)).finished


def test_an_early_phase_without_a_test_loss_is_no_divergence(make: Maker):
    def untested(lines):
        return [replace(r, test_loss=math.nan) if r.phase == "vae" else r for r in lines]

    assert load(make("feddpms", change=untested)).finished


def test_find_takes_run_folders_and_folders_above_them_each_once(make: Maker):
    one, two = make("fedavg", name="a/deep/one"), make("moon", name="b")

    assert [f.run.method for f in find([make.root])] == ["fedavg", "moon"]
    assert [f.run.method for f in find([two, make.root, one])] == ["moon", "fedavg"]


def test_find_names_the_path_that_holds_no_run(make: Maker, tmp_path: Path):
    make()
    (tmp_path / "empty").mkdir()

    with pytest.raises(RunFolderError, match=r"empty, got a folder without records\.jsonl"):
        find([make.root, tmp_path / "empty"])
    with pytest.raises(RunFolderError, match=r"missing, got no such folder"):
        find([tmp_path / "missing"])
    with pytest.raises(RunFolderError, match="got none"):
        find([])


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def without_run(lines):
    return lines[1:]


def twice_a_round(lines):
    return [*lines[:-2], lines[-3], lines[-1]]


def too_many_rounds(lines):
    return [{**lines[0], "rounds": 3}, *lines[1:]]


def few_classes(lines):
    return [{**lines[0], "classes": ["a", "b"]}, *lines[1:]]


def text_for_a_number(lines):
    return [*lines[:-2], {**lines[-2], "test_loss": "low"}]


def classes_as_text(lines):
    return [{**lines[0], "classes": "0123456789"}, *lines[1:]]


def rounds_after_the_claim(lines):
    return [*lines[:-3], lines[-1], *lines[-3:-1]]


def run_record_again(lines):
    return [*lines, lines[0]]


@pytest.mark.parametrize(
    "spoil",
    [
        without_run,
        twice_a_round,
        too_many_rounds,
        few_classes,
        text_for_a_number,
        classes_as_text,
        run_record_again,
        rounds_after_the_claim,
    ],
)
def test_records_that_do_not_fit_are_refused_in_one_line(make: Maker, spoil):
    folder = make()
    spoiled = "".join(json.dumps(line) + "\n" for line in spoil(lines_of(folder)))
    (folder / "records.jsonl").write_text(spoiled)

    with pytest.raises(RunFolderError, match=r"records\.jsonl") as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("records.jsonl", "{"),
        ("run.toml", "seed = "),
        ("ledger.jsonl", "[1, 2]\n"),
        ("ledger.jsonl", '{"round": 1}\n'),
        ("images.safetensors", "not tensors"),
    ],
)
def test_a_broken_file_is_named(make: Maker, file: str, text: str):
    folder = make()
    (folder / file).write_text(text)

    with pytest.raises(RunFolderError, match=file.replace(".", r"\.")):
        load(folder)


def test_a_missing_settings_file_is_refused_and_a_missing_ledger_is_empty(make: Maker):
    folder = make()
    (folder / "ledger.jsonl").unlink()
    assert load(folder).ledger == []

    (folder / "run.toml").unlink()
    with pytest.raises(RunFolderError, match=r"run\.toml"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"real": np.zeros((10, 8, 8, 8), np.uint8)},
        {"real": np.zeros((10, 8, 1, 8, 8), np.float32)},
        {"synthetic": np.zeros((9, 8, 1, 8, 8), np.uint8)},
        {"synthetic_count": np.zeros(3, np.int64)},
    ],
)
def test_images_of_another_shape_are_refused(make: Maker, change):
    folder = make(pictures=images(10, [1] * 10) | change)

    with pytest.raises(RunFolderError, match=r"images\.safetensors"):
        load(folder)


def test_a_ledger_line_cut_off_by_a_kill_is_left_out(make: Maker):
    folder = make("feddpms")
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text() + '{"round": 3, "chan')
    assert len(load(folder).ledger) == 20
