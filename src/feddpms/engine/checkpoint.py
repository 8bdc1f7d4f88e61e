"""A checkpoint: a value such as a server's state as bytes, and back, without pickle.

The bytes are one safetensors file: the tensors by running number, and one metadata string that says
how they are put together, with a digest in front. Equal values give equal bytes, and reading builds
no class but those that the reader names.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import version
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from feddpms.algorithms import METHODS, Method
from feddpms.errors import RunFolderError

VERSION = version("feddpms")
"""A checkpoint is read by the version that wrote it: a run goes on as it began, or not at all."""
KEY = "checkpoint"
"""The one metadata key: safetensors writes several in no fixed order."""
HEX = 64
"""characters of a SHA-256"""


def dumps(value: Any, known: Iterable[type] | None = None) -> bytes:
    """A value as bytes; equal values give equal bytes.

    It may hold dataclasses, mappings by str or int, tuples, lists, frozensets of str or int, str,
    int, float, bool, None, and tensors; a tensor that occurs again is stored once.

    Args:
        value: what to write.
        known: the classes that `loads` will be given, so that others are refused now and not when
            they are read; None to take any.

    Raises:
        TypeError: the value holds something else.
    """
    writer = _Writer(None if known is None else frozenset(known))
    plain = writer.plain(value)
    skeleton = json.dumps(
        {
            "version": VERSION,
            "classes": writer.classes,
            "tensors": list(writer.tensors),
            "value": plain,
        },
        separators=(",", ":"),
    )
    numbered = {str(number): dense for number, dense in writer.tensors.values()}
    return save(numbered, {KEY: _sha256(skeleton) + skeleton})


def loads(data: bytes, known: Iterable[type], where: str) -> Any:
    """The value that `dumps` wrote.

    A mapping comes back as a dict, and a tensor with its strides, in memory of its own, on the CPU
    and without a gradient.

    Args:
        data: the bytes.
        known: the dataclasses that may be built.
        where: the file's name, for messages.

    Raises:
        RunFolderError: the bytes are damaged or of another version, or hold a class that is not
            known or has other fields now.
    """
    classes = {_name(cls): cls for cls in known}
    try:
        content, tensors = _open(data)
        got = _misfit(content, classes)
        if not got:
            return _Reader(classes, content["classes"], tensors).value(content["value"])
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        got = "something else, or damaged bytes"
    raise RunFolderError(
        f"expected a checkpoint of this version at {where}, got {got}; start the run anew"
    )


def known_types(method: Method) -> set[type]:
    """The dataclasses that a run of a method may keep.

    They are those that can be seen in the modules of `types`, of the ledger, of the network, of
    every method here, and of the classes of this method, of its inner methods, and of their bases.
    """
    homes = {"feddpms.types", "feddpms.privacy.ledger", "feddpms.models.nets"}
    for cls in (*METHODS.values(), *map(type, _parts(method))):
        homes |= {base.__module__ for base in cls.__mro__}
    seen = [v for home in homes & sys.modules.keys() for v in vars(sys.modules[home]).values()]
    return {v for v in seen if isinstance(v, type) and is_dataclass(v)}


@dataclass
class _Writer:
    """Turns a value into what JSON can hold, and gathers its classes and tensors.

    Attributes:
        known: the classes to accept; None for all.
        classes: names of the fields, by class.
        tensors: running number and values, by digest.
    """

    known: frozenset[type] | None
    classes: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    def plain(self, value: Any) -> Any:
        """The value with a one-word tag at whatever is no list and no scalar."""
        if type(value) is list:
            return [self.plain(v) for v in value]
        if type(value) is tuple:
            return {"tuple": [self.plain(v) for v in value]}
        if type(value) is frozenset:  # its own order differs from process to process
            members = sorted(value, key=lambda v: (type(v).__name__, v))
            return {"set": [_exact(v, str, int) for v in members]}
        if isinstance(value, Tensor):
            return {"tensor": self._number(value), "stride": value.stride()}
        if is_dataclass(value) and not isinstance(value, type):
            return {"class": self._class(type(value)), "fields": self._fields(value)}
        if isinstance(value, Mapping):
            return {"dict": [[_exact(k, str, int), self.plain(v)] for k, v in value.items()]}
        return _exact(value, str, int, float, bool, type(None))

    def _number(self, value: Tensor) -> int:
        """A tensor's running number; equal ones share it, whether or not they are one object."""
        dense = value.detach().clone(memory_format=torch.contiguous_format)
        return self.tensors.setdefault(_digest(dense), (len(self.tensors), dense))[0]

    def _class(self, cls: type) -> str:
        """A class's name, which is noted with its fields."""
        if self.known is not None and cls not in self.known:
            raise TypeError(f"{_name(cls)} is not among the classes of this checkpoint")
        if not all(f.init for f in fields(cls)):
            raise TypeError(f"{_name(cls)} has fields that its constructor does not take")
        self.classes[_name(cls)] = [f.name for f in fields(cls)]
        return _name(cls)

    def _fields(self, value: Any) -> list[Any]:
        """The values of a dataclass's fields."""
        return [self.plain(getattr(value, f.name)) for f in fields(value)]


