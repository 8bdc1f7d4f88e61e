import re
import tomllib
from pathlib import Path

import pytest

import feddpms
from feddpms.algorithms import METHODS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "feddpms"
SHARED = (
    "__init__",
    "adaptive",
    "batches",
    "chain",
    "correction",
    "decoding",
    "fit",
    "flat",
    "merging",
    "method",
    "neurons",
    "precision",
    "private",
    "training",
    "trees",
)
METHOD_FILES = sorted(f for f in (SOURCE / "algorithms").glob("*.py") if f.stem not in SHARED)
CEILINGS = {
    "feddpms": 240,
    "fit": 160,
    "merging": 275,
    "method": 190,
    "neurons": 105,
    "private": 115,
    "correction": 85,
    "trees": 110,
}

every_method = pytest.mark.parametrize("name", METHODS)


def test_the_table_of_methods_is_the_method_files():
    assert sorted(METHODS) == [f.stem for f in METHOD_FILES]


@every_method
def test_a_method_lies_in_the_file_of_its_name(name):
    assert METHODS[name].__module__ == f"feddpms.algorithms.{name}"


@every_method
def test_a_method_says_what_it_is(name):
    assert METHODS[name].about.paper.strip()
    assert METHODS[name].__doc__.strip()


@every_method
def test_a_method_has_a_page(name):
    page = ROOT / "docs" / "methods" / f"{name}.md"
    assert page.read_text().startswith("# ")


@pytest.mark.parametrize("name", sorted(f.stem for f in (SOURCE / "algorithms").glob("*.py")))
def test_a_file_of_algorithms_stays_short(name):
    lines = (SOURCE / "algorithms" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= CEILINGS.get(name, 80)


@every_method
def test_methods_do_not_import_one_another(name):
    """Save FedAvg, the inner method by default."""
    text = (SOURCE / "algorithms" / f"{name}.py").read_text()
    used = set(re.findall(r"feddpms\.algorithms\.(\w+)", text))
    assert used & METHODS.keys() <= {"fedavg"}


def test_every_public_name_resolves():
    assert sorted(feddpms.__all__) == sorted(feddpms._HOME)
    for name in feddpms.__all__:
        assert getattr(feddpms, name).__name__ == name


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nope"):
        feddpms.nope  # noqa: B018


def test_no_file_has_a_name_that_says_nothing():
    names = {f.stem for f in SOURCE.rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert feddpms.__version__ == project["version"]
    assert re.search(
        rf"^## .*{re.escape(feddpms.__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
