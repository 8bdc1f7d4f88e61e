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
from annotated_types import Ge, Lt
from pydantic import ValidationError

from feddpms.algorithms import METHODS, FedDPMS, Training
from feddpms.algorithms.method import Chosen, Method
from feddpms.algorithms.method import method_name as method_name
from feddpms.data import Data, Partition
from feddpms.engine import Engine
from feddpms.errors import ConfigError, unknown
from feddpms.models import NetSettings
from feddpms.privacy import Privacy
from feddpms.types import settings

Values = dict[str, Any]

PRESETS: dict[str, Values] = {
    "paper": {
        "method": {
            "name": "feddpms",
            "secondary": "train",
            "calibration": {"steps": 0},
            "decoder_period": 0,
            "matching": {"kind": "pair", "top_n": 3, "bottom_n": 3},
            "synthesis": {"amount": "per_class", "spread": 0.0},
        },
        "privacy": {"release": "paper"},
    }
}
"""FedDPMS as the paper has it, as far as its text says: one partner, for the three classes of which
a client has most and least, decoders averaged once, training on decoded images, no calibration, and
the release whose guarantee is unsound"""


@settings
class Run:
    """Everything that decides a run's result."""

    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """decides the split, the initial weights, every batch and every draw"""
    rounds: Annotated[int, Ge(1)] = 50
    """rounds of communication"""
    method: Chosen = FedDPMS()
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
    outer, plus, inner = name.partition("+")
    if outer not in METHODS:
        raise ConfigError(unknown("method", outer, METHODS))
    if not plus:
        return {"name": outer}
    if not _wraps(METHODS[outer]):
        wrappers = ", ".join(n for n, cls in METHODS.items() if _wraps(cls))
        raise ConfigError(f'"{outer}" cannot wrap "{inner}"; methods that wrap another: {wrappers}')
    return {"name": outer, "inner": method_values(inner)}


def _wraps(cls: type) -> bool:
    """Whether a method wraps another."""
    return "inner" in {f.name for f in fields(cls)}


def with_preset(preset: str, values: Values, methods: Iterable[Any]) -> tuple[Values, list[Values]]:
    """Settings laid over a preset, and methods, of which those that it is for are laid over its.

    Args:
        preset: its name.
        values: settings of a run; a method among them is left as it is.
        methods: name or table of each method.

    Raises:
        ConfigError: no such preset, or it is for none of the methods.
    """
    if preset not in PRESETS:
        raise ConfigError(unknown("preset", preset, PRESETS))
    rest = dict(PRESETS[preset])
    own, tables = rest.pop("method"), [_method_table(method) for method in methods]
    if all(method["name"] != own["name"] for method in tables):
        named = ", ".join(method["name"] for method in tables)
        raise ConfigError(
            f"preset {preset} is one of {own['name']}, got {named}; name that method, or leave the "
            "preset out"
        )
    laid = [merge(own, m) if m["name"] == own["name"] else m for m in tables]
    return merge(rest, values), laid


def _method_table(method: Any) -> Values:
    """The table of a method that is given by its name, or by a table with or without one."""
    values = dict(method) if isinstance(method, Mapping) else {"name": method}
    return merge(method_values(values.pop("name", "feddpms")), values)


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


def build_method(values: Any, where: str, default: str = "feddpms") -> Method:
    """A method from its name, or from a table of its values.

    Args:
        values: name or table; a table's `name` may be composed, such as "feddpms+moon".
        where: the path that errors name.
        default: the method of a table without a name.

    Raises:
        ConfigError: no such method or setting, or a value out of its range.
    """
    values = {"name": values} if not isinstance(values, Mapping) else dict(values)
    name = values.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: expected the name of a method or a table, got {name!r}")
    named = method_values(name)
    cls = METHODS[named["name"]]
    known = {k: v for k, v in dump(cls()).items() if k != "name"}
    check_keys(values, {**known, "inner": None} if _wraps(cls) else known, where)
    if _wraps(cls):
        inner = merge(named, {"inner": values["inner"]} if "inner" in values else {})
        if "inner" in inner:
            values["inner"] = build_method(inner["inner"], f"{where}.inner", "fedavg")
    return _build(cls, values, where)


def check_keys(values: Mapping[str, Any], known: Mapping[str, Any], where: str = "") -> None:
    """Refuse keys that do not exist.

    Raises:
        ConfigError: names the nearest key.
    """
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigError(unknown("setting", key, known, f"{where}." if where else ""))
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
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
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
        if key in ("method", "inner") and isinstance(old, str) and isinstance(change, Mapping):
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
        lines += [f"# {line.strip()}" for line in (docs[name] or "").splitlines()]
        lines.append(tomli_w.dumps({name: getattr(part, name)}).strip())
    for name in tables:
        _describe(getattr(part, name), f"{path}.{name}" if path else name, lines)
