"""The tables of the results page are those of the recorded cells."""

import re
from pathlib import Path

import pytest

from feddpms.experiments import EXPERIMENTS, SCALES, read, table
from feddpms.experiments.lines import command
from feddpms.experiments.tuning import TUNED, winners

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results.md").read_text()
MARKED = re.findall(r"^<!-- (\w+) -->\n(.*?)^<!-- end \1 -->$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "text"), MARKED, ids=[name for name, _ in MARKED])
def test_a_table_is_that_of_its_lines(name, text):
    """Made by `feddpms experiment NAME --tables docs/results.md`."""
    assert name in EXPERIMENTS
    assert text == table(name, read(ROOT / f"benchmarks/results/{name}.jsonl"))


def test_settings_are_those_that_the_recorded_tries_choose():
    for data, chosen in winners(read(ROOT / "benchmarks/results/tuning.jsonl")).items():
        assert chosen.items() <= TUNED[data].items()


@pytest.mark.parametrize("name", [name for name, _ in MARKED])
def test_a_recorded_line_is_still_a_cell_of_its_experiment(name):
    """A line made with other settings would count among those of its method."""
    for one in read(ROOT / f"benchmarks/results/{name}.jsonl"):
        todo = [
            cell for scale in SCALES.values() for cell in EXPERIMENTS[name].cells(scale, one.seed)
        ]
        assert _anywhere(one.command) in {_anywhere(command(cell)) for cell in todo}


def _anywhere(line):
    """A command without where the data lie, and how large a part of them is taken there."""
    return re.sub(r" --data-dir DIR| --fraction [\d.e-]+", "", line)


def test_every_recorded_experiment_has_its_table():
    recorded = {path.stem for path in (ROOT / "benchmarks/results").glob("*.jsonl")}
    assert recorded == {name for name, _ in MARKED}
