import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from feddpms import records
from feddpms.errors import RunFolderError
from feddpms.records import PartitionRecord, PrivacyRecord, Record, RoundRecord, RunRecord

NAN = math.nan


def one_of_each() -> list[Record]:
    return [
        RunRecord(
            version="0.1.0",
            method="feddpms+moon",
            data="digits",
            seed=3,
            clients=2,
            rounds=2,
            classes=("null", "é"),
            parameters=7,
            train_examples=5,
            test_examples=4,
            partition="dirichlet, beta=0.5",
        ),
        PartitionRecord(levels=((3, 0), (1, 1))),
        RoundRecord(
            round=1,
            phase="vae",
            test_accuracy=0.1,
            test_loss=2 / 3,
            per_class_accuracy=(0.5, NAN),
            train_loss=NAN,
            numbers={"steps": 4.0},
            seconds=0.25,
            bytes_up=10,
            bytes_down=20,
        ),
        PrivacyRecord(claim='Covered: "nothing".\nNot covered: all.'),
    ]


def write_all(path: Path) -> Path:
    with path.open("w") as file:
        for record in one_of_each():
            records.write(record, file)
    return path


def test_what_is_written_is_read_back(tmp_path):
    read = records.read(write_all(tmp_path / "records.jsonl"))
    assert [type(r) for r in read] == [type(r) for r in one_of_each()]
    for got, want in zip(read, one_of_each(), strict=True):
        assert repr(asdict(got)) == repr(asdict(want))


def test_a_number_that_is_not_finite_is_read_back_as_nan(tmp_path):
    record = replace(one_of_each()[2], test_loss=math.inf, numbers={"odd": NAN})
    with (tmp_path / "r").open("w") as file:
        records.write(record, file)
    (read,) = records.read(tmp_path / "r")
    assert math.isnan(read.test_loss)
    assert math.isnan(read.numbers["odd"])


def test_a_record_is_one_line_of_strict_json(tmp_path):
    def refuse(word):
        raise AssertionError(word)

    lines = write_all(tmp_path / "r").read_text().splitlines()
    kinds = [json.loads(line, parse_constant=refuse)["type"] for line in lines]
    assert kinds == ["run", "partition", "round", "privacy"]


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with (tmp_path / "r").open("w") as file:
        records.write(PrivacyRecord(claim="now"), file)
        assert records.read(tmp_path / "r") == [PrivacyRecord(claim="now")]


def test_a_field_of_a_later_version_is_left_out(tmp_path):
    (tmp_path / "r").write_text('{"type": "privacy", "claim": "c", "new": 1}\n')
    assert records.read(tmp_path / "r") == [PrivacyRecord(claim="c")]


BROKEN = ["{", "[]", "3", '{"claim": "no type"}', '{"type": "nope"}', '{"type": "privacy"}', ""]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line):
    path = write_all(tmp_path / "records.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(RunFolderError, match=r"records\.jsonl, line 3$"):
        records.read(path)


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_last_line_that_was_written_whole_is_named(tmp_path, line):
    path = write_all(tmp_path / "records.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RunFolderError, match=r"records\.jsonl, line 5$"):
        records.read(path)


def test_every_length_of_an_interrupted_file_reads_as_the_records_that_are_whole(tmp_path):
    whole = write_all(tmp_path / "whole").read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    torn = tmp_path / "torn"
    for length in range(0, len(whole) + 1, 7):
        torn.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends)
        assert len(records.read(torn)) == complete, length


def test_a_last_record_that_lacks_only_its_newline_is_kept(tmp_path):
    path = write_all(tmp_path / "r")
    path.write_text(path.read_text().removesuffix("\n"))
    assert len(records.read(path)) == 4


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, content):
    path = tmp_path / "records.jsonl"
    if content:
        path.write_bytes(content)
    with pytest.raises(RunFolderError, match="cannot read records at") as caught:
        records.read(path)
    assert "\n" not in str(caught.value)


def test_a_written_file_holds_the_new_content_and_nothing_is_left_beside_it(tmp_path):
    for content in (b"old", b"new"):
        records.write_file(tmp_path / "f", content)
        assert (tmp_path / "f").read_bytes() == content
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize(("where", "call"), [(os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_error_while_writing_leaves_the_old_file_and_no_other(
    tmp_path, monkeypatch, where, call, error
):
    def fail(*args):
        raise error

    records.write_file(tmp_path / "f", b"old")
    monkeypatch.setattr(where, call, fail)
    with pytest.raises(type(error)):
        records.write_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_content_is_synced_before_it_takes_its_place(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: order.append("synced") or fsync(fd))
    monkeypatch.setattr(Path, "replace", lambda a, b: order.append("renamed") or replace(a, b))
    records.write_file(tmp_path / "f", b"new")
    assert order == ["synced", "renamed"]


def test_an_error_is_the_one_that_happened_where_there_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        records.write_file(tmp_path / "file" / "f", b"new")
