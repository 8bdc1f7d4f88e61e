import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import feddpms
from feddpms import config, records
from feddpms.algorithms import METHODS
from feddpms.cli import main
from feddpms.data import DATASETS, levels
from feddpms.records import PartitionRecord, RoundRecord, RunRecord

SMALL = [
    *shlex.split("--data digits --clients 3 --fraction 0.1"),
    *shlex.split("--rounds 2 --local-epochs 1 --set net.width=0.25"),
]

SGD = shlex.split("--set local.optimizer=sgd --set local.lr=0.01 --set local.batch_size=8")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def feddpms_command(*arguments: str, folder: Path) -> Said:
    """The command as a user calls it in a folder, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["feddpms", *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stop:
                code = stop.code
    return Said(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, Path | Said]:
    """Three runs of the same settings: twice by options, once from the first one's run.toml."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["run", "--method", "feddpms", *SMALL, "--set", "method.secondary=train"]
    first = feddpms_command(*options, "--out", "a", folder=folder)
    feddpms_command(*options, "--out", "b", folder=folder)
    feddpms_command("run", "a/run.toml", "--out", "c", folder=folder)
    return {"folder": folder, "said": first}


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, Said]:
    folder = tmp_path_factory.mktemp("compared")
    options = ["--methods", "fedavg,fedprox", "--seeds", "0,1", "--set", "fedprox.mu=0.3"]
    return folder, feddpms_command("compare", *SMALL, *options, "--out", "page", folder=folder)


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a finished run, a file, a picture and settings that are broken."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "records.jsonl").write_text("what another run wrote\n")
    (tmp_path / "file").write_text("x")
    (tmp_path / "pic.svg").write_text("x")
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "typo.toml").write_text("[net]\nwidht = 1")
    (tmp_path / "local.npz").write_bytes(b"no archive")
    for side in (1, 7, 16):
        labels = np.arange(400) % 4
        np.savez(tmp_path / f"{side}.npz", x=np.zeros((400, side, side)), y=labels)
    return tmp_path