@dataclass
class _Reader:
    """Turns what JSON held back into the value.

    Attributes:
        classes: what may be built, by name.
        names: names of the fields, by class.
        tensors: by running number.
    """

    classes: Mapping[str, type]
    names: Mapping[str, list[str]]
    tensors: list[Tensor]

    def value(self, plain: Any) -> Any:
        """The value, by its tag."""
        match plain:
            case list():
                return [self.value(v) for v in plain]
            case {"tensor": number, "stride": stride}:
                return _laid_out(self.tensors[number], stride)
            case {"class": name, "fields": values}:
                given = zip(self.names[name], map(self.value, values), strict=True)
                return self.classes[name](**dict(given))
            case {"dict": pairs}:
                return {key: self.value(v) for key, v in pairs}
            case {"tuple": values}:
                return tuple(self.value(v) for v in values)
            case {"set": members}:
                return frozenset(members)
        return plain


def _open(data: bytes) -> tuple[dict[str, Any], list[Tensor]]:
    """The skeleton and the tensors, compared with their digests; raises whatever goes wrong."""
    tensors = load(data)
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.loads(data[8:end])["__metadata__"][KEY]
    digest, skeleton = text[:HEX], text[HEX:]
    content = json.loads(skeleton)
    ordered = [tensors[str(number)] for number in range(len(tensors))]
    if digest != _sha256(skeleton) or content["tensors"] != [_digest(t) for t in ordered]:
        raise ValueError("not what was written")
    return content, ordered


def _misfit(content: Mapping[str, Any], classes: Mapping[str, type]) -> str:
    """What stands against building this skeleton's classes; empty if nothing does."""
    if content["version"] != VERSION:
        return f"one of version {content['version']}"
    for name, names in content["classes"].items():
        if name not in classes:
            return f"one with the unknown class {name}"
        if names != [f.name for f in fields(classes[name])]:
            return f"one with other fields of {name}"
    return ""


def _laid_out(dense: Tensor, stride: list[int]) -> Tensor:
    """A copy with these strides, since the last bits of what is computed can depend on them."""
    copy = torch.empty_strided(dense.shape, stride, dtype=dense.dtype)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    copy[once].copy_(dense[once])  # along a stride of 0 every entry is the first
    return copy


def _digest(dense: Tensor) -> str:
    """SHA-256 of a contiguous tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{dense.dtype} {tuple(dense.shape)}".encode())
    digest.update(dense.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sha256(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _exact(value: Any, *types: type) -> Any:
    """A value of one of these types; a subclass could not be told from them when it is read."""
    if type(value) not in types:
        names = ", ".join(cls.__name__ for cls in types)
        raise TypeError(f"a checkpoint can hold {names} here, got {type(value).__name__}")
    return value


def _parts(value: Any) -> list[Any]:
    """A dataclass and the dataclasses in its fields, at any depth."""
    inner = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else []
    return [value, *(part for v in inner if is_dataclass(v) for part in _parts(v))]


def _name(cls: type) -> str:
    """A class's full name."""
    return f"{cls.__module__}.{cls.__qualname__}"
