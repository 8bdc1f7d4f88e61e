import ast
import inspect
import json
import math
import os
import struct
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, make_dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

import feddpms.types
from contract.test_contract import CASES, Watched, go
from feddpms.algorithms import FedDPMS, FedProx, Moon
from feddpms.algorithms.feddpms import Bank
from feddpms.algorithms.local import Started
from feddpms.algorithms.method import State
from feddpms.engine import checkpoint
from feddpms.engine.checkpoint import dumps, known_types, loads
from feddpms.errors import RunFolderError
from feddpms.models import VaeSettings
from feddpms.privacy.ledger import Entry
from feddpms.types import Event, Memory, Message, Shard, Task
from small import TASK

WHERE = "runs/first/checkpoint.safetensors"
NAN = float("nan")


@dataclass(frozen=True)
class Pair:
    """A state that a user might write."""

    left: Any
    right: Any = ()

    @property
    def model(self):
        return self.left.model


@feddpms.types.settings
class Own:
    """A method that a user might write around another."""

    about: ClassVar = CASES["fedavg"].about
    inner: Any = Moon()

    def start(self, model, task):
        return Pair(self.inner.start(model, task))

    def ask(self, state, client, round):
        return self.inner.ask(state.left, client, round)

    def client(self, ask, me):
        return self.inner.client(ask, me)

    def server(self, state, replies):
        return Pair(self.inner.server(state.left, replies), frozenset(replies))


KNOWN = {Pair, Own, Moon, Memory, Message, Shard, Task, Event, Entry, Bank, State, Started}


def back(value, known=frozenset(KNOWN)):
    """The value written and read."""
    return loads(dumps(value), known, WHERE)


