"""Which runs make a line of accuracy against epsilon."""

import re

import pytest

from feddpms.report import epsilon, page, plots
from feddpms.report.compare import compare
from feddpms.report.load import load

PRIVACY = """
[privacy]
target_epsilon = {}
target_delta = 1e-5
release = "{}"
adjacency = "add_remove"
"""


@pytest.fixture
def run_of(make):
    def one(method, seed=0, eps=2.0, release="class_sum", more=""):
        settings = PRIVACY.format(eps, release) + more
        name = f"{method}{seed}{eps}{release}{more}"
        return load(make(method, seed, settings=settings, name=name))

    return one


def final(folder):
    return folder.rounds[-1].test_accuracy


def test_a_line_has_a_point_for_each_epsilon_and_levels_beside_it(run_of):
    two, half = [run_of("feddpms", s) for s in (0, 1)], run_of("feddpms", eps=0.5)
    plain, paper = run_of("fedavg"), run_of("feddpms", release="paper")
    (group,) = compare([*two, half, plain, paper])
    line, unsound, level = epsilon.lines(group)
    assert line.name == "feddpms"
    assert line.delta == 1e-5
    assert list(line.points.items()) == [(0.5, [final(half)]), (2.0, list(map(final, two)))]
    assert (unsound.name, unsound.points) == (
        "feddpms, the paper's release",
        {None: [final(paper)]},
    )
    assert (level.name, level.points, level.delta) == ("fedavg", {None: [final(plain)]}, None)


def test_runs_that_differ_in_more_make_no_line(run_of):
    (group,) = compare([run_of("feddpms"), run_of("feddpms", eps=0.5, more="l2_clip = 3.0\n")])
    assert epsilon.lines(group) == []
    (group,) = compare([run_of("feddpms", 1), run_of("feddpms", 2), run_of("fedavg")])
    assert epsilon.lines(group) == []


def test_the_page_says_what_epsilon_is_of(run_of):
    folders = [run_of("fedavg"), run_of("feddpms", release="paper")]
    folders += [run_of("feddpms", eps=e) for e in (0.5, 2.0, 8.0)]
    text = page.page(folders)
    part = text.partition("<h3>Accuracy against epsilon</h3>")[2].partition("<h3>")[0]
    words = re.sub(r"\s+", " ", part)
    assert "at delta 1e-05" in words
    for said in ("each of its records", "add_remove", "in the clear", "no finite epsilon"):
        assert said in words
    assert part.count("<svg ") == 1
    assert "fedavg" in part
    assert "Accuracy against epsilon" not in page.page(folders[:3])


def test_the_picture_marks_each_epsilon():
    lines = [epsilon.Line("feddpms", {0.1: [0.7, 0.8], 2.0: [0.9], 1000.0: [0.9]}, 1e-5)]
    drawn = plots.epsilon_svg([*lines, epsilon.Line("fedavg", {None: [0.75]})], "x")
    marks = re.findall(r">([\d.]+)</text>", drawn)
    assert {"0.1", "2", "1000"} <= set(marks)
    assert ">fedavg</text>" in drawn
    assert "$" not in drawn
