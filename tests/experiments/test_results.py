"""The tables of the results page are those of the recorded cells."""

import re
from pathlib import Path

import pytest

from feddpms.experiments import EXPERIMENTS, read, table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results.md").read_text()
MARKED = re.findall(r"^<!-- (\w+) -->\n(.*?)^<!-- end \1 -->$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "text"), MARKED, ids=[name for name, _ in MARKED])
def test_a_table_is_that_of_its_lines(name, text):
    """Made by `feddpms experiment NAME --tables docs/results.md`."""
    assert name in EXPERIMENTS
    assert text == table(name, read(ROOT / f"benchmarks/results/{name}.jsonl"))


def test_every_recorded_experiment_has_its_table():
    recorded = {path.stem for path in (ROOT / "benchmarks/results").glob("*.jsonl")}
    assert recorded == {name for name, _ in MARKED}
