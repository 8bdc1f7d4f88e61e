"""The README's commands and the examples run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from feddpms.cli import main

ROOT = Path(__file__).parent.parent
FMNIST = Path("/usr/share/datasets/fashion-mnist")
SMALLER = {"--rounds": "2", "--seeds": "0", "--fraction": "0.01", "--local-epochs": "1"}


def commands(page: str) -> list[str]:
    """The indented lines of a page that start with the command, in order."""
    return re.findall(r"^ {4}(feddpms [a-z].*)$", (ROOT / page).read_text(), re.MULTILINE)


def smaller(command: str) -> list[str]:
    """A command as written, but for its size."""
    words = shlex.split(command)
    for option, value in SMALLER.items():
        if option in words:
            words[words.index(option) + 1] = value
    if words[1] == "compare" or words[1] == "run":
        words += ["--set", "local.epochs=1"]
    return words[1:]


@pytest.mark.parametrize("page", ["README.md"])
def test_the_commands_of_a_page_run_in_order(page, tmp_path):
    ran = 0
    for command in commands(page):
        if "--data fmnist" in command and not FMNIST.exists():
            continue
        done = subprocess.run(
            [sys.executable, "-m", "feddpms", *smaller(command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        ran += 1
    assert ran >= 8


def test_the_commands_of_the_method_pages_run(tmp_path, monkeypatch):
    """In this process: each as written, but for its size."""
    monkeypatch.chdir(tmp_path)
    for page in sorted((ROOT / "docs/methods").glob("*.md")):
        found = re.findall(r"^(?: {4})?(feddpms run .*)$", page.read_text(), re.MULTILINE)
        assert found, page.name
        for command in found:
            words = [*smaller(command), "--rounds", "3", "--fraction", "0.1"]
            monkeypatch.setattr(sys, "argv", ["feddpms", *words])
            main()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs(example, tmp_path):
    quick = (
        "import runpy, sys, feddpms, feddpms.runs\n"
        "from dataclasses import replace\n"
        "full = feddpms.runs.run\n"
        "feddpms.run = lambda s, *a: full(replace(s, rounds=2, "
        "local=replace(s.local, epochs=1)), *a)\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", quick, str(example)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "%" in done.stdout
