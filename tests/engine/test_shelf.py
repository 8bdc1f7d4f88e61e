"""What the clients keep: equal values back, bounded memory, files that a checkpoint can trust."""

from pathlib import Path

import pytest
import torch

from feddpms.algorithms import FedAvg
from feddpms.engine import Shelf
from feddpms.engine.checkpoint import known_types
from feddpms.errors import RunFolderError
from feddpms.types import Memory, Shard
from small import blobs

KNOWN = known_types(FedAvg())


def memory(number: int) -> Memory:
    inner = Memory({"h": {"w": torch.full((2, 2), float(number))}})
    return Memory({"model": {"w": torch.arange(3.0) + number}}, blobs(4, [0], number), inner)


def equal(one: Memory, other: Memory) -> bool:
    assert isinstance(one.synthetic, Shard)
    assert isinstance(other.synthetic, Shard)
    return (
        torch.equal(one.trees["model"]["w"], other.trees["model"]["w"])
        and torch.equal(one.synthetic.x, other.synthetic.x)
        and torch.equal(one.inner.trees["h"]["w"], other.inner.trees["h"]["w"])
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_every_memory_comes_back_whatever_the_room(tmp_path):
    for room in (None, 1, 3):
        shelf = Shelf(tmp_path / str(room), KNOWN, room)
        for client in range(5):
            shelf.put(client, memory(client), 1)
        shelf.put(2, memory(20), 2)
        assert list(shelf) == [0, 1, 2, 3, 4]
        assert len(shelf) == 5
        for client in (4, 2, 0, 2, 1, 3):
            assert equal(shelf[client], memory(20 if client == 2 else client))


def test_no_more_is_held_than_there_is_room_for(tmp_path):
    shelf = Shelf(tmp_path, KNOWN, 2)
    for client in range(5):
        shelf.put(client, memory(client), 1)
        assert len(shelf._near) <= 2
    for client in range(5):
        shelf[client]
        assert len(shelf._near) <= 2
    assert names(tmp_path) == [f"{c}-1.safetensors" for c in range(5)]


def test_the_least_recently_used_goes_first(tmp_path):
    shelf = Shelf(tmp_path, KNOWN, 2)
    shelf.put(0, memory(0), 1)
    shelf.put(1, memory(1), 1)
    shelf[0]
    shelf.put(2, memory(2), 1)
    assert names(tmp_path) == ["1-1.safetensors"]


def test_with_room_for_all_nothing_is_written_before_it_is_saved(tmp_path):
    shelf = Shelf(tmp_path / "new", KNOWN)
    shelf.put(0, memory(0), 1)
    assert not (tmp_path / "new").exists()
    assert shelf.save() == {0: 1}
    assert names(tmp_path / "new") == ["0-1.safetensors"]


def test_what_a_checkpoint_names_stays_until_the_next_one(tmp_path):
    shelf = Shelf(tmp_path, KNOWN, 1)
    for client in (0, 1):
        shelf.put(client, memory(client), 1)
    named = shelf.save()
    shelf.tidy()
    for client in (0, 1):  # a second round, stopped before its checkpoint
        shelf.put(client, memory(10 + client), 2)
    shelf[0]
    assert {f"{c}-{r}.safetensors" for c, r in named.items()} <= set(names(tmp_path))
    again = Shelf(tmp_path, KNOWN, 1)
    again.restore(named)
    assert equal(again[0], memory(0))
    assert equal(again[1], memory(1))
    assert names(tmp_path) == ["0-1.safetensors", "1-1.safetensors"]


def test_files_that_newer_ones_replace_are_removed(tmp_path):
    shelf = Shelf(tmp_path, KNOWN)
    for round in (1, 2, 3):
        shelf.put(0, memory(round), round)
        shelf.save()
        shelf.tidy()
    assert names(tmp_path) == ["0-3.safetensors"]


def test_an_equal_memory_is_not_written_again(tmp_path):
    shelf = Shelf(tmp_path, KNOWN)
    for round in (1, 2):
        shelf.put(0, memory(7), round)
        assert shelf.save() == {0: 1}
    assert equal(shelf[0], memory(7))


def test_two_exchanges_of_a_round_share_a_file(tmp_path):
    shelf = Shelf(tmp_path, KNOWN)
    for number in (1, 2):
        shelf.put(0, memory(number), 4)
        assert shelf.save() == {0: 4}
        shelf.tidy()
    again = Shelf(tmp_path, KNOWN)
    again.restore({0: 4})
    assert equal(again[0], memory(2))


def test_nothing_is_kept_of_an_empty_memory(tmp_path):
    shelf = Shelf(tmp_path, KNOWN, 1)
    shelf.put(0, Memory(inner=Memory()), 1)
    assert len(shelf) == 0
    assert shelf.save() == {}
    shelf.put(0, memory(0), 1)
    shelf.save()
    shelf.put(0, Memory(), 2)
    assert len(shelf) == 0
    assert shelf.save() == {}
    assert names(tmp_path) == ["0-1.safetensors"]  # the last checkpoint may name it
    shelf.tidy()
    assert names(tmp_path) == []
    with pytest.raises(KeyError):
        shelf[0]


def test_without_a_folder_a_temporary_one_is_used_and_removed():
    shelf = Shelf(known=KNOWN, room=1)
    for client in range(3):
        shelf.put(client, memory(client), 1)
    assert equal(shelf[0], memory(0))
    folder = shelf._folder
    assert folder.exists()
    del shelf
    assert not folder.exists()


def test_a_missing_or_damaged_file_is_one_line(tmp_path):
    shelf = Shelf(tmp_path, KNOWN)
    shelf.put(0, memory(0), 1)
    named = shelf.save()
    path = tmp_path / "0-1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    again = Shelf(tmp_path, KNOWN)
    again.restore(named)
    with pytest.raises(RunFolderError, match=r"0-1.safetensors.*damaged"):
        again[0]
    path.unlink()
    with pytest.raises(RunFolderError, match=r"0-1.safetensors.*no file"):
        Shelf(tmp_path, KNOWN).restore(named)


def test_a_memory_that_only_the_inner_method_fills_is_kept(tmp_path):
    shelf = Shelf(tmp_path, KNOWN, 1)
    shelf.put(0, Memory(inner=Memory({"h": {"w": torch.ones(1)}})), 1)
    shelf.put(1, memory(1), 1)
    assert shelf[0].inner.trees["h"]["w"] == 1