BAD = [
    "run --method fedavgg",
    "run --method fedavg+moon",
    "run --method feddpms+fedmix",
    "run --method fedmix+central",
    "run --method feddpms+",
    "run --set method=3",
    "run --data digitz",
    "run --set net.widht=1",
    "run --set netx=1",
    "run --set method.inner.mu=1",
    "run --method fedavg --set method.mu=1",
    "run --method pfnm",
    "run --method pfnm --set net.kind=mlp --set method.prior.sigma=1e-200",
    "run --method zdac --set net.norm=group",
    "run --set net=3",
    "run --set net.width=wide",
    "run --set net.width.a=1",
    "run --set noequals",
    "run missing.toml",
    "run broken.toml",
    "run typo.toml",
    "run old",
    "run --data npz --data-dir missing.npz",
    "run --data npz --data-dir local.npz",
    "run --data npz",
    "run --data npz --data-dir 7.npz",
    "run --data npz --data-dir 1.npz --method feddg --set net.kind=mlp",
    "run --data fmnist --data-dir missing",
    "run --data cifar10",
    "run --clients 5000",
    "run --clients 100",
    "run --beta 0",
    "run --beta -1",
    "run --beta nan",
    "run --beta little",
    "run --clients 0",
    "run --cohort 0",
    "run --cohort 1.5",
    "run --rounds 0",
    "run --rounds 1",
    "run --set method.preliminary_rounds=2",
    "run --set method.preliminary_rounds=7",
    "run --local-epochs 0",
    "run --set local.epochs_range=5,1",
    "run --set local.epochs_range=few,many",
    "run --set local.epochs_range=[1,5] --set privacy.training.kind=dpsgd",
    "run --set engine.dropout=1",
    "run --set engine.dropout=-0.1",
    "run --set engine.max_loss=0",
    "run --seed -1",
    "run --fraction 0",
    "run --partition dirichlett",
    "run --set privacy.count_noise_multiplier=0.1",
    "run --set privacy.count_noise_multiplier=1e300",
    "run --set privacy.max_epsilon=8",
    "run --method central --set privacy.max_epsilon=8",
    "run --set privacy.release=paper --set privacy.max_epsilon=8",
    "run --set privacy.training.kind=dpsgd",
    "run --set privacy.release=fixed_m_mean --set method.synthesis.spread=released",
    "run --set privacy.target_delta=1e-300",
    "run --workers 0",
    "run --workers many",
    "resume missing",
    "ledger missing",
    "ledger old --delta 2",
    "calibrate --epsilon 0",
    "calibrate --epsilon nan",
    "calibrate --delta 1",
    "calibrate --latent 0",
    "calibrate --rounds 100000 --epsilon 2",
    "calibrate --count-noise-multiplier 0.1",
    "audit release --runs 0",
    "audit release --size 0",
    "audit release --seed 99999999999999999999999",
    "audit release --release paper",
    "audit attack missing",
    "run --out old",
    "run --out file",
    "run --out file/new",
    "run --nope",
    "run typo.toml more",
    "nope",
    "compare --methods fedavg,fedavgg --out new",
    "compare --methods fedavg,fedavg+moon --out new",
    "compare --methods fedavg,feddpms+fedmix --out new",
    "compare --methods fedavg,feddpms --rounds 1 --out new",
    "compare --methods fedavg,feddpms --set feddpms.preliminary_rounds=2 --out new",
    "compare --methods fedavg,fedprox --set fedprox.muu=1 --out new",
    "compare --methods fedavg --set fedprox.mu=1 --out new",
    "compare --methods fedavg,fedavg --out new",
    "compare --methods fedmix,fedmix+fedavg --out new",
    "compare --methods , --out new",
    "compare --methods fedavg --seeds 0,0 --out new",
    "compare --methods fedavg --seeds x --out new",
    "compare --methods fedavg --beta 0 --out new",
    "compare --methods fedavg --out old",
    "compare --methods fedavg --out file/new",
    "partition --data digits --out pic.svg",
    "partition --data digits --out pic.pdf",
    "partition --data digits --out file/new.svg",
    "partition --data digits --out missing/new.svg",
    "partition --data digits --beta 0",
    "partition --data digits --clients 5000",
    "settings fedavgg",
    "settings fedavg+moon",
    "report missing",
    "report old",
    "report",
]


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_is_one_line_and_changes_nothing(line, place):
    verb, *rest = shlex.split(line)
    before = contents(place)
    said = feddpms_command(
        verb, *(SMALL if verb in ("run", "compare") else ()), *rest, folder=place
    )
    assert said.code == 2, said.err
    assert said.err.startswith("feddpms: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert contents(place) == before


def test_a_place_where_nothing_may_be_made_is_one_line(place, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    said = feddpms_command("run", *SMALL, "--out", "new", folder=place)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "Permission denied" in said.err


def test_a_mistake_of_ours_keeps_its_traceback(place, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(config, "parse", fail)
    said = feddpms_command("run", *SMALL, folder=place)
    assert said.code == 1
    assert "Traceback" in said.err
    assert "ZeroDivisionError: ours" in said.err


def test_an_interrupt_is_one_word_and_130(place, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "parse", interrupt)
    said = feddpms_command("run", *SMALL, folder=place)
    assert (said.code, said.err) == (130, "feddpms: stopped\n")


def test_the_process_exits_with_2_and_one_line(place):
    done = subprocess.run(
        [sys.executable, "-m", "feddpms", "run", "missing.toml"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "feddpms: no settings at missing.toml; give the path of a TOML file\n"


def test_help_lists_every_command():
    done = subprocess.run(
        [sys.executable, "-m", "feddpms", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    for verb in ("run", "compare", "methods", "settings", "datasets", "partition", "report"):
        assert re.search(rf"^  {verb} ", done.stdout, re.M)


def test_without_a_command_the_help_is_shown_as_it_is(tmp_path):
    said = feddpms_command(folder=tmp_path)
    assert "Usage:" in said.out + said.err
    assert re.search(r"^  compare ", said.out + said.err, re.M)


def without_seconds(file: Path) -> str:
    return re.sub(r'"seconds": [\d.e-]+, "timing": {[^}]*}', '"seconds"', file.read_text())


@pytest.mark.parametrize("again", ["b", "c"])
def test_the_same_settings_give_the_same_bytes(finished, again):
    first, other = finished["folder"] / "a", finished["folder"] / again
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in other.iterdir())
    for name in ("run.toml", "ledger.jsonl", "model.safetensors", "images.safetensors"):
        assert (first / name).read_bytes() == (other / name).read_bytes(), name
    assert without_seconds(first / "records.jsonl") == without_seconds(other / "records.jsonl")


def test_a_run_writes_what_was_asked_and_what_happened(finished):
    folder = finished["folder"] / "a"
    run = config.parse(tomllib.loads((folder / "run.toml").read_text()))
    assert (run.rounds, run.partition.clients, run.net.width) == (2, 3, 0.25)
    first, held, *rounds, last = records.read(folder / "records.jsonl")
    assert isinstance(first, RunRecord)
    assert (first.method, first.train_examples, first.test_examples) == ("feddpms", 144, 359)
    assert max(map(max, held.levels)) == 100
    assert [r.phase for r in rounds] == ["vae", "classify"]
    events = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert {e["client"] for e in events} == {0, 1, 2}
    assert {"latent means", "class histogram", "model"} <= {e["channel"] for e in events}
    assert "(2, 1e-05)" in last.claim


def test_a_cohort_of_a_part_of_the_clients_is_asked(tmp_path):
    options = ["--cohort", "0.4", "--out", "part"]
    assert feddpms_command("run", "--method", "fedavg", *SMALL, *options, folder=tmp_path).code == 0
    asked = [e for e in (tmp_path / "part/ledger.jsonl").read_text().splitlines() if '"model"' in e]
    assert len(asked) == 2, "one of three clients in each of two rounds"


@pytest.mark.parametrize("method", ["scaffold", "feddpms+scaffold"])
def test_what_the_refusal_of_adam_advises_is_taken_by_a_comparison(method, tmp_path):
    options = ["compare", *SMALL, "--methods", f"fedavg,{method}", "--out", "page"]
    told = feddpms_command(*options, folder=tmp_path)
    advice = re.search(r"in a comparison: (\S+)\)", told.err).group(1)
    assert feddpms_command(*options, "--set", advice, folder=tmp_path).code == 0


@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_the_network_that_makes_no_images_is_told_which_does(kind, place):
    line = f"run --method zdas --data npz --data-dir 16.npz --set net.kind={kind}"
    said = feddpms_command(*shlex.split(line), folder=place)
    assert "set net.kind=conv and net.norm=batch" in said.err


@pytest.mark.parametrize("method", ["feddg", "feddpms", "fedma"])
def test_an_mlp_learns_from_images_of_any_side(method, place):
    options = shlex.split("--data npz --data-dir 7.npz --set net.kind=mlp --out odd")
    assert feddpms_command("run", "--method", method, *SMALL, *options, folder=place).code == 0


def test_a_run_says_its_accuracy_its_privacy_and_its_page(finished):
    folder, said = finished["folder"], finished["said"]
    assert said.code == 0
    last = records.read(folder / "a" / "records.jsonl")[-2]
    assert f"{100 * last.test_accuracy:.1f}" in said.out
    assert records.read(folder / "a" / "records.jsonl")[-1].claim in said.out
    assert "Page: a/report.html" in said.out
    assert (folder / "a" / "report.html").stat().st_size > 1000


def test_nothing_is_on_standard_error_when_nobody_watches(finished, compared):
    assert finished["said"].err == ""
    assert compared[1].err == ""


def test_a_run_that_diverges_is_one_line_more_and_3(tmp_path):
    wild = ["--method", "fedprox", *SMALL, *SGD, "--set", "method.mu=1e30"]
    said = feddpms_command("run", *wild, "--out", "wild", folder=tmp_path)
    assert said.code == 3
    assert re.fullmatch(
        r"feddpms: diverged: model, train_loss of clients 0, 1, 2 not finite in round 1; .*\n",
        said.err,
    )
    assert "diverged (round 1)" in said.out
    assert "Page: wild/report.html" in said.out
    again = feddpms_command("resume", "wild", folder=tmp_path)
    assert (again.code, again.err) == (0, "")
    assert "Finished now: 0." in again.out


def test_a_comparison_goes_on_when_a_method_diverges(tmp_path):
    options = [*SGD, "--methods", "fedprox,fedavg", "--set", "fedprox.mu=1e30", "--out", "new"]
    said = feddpms_command("compare", *SMALL, *options, folder=tmp_path)
    assert (said.code, said.err) == (0, "")
    lines = [line.split() for line in said.out.splitlines()]
    (wild,) = [line for line in lines if line[:4] == ["fedprox", "0", "of", "1"]]
    assert wild[4:7] == ["diverged", "(round", "1)"]
    (sound,) = [line for line in lines if line[:2] == ["fedavg", "1"]]
    assert 0 < float(sound[2]) < 100


def test_a_finished_run_is_not_overwritten(finished):
    folder = finished["folder"]
    before = contents(folder)
    said = feddpms_command("run", "a/run.toml", "--out", "a", folder=folder)
    assert said.code == 2
    assert contents(folder) == before


def test_runs_without_a_name_for_the_folder_do_not_collide(tmp_path):
    for _ in range(2):
        said = feddpms_command(
            "run", "--method", "fedavg", *SMALL, "--rounds", "1", folder=tmp_path
        )
        assert said.code == 0
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert names == ["digits-fedavg-seed0", "digits-fedavg-seed0-2"]


def test_compare_writes_a_folder_for_each_method_and_seed_and_a_page(compared):
    folder, said = compared
    assert said.code == 0
    assert sorted(p.name for p in (folder / "page").iterdir()) == [
        "fedavg-seed0",
        "fedavg-seed1",
        "fedprox-seed0",
        "fedprox-seed1",
        "report.html",
    ]
    assert re.search(r"^fedavg +2 ", said.out, re.M)
    assert re.search(r"^fedprox +2 ", said.out, re.M)


def test_compare_sets_a_methods_own_setting_for_it_alone(compared):
    for name, method in (
        ("fedavg", {"name": "fedavg"}),
        ("fedprox", {"name": "fedprox", "mu": 0.3}),
    ):
        file = compared[0] / "page" / f"{name}-seed1" / "run.toml"
        assert tomllib.loads(file.read_text())["method"] == method


def test_methods_are_compared_under_equal_conditions(compared):
    read = {p.parent.name: records.read(p) for p in (compared[0] / "page").rglob("records.jsonl")}
    splits = {
        name: next(r for r in lines if isinstance(r, PartitionRecord))
        for name, lines in read.items()
    }
    for seed in (0, 1):
        assert splits[f"fedavg-seed{seed}"] == splits[f"fedprox-seed{seed}"]
    assert splits["fedavg-seed0"] != splits["fedavg-seed1"]
    sent = {
        (r.numbers["steps"], r.bytes_down)
        for name in ("fedavg-seed0", "fedprox-seed0")
        for r in read[name]
        if isinstance(r, RoundRecord)
    }
    assert len(sent) == 1


def test_a_run_of_a_comparison_is_the_run_by_itself(compared):
    folder = compared[0]
    feddpms_command("run", "page/fedprox-seed1/run.toml", "--out", "alone", folder=folder)
    cell, alone = folder / "page" / "fedprox-seed1", folder / "alone"
    assert (cell / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    assert without_seconds(cell / "records.jsonl") == without_seconds(alone / "records.jsonl")


def test_report_prints_the_table_and_writes_a_page(compared):
    folder, said = compared
    again = feddpms_command("report", "page", "--out", "again.html", folder=folder)
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[:6] == said.out.splitlines()[:6]
    assert (folder / "again.html").stat().st_size > 1000


def test_report_prints_markdown(compared):
    said = feddpms_command("report", "page", "--markdown", "--out", "m.html", folder=compared[0])
    assert re.search(r"^\| *fedprox", said.out, re.M)
    assert "|---|" in said.out


def test_methods_are_those_of_the_table(tmp_path):
    said = feddpms_command("methods", folder=tmp_path)
    rows = said.out.split("\n\n")[0].splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [[n, c.about.family] for n, c in METHODS.items()]
    for row, cls in zip(rows, METHODS.values(), strict=True):
        assert cls.about.paper in row


def test_data_sets_are_those_of_the_table(tmp_path):
    said = feddpms_command("datasets", folder=tmp_path)
    assert (said.code, said.err) == (0, "")
    assert re.search(r"^digits +found ", said.out, re.M)
    for name in DATASETS:
        assert re.search(rf"^{name} ", said.out, re.M), name


@pytest.mark.parametrize("name", ["feddpms", "feddpms+moon", "fedprox", "local"])
def test_settings_are_a_file_to_start_from(name, tmp_path):
    said = feddpms_command("settings", name, folder=tmp_path)
    (tmp_path / "start.toml").write_text(said.out)
    assert config.parse(config.load(tmp_path / "start.toml")) == config.parse({"method": name})


@pytest.mark.parametrize(("suffix", "head"), [("svg", b"<"), ("png", b"\x89PNG")])
def test_partition_prints_and_draws_who_holds_what(suffix, head, tmp_path):
    said = feddpms_command(
        "partition", "--data", "digits", "--clients", "4", "--out", f"p.{suffix}", folder=tmp_path
    )
    assert (said.code, said.err) == (0, "")
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[0] for row in rows[1:6]] == ["0", "1", "2", "3", "total"]
    assert sum(int(row[1]) for row in rows[1:5]) == int(rows[5][1]) == 1438
    assert (tmp_path / f"p.{suffix}").read_bytes().startswith(head)


def test_partition_shows_the_split_of_a_run(finished, tmp_path):
    said = feddpms_command("partition", *SMALL[:6], "--out", "p.svg", folder=tmp_path)
    held = records.read(finished["folder"] / "a" / "records.jsonl")[1]
    rows = [line.split() for line in said.out.splitlines()[1:4]]
    numbers = np.array([[0 if n == "·" else int(n) for n in row[2:12]] for row in rows])
    assert levels(numbers).tolist() == [list(row) for row in held.levels]


def test_a_bar_with_round_accuracy_and_loss_is_drawn_on_a_terminal(tmp_path, monkeypatch):
    master, slave = os.openpty()
    seen = []

    def watch():
        with contextlib.suppress(OSError):
            while part := os.read(master, 4096):
                seen.append(part)

    reader = threading.Thread(target=watch)
    reader.start()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    with os.fdopen(slave, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        options = ["--method", "fedavg", "--rounds", "2", "--out", "watched"]
        patch.setattr(sys, "argv", ["feddpms", "run", *SMALL, *options])
        patch.setattr(sys, "stderr", terminal)
        with contextlib.redirect_stdout(io.StringIO()):
            main()
    reader.join()
    os.close(master)
    last = records.read(tmp_path / "watched" / "records.jsonl")[-2]
    text = b"".join(seen).decode()
    assert "fedavg seed 0" in text
    assert "round 2/2" in text
    assert f"accuracy {last.test_accuracy:.1%}" in text
    assert f"loss {last.test_loss:.3f}" in text


def test_the_version_is_in_the_record(finished):
    assert (
        records.read(finished["folder"] / "a" / "records.jsonl")[0].version == feddpms.__version__
    )


@pytest.mark.parametrize(
    "line",
    [
        "report runs/none --out page.txt",
        "run --data digits --data-dir somewhere",
        "run --set data.name=npz --set data.dir=~nosuchuser/x",
        "run --set local.batch_size=100000000000000000000",
        "run --set net.width=1e9",
        "run --set method.synthesis.per_class=1000000000000",
        "run --seed 99999999999999999999999",
        "compare --set seed=3",
        "run --method scaffold",
        "compare --methods fedavg,feddpms+feddyn",
    ],
)
def test_what_a_stranger_tried_is_refused_in_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["feddpms", *line.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith("feddpms: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_settings_wins_over_the_method_of_its_name():
    from feddpms.cli import _by_method

    shared, own = _by_method(["local", "fedprox"], ["local.epochs=1", "fedprox.mu=0.1", "rounds=2"])
    assert shared == ["local.epochs=1", "rounds=2"]
    assert own == {"local": [], "fedprox": ["mu=0.1"]}
