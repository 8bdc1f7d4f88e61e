"""A run's settings: defaults, TOML files, `a.b=c` overrides, and one line when something is wrong.

A run is a tree of frozen records. Each part belongs to the folder that uses it; a method's fields
are its hyper-parameters. `dump` and `parse` turn a Run into plain values and back, so that
`run.toml` repeats a run exactly.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from annotated_types import Ge
from pydantic import ValidationError

from feddpms.algorithms import METHODS, FedDPMS, Method, Training
from feddpms.data import Data, Partition
from feddpms.engine import Engine
from feddpms.errors import ConfigError, unknown
from feddpms.models import NetSettings
from feddpms.privacy import Privacy
from feddpms.types import settings

Values = dict[str, Any]


@settings
class Run:
    """Everything that decides a run's result."""

    seed: Annotated[int, Ge(0)] = 0
    """decides the split, the initial weights, every batch and every draw"""
    rounds: Annotated[int, Ge(1)] = 50
    """rounds of communication"""
    method: Method = FedDPMS()
    """what is run"""
    data: Data = Data()
    """on which data"""
    partition: Partition = Partition()
    """split how over the clients"""
    net: NetSettings = NetSettings()
    """with which network"""
    local: Training = Training()
    """trained how at a client"""
    privacy: Privacy = Privacy()
    """what a release may cost"""
    engine: Engine = Engine()
    """how the rounds are run"""


def method_values(name: str) -> Values:
    """The values of a method's name: `a+b` is method a around method b.

    Raises:
        ConfigError: no such method, or a method in front that wraps nothing.
    """
    outer, _, inner = name.partition("+")
    if outer not in METHODS:
        raise ConfigError(unknown("method", outer, METHODS))
    if not inner:
        return {"name": outer}
    if "inner" not in {f.name for f in fields(METHODS[outer])}:
        wrappers = ", ".join(n for n, cls in METHODS.items() if cls.about.family == "data")
        raise ConfigError(f'"{outer}" cannot wrap "{inner}"; methods that wrap another: {wrappers}')
    return {"name": outer, "inner": method_values(inner)}


def method_name(method: Method) -> str:
    """The name of a method as a user writes it, such as `feddpms+moon`; `+fedavg` is left out."""
    name = type(method).__name__.lower()
    inner = getattr(method, "inner", None)
    if inner is None or method_name(inner) == "fedavg":
        return name
    return f"{name}+{method_name(inner)}"


def dump(value: Any) -> Any:
    """Settings as plain values; a method carries its name."""
    if not is_dataclass(value):
        return value
    name = {"name": type(value).__name__.lower()} if hasattr(value, "about") else {}
    return name | {f.name: dump(getattr(value, f.name)) for f in fields(value)}


def parse(values: Mapping[str, Any]) -> Run:
    """A Run from plain values; what is left out keeps its default.

    Raises:
        ConfigError: a key does not exist, or a value is out of its range; one line.
    """
    values = dict(values)
    method = build_method(values.pop("method", {}), "method")
    check_keys(values, dump(Run()))
    return _build(Run, {**values, "method": method}, "")


def build_method(values: Any, where: str) -> Method:
    """A method from its values; `where` is the path that errors name."""
    if isinstance(values, str):
        values = method_values(values)
    values = dict(values)
    given = values.pop("name", "feddpms")
    named = method_values(given)
    if "inner" in named and "inner" not in values:
        values["inner"] = named["inner"]
    cls = METHODS[named["name"]]
    check_keys(values, {k: v for k, v in dump(cls()).items() if k != "inner"} | _inner(cls), where)
    if "inner" in values:
        values["inner"] = build_method(values["inner"], f"{where}.inner")
    return _build(cls, values, where)


def _inner(cls: type) -> Values:
    """The key of an inner method, whose own keys are checked where it is built."""
    return {"inner": None} if "inner" in {f.name for f in fields(cls)} else {}


def check_keys(values: Mapping[str, Any], known: Mapping[str, Any], where: str = "") -> None:
    """Refuse keys that do not exist.

    Raises:
        ConfigError: names the nearest key.
    """
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            near = [f"{where}.{k}" if where else k for k in known if k != "name" or not where]
            raise ConfigError(unknown("setting", path, near))
        if isinstance(known[key], dict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}: expected a table of settings, got {value!r}")
            check_keys(value, known[key], path)


def _build(cls: type, values: Values, where: str) -> Any:
    """A settings record, with pydantic's first complaint as one line."""
    try:
        return cls(**values)
    except ValidationError as error:
        raise ConfigError(one_line(error, where)) from None


def one_line(error: ValidationError, where: str = "") -> str:
    """The first complaint of a validation: which setting, what was expected, what was got."""
    first = error.errors()[0]
    path = ".".join(str(p) for p in ([where] if where else []) + list(first["loc"]))
    said = first["msg"].replace("Input should", "should")
    return f"{path} {said}, got {first['input']!r}"


def load(path: Path) -> Values:
    """The values of a TOML file.

    Raises:
        ConfigError: missing, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no settings at {path}; give the path of a TOML file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected TOML at {path}: {error}") from None


def text(run: Run) -> str:
    """The settings as TOML; `parse` reads it back to an equal Run."""
    return tomli_w.dumps(dump(run))


def override(values: Values, assignments: Iterable[str]) -> Values:
    """The values with `a.b=c` applied; c is read as TOML, and as a string if it is none.

    Raises:
        ConfigError: no `=`, or a path through something that is not a table.
    """
    values = merge({}, values)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f'expected SETTING=VALUE, got "{assignment}"')
        place, *rest = path.strip().split(".")
        change: Any = _read(value.strip())
        for key in reversed(rest):
            change = {key: change}
        values = merge(values, {place: change})
    return values


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """The values with changes laid over them, table by table; neither is altered."""
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        if key == "method" and isinstance(old, str):
            old = method_values(old)
        if isinstance(old, Mapping) and isinstance(change, Mapping):
            change = merge(old, change)
        merged[key] = change
    return merged


def _read(text: str) -> Any:
    """A value as TOML would read it, else the string itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def template(run: Run) -> str:
    """The settings as TOML, each with its meaning in a comment above it."""
    lines: list[str] = []
    _describe(run, "", lines)
    return "\n".join(lines).strip() + "\n"


def _describe(part: Any, path: str, lines: list[str]) -> None:
    """Append a table: its values first, then the tables in it."""
    if path:
        lines += ["", f"[{path}]"]
    if hasattr(part, "about"):
        lines.append(f'name = "{type(part).__name__.lower()}"')
    docs = {name: field.description for name, field in type(part).__pydantic_fields__.items()}
    tables = [f.name for f in fields(part) if is_dataclass(getattr(part, f.name))]
    for name in (f.name for f in fields(part) if f.name not in tables):
        lines += [f"# {docs[name]}", tomli_w.dumps({name: getattr(part, name)}).strip()]
    for name in tables:
        _describe(getattr(part, name), f"{path}.{name}" if path else name, lines)
