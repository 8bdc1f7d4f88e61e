import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from feddpms import FedAvg, FedDPMS, Run, Scaffold, compare, config, records, run, runs, sheets
from feddpms.algorithms import Training
from feddpms.data import Data, Dataset, Partition
from feddpms.errors import ConfigError, DataError, FeddpmsError, RunFolderError
from feddpms.models import NetSettings, trunk
from feddpms.privacy import Privacy
from feddpms.types import Memory, Shard
from small import CLASSES, GOES_ON, TASK, blobs, small_net, unseen

SMALL = Run(
    method=FedAvg(),
    rounds=2,
    data=Data(fraction=0.1),
    partition=Partition(clients=3),
    net=NetSettings(width=0.25),
    local=Training(epochs=1),
)
SET = Dataset("blobs", blobs(30, [0, 1], 1), unseen(), ("a", "b", "c"))


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> tuple[Path, runs.Result, list]:
    """A run without a folder, in an empty directory."""
    here, seen = tmp_path_factory.mktemp("nowhere"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        return here, run(SMALL, on_round=seen.append), seen


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> runs.Result:
    return run(SMALL, tmp_path_factory.mktemp("runs") / "deep" / "first")


def test_a_run_without_a_folder_writes_nothing(silent):
    here, result, _ = silent
    assert os.listdir(here) == []
    assert result.folder is None


def test_accuracy_is_that_of_the_last_round_not_the_best():
    rounds = tuple(
        records.RoundRecord(
            round=i + 1,
            phase="train",
            test_accuracy=accuracy,
            test_loss=1.0,
            per_class_accuracy=(),
            train_loss=1.0,
            seconds=0.0,
            bytes_up=0,
            bytes_down=0,
        )
        for i, accuracy in enumerate((0.2, 0.9, 0.6))
    )
    assert runs.Result(SMALL, {}, rounds, "", None).accuracy == 0.6


def test_each_round_is_told_and_kept(silent):
    _, result, seen = silent
    assert tuple(seen) == result.rounds
    assert [r.round for r in seen] == [1, 2]
    assert result.settings == SMALL
    assert "Not covered" in result.claim


def test_writing_changes_nothing_of_the_result(silent, written):
    _, result, _ = silent
    for one, other in zip(result.rounds, written.rounds, strict=True):
        assert replace(one, seconds=0, timing={}) == replace(other, seconds=0, timing={})
    assert all(torch.equal(v, written.model[k]) for k, v in result.model.items())


def test_the_folder_holds_the_result(written):
    stored = load_file(written.folder / "model.safetensors")
    assert stored.keys() == written.model.keys()
    assert all(torch.equal(v, written.model[k]) for k, v in stored.items())
    lines = records.read(written.folder / "records.jsonl")
    assert tuple(lines[2:-1]) == written.rounds
    assert lines[-1].claim == written.claim
    assert not (written.folder / "images.safetensors").exists()


def test_a_taken_folder_is_left_as_it_is(written):
    before = (written.folder / "records.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="holds something"):
        run(SMALL, written.folder)
    assert (written.folder / "records.jsonl").read_bytes() == before


BROKEN = [
    replace(SMALL, method=FedDPMS(**GOES_ON, preliminary_rounds=2)),
    replace(SMALL, method=FedDPMS(inner=Scaffold()), local=Training(optimizer="adam")),
    replace(SMALL, partition=Partition(clients=5000)),
    replace(SMALL, privacy=Privacy(count_noise_multiplier=0.1)),
    replace(SMALL, data=Data(name="digitz")),
    replace(SMALL, data=Data(name="npz", dir="missing.npz")),
]


@pytest.mark.parametrize("settings", BROKEN)
def test_settings_are_checked_before_a_folder_is_made(settings, tmp_path):
    with pytest.raises(FeddpmsError):
        run(settings, tmp_path / "new")
    with pytest.raises(FeddpmsError):
        compare(settings, [config.dump(settings.method)], [0], tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_bad_method_among_good_ones_is_found_before_anything_is_written(tmp_path):
    bad = {"name": "feddpms", "preliminary_rounds": 9}
    with pytest.raises(ConfigError, match="preliminary_rounds"):
        compare(SMALL, [{"name": "fedavg"}, bad], [0, 1], tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_bad_method_does_not_wait_for_the_data(tmp_path):
    with pytest.raises(ConfigError, match="fedavg"):
        compare(replace(SMALL, data=Data(name="npz")), [{"name": "fedavgg"}], [0], tmp_path / "n")
    with pytest.raises((ConfigError, DataError)):
        run(replace(SMALL, data=Data(name="npz")), tmp_path / "n")


def test_settings_built_in_python_are_checked_where_they_are_made():
    with pytest.raises(ValidationError):
        replace(SMALL, rounds=0)


@pytest.mark.parametrize("made", [None, "empty"])
def test_a_new_folder_is_made_or_an_empty_one_taken(made, tmp_path):
    path = tmp_path / "a" / "b"
    if made:
        path.mkdir(parents=True)
    assert runs.new_folder(path) == path
    assert path.is_dir()


def test_a_folder_that_holds_something_or_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(RunFolderError, match="expected a new or empty folder") as caught:
            runs.new_folder(path)
        assert str(path) in str(caught.value)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("call", ["mkdir", "exists", "iterdir"])
def test_a_place_that_may_not_be_used_is_one_line(call, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "new").mkdir()
    path = tmp_path / "new" if call == "iterdir" else tmp_path / "new" / "deeper"
    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(RunFolderError, match=r"got .*new.*: Permission denied; choose") as caught:
        runs.new_folder(path)
    assert "\n" not in str(caught.value)


def test_a_folder_below_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="Not a directory"):
        runs.new_folder(tmp_path / "file" / "new")


def made_of(*classes: int) -> Memory:
    """A client with synthetic images, all of one gray that tells the class."""
    y = torch.tensor(classes, dtype=torch.int64)
    return Memory(synthetic=Shard((y + 1).view(-1, 1, 1, 1).expand(-1, 1, 4, 4) / 10, y))


def test_the_sheet_shows_real_images_of_the_test_set_and_synthetic_ones_by_class():
    memories = {1: made_of(*[2] * 20), 0: made_of(0, 2), 2: Memory()}
    sheet = sheets.sheet(SET, memories, TASK, {})
    assert sheet["real"].shape == sheet["synthetic"].shape == (CLASSES, sheets.SHEET, 1, 4, 4)
    assert sheet["real"].dtype == sheet["synthetic"].dtype == torch.uint8
    assert sheet["synthetic_count"].tolist() == [1, 0, sheets.SHEET]
    assert sheet["synthetic_count"].dtype == torch.int64
    for c in range(CLASSES):
        test = {
            tuple(x.mul(255).round().byte().flatten().tolist()) for x in SET.test.x[SET.test.y == c]
        }
        assert {tuple(x.flatten().tolist()) for x in sheet["real"][c]} <= test
    grays = sheet["synthetic"][:, :, 0, 0, 0]
    assert grays[0].tolist() == [26, *[0] * 7]
    assert grays[1].tolist() == [0] * 8
    assert grays[2].tolist() == [76] * 8


def test_no_image_of_a_client_is_on_the_sheet():
    sheet = sheets.sheet(SET, {0: made_of(0)}, TASK, {})
    train = {tuple(x.mul(255).round().byte().flatten().tolist()) for x in SET.train.x}
    assert not train & {tuple(x.flatten().tolist()) for c in sheet["real"] for x in c}


def test_with_a_decoder_the_real_images_are_shown_as_it_rebuilds_them():
    net = small_net().eval()
    net.mean.weight.data *= 1000  # so that codes differ, as those of a trained network do
    model = {k: v for k, v in net.state_dict().items() if not k.startswith("log_variance.")}
    sheet = sheets.sheet(SET, {0: made_of(0)}, TASK, model)
    few = sheets._few(SET.test, CLASSES, sheets.SHEET)
    with torch.no_grad():
        want = net.decode(net.code(few.x))
    again = sheets._again(SET.test, CLASSES, TASK, model)
    torch.testing.assert_close(again.x, want, rtol=0, atol=1e-7)
    assert (want - want.flip(0)).abs().max() > 1e-3
    shown = want.mul(255).round().byte().view(CLASSES, sheets.SHEET, 1, 4, 4)
    assert torch.equal(sheet["reconstructed"], shown)
    assert "reconstructed" not in sheets.sheet(SET, {0: made_of(0)}, TASK, trunk(model))


@pytest.mark.parametrize("memories", [{}, {0: Memory()}, {0: made_of()}])
def test_there_is_no_sheet_without_synthetic_images(memories):
    assert sheets.sheet(SET, memories, TASK, {}) == {}


def test_pooled_records_are_in_the_ledger_and_void_a_finite_total(tmp_path):
    """Central training pools the records themselves, however its training is done."""
    values = {
        "rounds": 1,
        "data": {"name": "digits", "fraction": 0.08},
        "partition": {"clients": 2},
        "method": "central",
        "local": {"epochs": 1},
        "net": {"width": 0.25, "norm": "group"},
        "privacy": {"weights": "noisy", "training": {"kind": "dpsgd", "expected_examples": 64}},
    }
    result = runs.run(config.parse(values), tmp_path / "run")
    assert "Not covered, sent in the clear: the records themselves" in result.claim
    assert "everything" not in result.claim


def test_no_split_is_written_where_noise_is_secure(tmp_path):
    pytest.importorskip("opendp")
    values = {
        "rounds": 1,
        "data": {"name": "digits", "fraction": 0.08},
        "partition": {"clients": 2},
        "method": "fedavg",
        "local": {"epochs": 1},
        "net": {"width": 0.25},
        "privacy": {"noise": "secure"},
    }
    runs.run(config.parse(values), tmp_path / "run")
    log = (tmp_path / "run" / "records.jsonl").read_text()
    assert '"type": "run"' in log
    assert '"type": "partition"' not in log
    assert '"simulated": true' not in (tmp_path / "run" / "ledger.jsonl").read_text()


@pytest.mark.parametrize(("asked", "started"), [(1000, 2), (2, 2), (1, None)])
def test_no_more_workers_start_than_a_cohort_has_clients(asked, started, monkeypatch):
    counts = []

    class Counted:
        def __init__(self, count):
            counts.append(count)

        def close(self):
            pass

    monkeypatch.setattr(runs, "Workers", Counted)
    settings = config.parse({"partition": {"clients": 8}, "engine": {"cohort": 0.25}})
    with runs._workers(asked, settings, 1000, 1):
        assert counts == ([started] if started else [])
