"""Accuracy on the classes that clients lack, by hand."""

from dataclasses import replace

import pytest

from feddpms.records import PartitionRecord
from feddpms.report import lacking, page
from feddpms.report.compare import compare
from feddpms.report.load import load

LEVELS = ((100, 0, 50), (25, 75, 0))  # means 50 and 33.3: lack classes 1; 2
CLASSES = ("a", "b", "c")


@pytest.fixture
def run_of(make):
    def one(method, seed, by_class, numbers=None, levels=LEVELS):
        def change(lines):
            return [
                replace(r, per_class_accuracy=by_class, numbers=numbers or {"steps": 1.0})
                for r in lines
            ]

        folder = load(make(method, seed, classes=CLASSES, clients=2, change=change))
        return replace(folder, partition=PartitionRecord(levels=levels))

    return one


def test_accuracy_of_what_is_lacked_and_held(run_of):
    runs = [
        run_of("fedavg", 0, (0.8, 0.2, 0.6)),
        run_of("feddpms", 0, (0.6, 0.4, 0.8), {"synthetic_tried": 4.0, "synthetic_kept": 3.0}),
        run_of("feddpms", 1, (0.6, 0.6, 0.8), {"synthetic_tried": 12.0, "synthetic_kept": 1.0}),
    ]
    (group,) = compare(runs)
    assert lacking.table(group.rows) == [
        ["fedavg", "40.0 ± -", "60.0 ± -", "-"],  # (b, c) / 2 and (a, c, a, b) / 4
        ["feddpms", "65.0 ± 7.1", "62.5 ± 3.5", "25.0"],
    ]


def test_who_lacks_nothing_has_no_number(run_of):
    even = run_of("fedavg", 0, (0.8, 0.2, float("nan")), levels=((50, 50, 50), (75, 75, 75)))
    assert lacking.table(compare([even])[0].rows) == [["fedavg", "-", "50.0 ± -", "-"]]


def test_the_page_shows_it_for_methods_with_a_global_model(make):
    folders = [load(make(method)) for method in ("fedavg", "local")]
    text = page.page(folders)
    part = text.partition("<h3>Classes that clients lack</h3>")[2].partition("<h3>")[0]
    assert part.count('<th scope="row">') == 1
    assert lacking.table(compare(folders)[0].rows)[0][1] in part
    unknown = [replace(folder, partition=None) for folder in folders]
    assert "Classes that clients lack" not in page.page(unknown)