def same(a, b) -> bool:
    """Equal bit for bit, with types, order and memory layout; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return alike and bits(a) == bits(b)
    if isinstance(a, dict):
        return list(map(tagged, a)) == list(map(tagged, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, frozenset):
        return set(map(tagged, a)) == set(map(tagged, b))
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, k), getattr(b, k)) for k in a.__dataclass_fields__)
    if isinstance(a, float) and not math.isnan(a):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b or (a != a and b != b)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def tagged(key):
    return type(key), key


LAYOUTS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "every second": lambda x: x[:, :, ::2],
    "one channel of several": lambda x: x[:, :1],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "expanded over no entry": lambda x: x[:0, :1].expand(-1, 3, -1, -1),
    "overlapping windows": lambda x: x.flatten().unfold(0, 3, 1),
    "one number": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def tensor(dtype=torch.float32, layout="plain", seed=0) -> Tensor:
    x = torch.randint(-9, 9, (2, 3, 4, 4), generator=torch.Generator().manual_seed(seed))
    return LAYOUTS[layout](x.to(dtype))


tensors = st.builds(
    tensor, st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2)
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.integers() | st.text(max_size=5)
sets = st.frozensets(st.integers()) | st.frozensets(st.text(max_size=5)) | st.frozensets(keys)
events = st.builds(
    Event, st.text(max_size=5), st.just("gaussian"), st.floats(), sample_rate=st.floats()
)
values = st.recursive(
    tensors | scalars | sets | events,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Memory, st.dictionaries(st.text(max_size=5), inner, max_size=2))
        | st.builds(Message, st.text(max_size=5), st.dictionaries(keys, inner, max_size=2))
    ),
    max_leaves=8,
)


@given(values)
@settings(max_examples=200, deadline=None)
def test_what_is_read_is_what_was_written_and_writes_the_same_bytes(value):
    data = dumps(value)
    restored = loads(data, KNOWN, WHERE)
    assert same(restored, value)
    assert dumps(restored) == data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_keeps_type_shape_bits_and_memory_layout(dtype, layout):
    value = tensor(dtype, layout)
    assert same(back(value), value)


def test_a_layout_is_kept_where_torch_calls_it_contiguous():
    """A size of 1 makes both layouts contiguous, but a convolution still chooses by strides."""
    plain = torch.randn(8, 1, 3, 3)
    last = plain.clone(memory_format=torch.channels_last)
    assert last.is_contiguous()
    assert last.stride() != plain.stride()
    for value in (plain, last):
        assert back(value).stride() == value.stride()


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, NAN, math.inf, -math.inf, 5e-324, 1, 1.0, True, 10**40, "", "\n\0é\ud800", None],
    ids=repr,
)
def test_a_number_or_a_text_keeps_its_value_and_type(value):
    assert same(back(Pair(value)).left, value)


def test_nan_with_a_payload_stays_in_a_tensor():
    value = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert bits(back(value)) == bits(value)


@pytest.mark.parametrize(
    "value", [{}, {2: "b", 1: "a"}, {"1": 1, 1: "1"}, {"": ()}, {"tuple": [1]}, {"set": []}]
)
def test_keys_keep_their_types_and_their_order(value):
    assert same(back(value), value)


def test_any_mapping_comes_back_as_a_dict():
    for value in (MappingProxyType({"a": 1}), OrderedDict(a=1)):
        assert same(back(value), {"a": 1})


def test_settings_come_back_with_their_inner_ones():
    value = FedDPMS(inner=FedProx(mu=0.3), vae=VaeSettings(weight=0.05))
    assert same(back(value, known_types(value)), value)


def test_an_equal_tensor_is_stored_once_and_comes_back_on_its_own():
    x = torch.arange(1000.0)
    alone, twice = dumps(Pair(x, x[:1])), dumps(Pair(x, {"again": x, "copy": x.clone()}))
    assert len(twice) < len(alone) + 200
    restored = loads(twice, KNOWN, WHERE)
    restored.left.zero_()
    restored.right["again"].neg_()
    assert same(restored.right["copy"], x)


def test_tensors_of_one_memory_can_be_written():
    x = torch.arange(6.0)
    value = [x, x[1:], x.view(2, 3), x.view(torch.int32)]
    assert same(back(value), value)


def test_a_changed_original_does_not_change_what_was_written():
    x = torch.zeros(3)
    data = dumps(x)
    x += 1
    assert same(loads(data, (), WHERE), torch.zeros(3))


def test_a_tensor_comes_back_aligned_as_torch_aligns_it():
    for value in back([tensor(dtype) for dtype in DTYPES]):
        assert value.data_ptr() % 64 == 0


def test_a_tensor_comes_back_without_its_gradient():
    x = nn.Parameter(torch.ones(2))
    for value in (x, 2 * x):
        restored = back(value)
        assert same(restored, value.detach())
        assert not restored.requires_grad


def everything():
    """A value with one of everything; frozensets of text, whose order depends on the process."""
    names = frozenset(f"client {i}" for i in range(20))
    shard = Shard(tensor(seed=1), tensor(torch.int64, seed=2)[:, 0, 0, 0], 0.5)
    event = Event("model", "gaussian", 1.5, 2.0, "add_remove", digest="ab")
    inner = Memory({"model": {"w": tensor(layout="channels last"), "b": tensor(torch.bool)}})
    return (
        Memory({"own": {"w": tensor()}}, shard, inner),
        Message("train", {"m": {"w": tensor()}}, {"loss": NAN}, (event,), Message("inner")),
        {3: names, "x": frozenset({3, 1, 2**40}), "y": frozenset({"1", 1})},
        [Task(3, 2, 5, 6), Entry("stored", 1, 0, event)],
    )


def test_the_same_value_gives_the_same_bytes():
    first = dumps(everything())
    assert all(dumps(everything()) == first for _ in range(20))
    assert same(loads(first, KNOWN, WHERE), everything())


def test_the_same_value_gives_the_same_bytes_in_another_process():
    code = "from test_checkpoint import *; print(dumps(everything()).hex())"
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert bytes.fromhex(done.stdout) == dumps(everything())


def test_a_difference_shows_in_the_bytes():
    x = tensor()
    different = [
        x,
        x.double(),
        x.flatten(),
        x.contiguous(memory_format=torch.channels_last),
        [x],
        (x,),
        {"a": x},
        Pair(x),
        Pair(x, []),
        1,
        1.0,
        True,
        "1",
        frozenset({1}),
        frozenset({"1"}),
    ]
    assert len({dumps(v) for v in different}) == len(different)


def refused(data, known=frozenset(KNOWN)) -> str:
    """The one line with which bytes are refused."""
    with pytest.raises(RunFolderError) as caught:
        loads(data, known, WHERE)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"expected a checkpoint of this version at {WHERE}, got ")
    assert line.endswith("; start the run anew")
    assert caught.value.__cause__ is None
    return line


def test_every_changed_bit_is_refused():
    whole = dumps(Pair({"w": torch.arange(3.0)}, frozenset({1, 2})))
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            assert "damaged" in refused(bytes(damaged))


def test_a_missing_or_a_further_byte_is_refused():
    whole = dumps(everything())
    for data in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], whole + b"\0"):
        assert "damaged" in refused(data)


@pytest.mark.parametrize("other", [b"hello", b"[" * 100_000, b"\x80\x04N.", b"\xff" * 64])
def test_something_else_is_refused(other):
    assert "something else" in refused(other)
    assert "something else" in refused(len(other).to_bytes(8, "little") + other)


def test_a_model_file_is_refused():
    deep = "0" * 64 + "[" * 100_000
    for metadata in (None, {"round": "1"}, {"checkpoint": "{}"}, {"checkpoint": deep}):
        assert "something else" in refused(save({"0": torch.ones(2)}, metadata))


def test_swapped_tensors_are_refused():
    data = dumps([torch.zeros(3), torch.ones(3)])
    end = 8 + int.from_bytes(data[:8], "little")
    header, kept = json.loads(data[8:end]), load(data)
    again = {name: kept[name] for name in ("0", "1")}
    assert save(again, header["__metadata__"]) == data
    swapped = {"0": kept["1"], "1": kept["0"]}
    assert "damaged" in refused(save(swapped, header["__metadata__"]))
    assert "damaged" in refused(save({**again, "2": torch.ones(1)}, header["__metadata__"]))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", "0.0.9")
    data = dumps(Pair(1))
    monkeypatch.undo()
    assert "got one of version 0.0.9;" in refused(data)


def test_an_unknown_class_is_refused_before_anything_is_built():
    built = []
    noisy = make_dataclass(
        "Noisy", ["x"], namespace={"__post_init__": lambda self: built.append(self)}
    )
    data = dumps((noisy(1), Pair(2)))
    built.clear()
    assert "the unknown class test_checkpoint.Pair;" in refused(data, {noisy})
    assert built == []


def test_a_module_is_never_imported_by_name(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    planted = make_dataclass("Planted", ["x"])
    planted.__module__ = "planted"
    assert "the unknown class planted.Planted;" in refused(dumps(planted(1)))
    assert "planted" not in sys.modules


@pytest.mark.parametrize(
    "now", [["a"], ["a", "b", "c"], ["b", "a"], ["a", ("b", int, field(default=3)), ("c", int, 4)]]
)
def test_a_class_with_other_fields_is_refused(now):
    old, new = make_dataclass("Kept", ["a", "b"]), make_dataclass("Kept", now)
    for cls in (old, new):
        cls.__module__ = "test_checkpoint"
    assert "other fields of test_checkpoint.Kept;" in refused(dumps(old(1, 2)), {new})


def test_a_class_that_refuses_its_values_is_refused_in_one_line():
    @feddpms.types.settings
    class Kept:
        a: int

    @feddpms.types.settings
    class Stricter:
        a: str

    Stricter.__qualname__ = Kept.__qualname__
    refused(dumps(Kept(a=1)), {Stricter})


def test_nothing_is_pickled_and_no_class_is_looked_up_by_name():
    tree = ast.parse(inspect.getsource(checkpoint))
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not modules & {"pickle", "marshal", "shelve", "copyreg", "importlib", "pydoc"}
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name)}
    assert not used & {"torch.load", "torch.save", "eval", "exec", "__import__", "import_module"}


@dataclass
class Late:
    """A field that the constructor does not take."""

    x: int = field(init=False, default=3)


Point = namedtuple("Point", "x")
UNFIT = [
    {1, 2},
    b"bytes",
    np.float64(1.0),
    np.zeros(2),
    Point(1),
    torch.Size([2]),
    torch.float32,
    torch.Generator(),
    object(),
    Pair,
    Late(),
    {1.5: 1},
    {True: 1},
    {None: 1},
    {(1,): 1},
    frozenset({True}),
    frozenset({1.5}),
    frozenset({(1, 2)}),
]


@pytest.mark.parametrize("value", UNFIT, ids=lambda v: type(v).__name__)
def test_what_could_not_be_read_back_is_not_written(value):
    with pytest.raises(TypeError, match=r"can hold|does not take") as caught:
        dumps(Pair({"deep": [value]}))
    assert "\n" not in str(caught.value)


def test_a_class_that_reading_would_not_know_is_not_written():
    assert dumps(Pair(Memory()), {Pair, Memory}) == dumps(Pair(Memory()))
    with pytest.raises(TypeError, match=r"feddpms.types.Memory is not among"):
        dumps(Pair(Memory()), {Pair})


def test_how_the_network_is_built_comes_back():
    known = known_types(CASES["fedavg"])
    assert loads(dumps(TASK, known), known, WHERE) == TASK
    assert TASK.network


def test_known_are_the_classes_of_every_method_and_of_the_users_own():
    known = known_types(CASES["fedavg"])
    assert known >= {State, Started, Bank, Memory, Shard, Task, Message, Event, Entry, FedDPMS}
    assert not known & {Pair, Own}
    assert known_types(Own()) >= known | {Pair, Own}
    assert known_types(FedDPMS(inner=Own())) >= known | {Pair, Own}
    assert all(isinstance(cls, type) and hasattr(cls, "__dataclass_fields__") for cls in known)


METHODS = {**CASES, "a user's own": Own(), "feddpms+a user's own": FedDPMS(inner=Own())}


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple]:
    """Each method run for three rounds: watched, and the outcome."""
    found = {}
    for name, method in METHODS.items():
        spy = Watched(method)
        found[name] = (spy, go(spy, rounds=3)[0])
    return found


@pytest.mark.parametrize("name", METHODS)
def test_every_state_memory_and_message_of_a_run_comes_back(name, runs):
    spy, outcome = runs[name]
    known = known_types(METHODS[name])
    kept = [after for _, _, after in spy.served]
    kept += [dict(outcome.memories), [c[0] for c in spy.calls], [c[2] for c in spy.calls]]
    assert len(kept) >= 3 + 3
    for value in kept:
        data = dumps(value, known)
        restored = loads(data, known, WHERE)
        assert same(restored, value)
        assert dumps(restored, known) == data


class Interrupted(Watched):
    """A method whose state and memories are written and read again after every step."""

    def client(self, ask, me):
        reply, memory = self.method.client(ask, me)
        return reply, back(memory, known_types(self.method))

    def server(self, state, replies):
        return back(self.method.server(state, replies), known_types(self.method))


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_goes_on_from_checkpoints_is_the_same_run(name, runs):
    outcome, _ = go(Interrupted(METHODS[name]), rounds=3)
    assert same(outcome.model, runs[name][1].model)
    assert same(dict(outcome.memories), dict(runs[name][1].memories))


def test_a_checkpoint_takes_little_time():
    """200 000 values in 60 tensors, written and read; the least of several."""
    tree = {f"layer.{i}.weight": torch.randn(3334) for i in range(60)}
    value = Bank(Task(10, 3, 5, 6), State(tree), {"decoder.w": torch.randn(100)}, 2)
    seconds = []
    for _ in range(10):
        began = time.process_time()
        back(value)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.02
