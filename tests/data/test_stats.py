import numpy as np
import pytest

from feddpms.data import counts, effective_classes, table
from feddpms.data.stats import bar, levels

NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")
NAMES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def test_counts_by_hand():
    got = counts(np.array([0, 0, 1, 2, 2, 2]), [np.array([0, 3, 4]), np.array([1, 2])], 4)
    assert got.tolist() == [[1, 0, 2, 0], [1, 1, 0, 0]]
    assert got.dtype == np.int64


def test_effective_classes_by_hand():
    got = effective_classes(np.array([[5, 0, 0], [5, 5, 0], [2, 2, 2], [0, 0, 0], [3, 1, 0]]))
    skewed = 4 / 3**0.75  # exp(-(3/4) ln(3/4) - (1/4) ln(1/4))
    assert got == pytest.approx([1, 2, 3, 0, skewed])


@pytest.mark.parametrize("clients", [1, 10, 100])
def test_ten_classes_fit_in_100_columns(clients):
    held = np.random.default_rng(0).integers(0, 6000, (clients, 10))
    held[0, 3] = 0
    lines = table(held, NAMES).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == clients + 2
    assert lines[1].split()[:5] == ["0", str(held[0].sum()), *map(str, held[0, :3])]
    assert lines[1].split()[5] == "·", "a class that is not held stands out"
    assert lines[-1].split() == ["total", *map(str, [held.sum(), *held.sum(0)])]


def test_columns_line_up():
    lines = table(np.array([[1, 20], [300, 4]]), ("cat", "dog")).splitlines()
    assert lines[0] == "client size cat dog"
    assert lines[1] == "     0   21   1  20 ▊"
    assert lines[2] == "     1  304 300   4 ██████████"
    assert lines[3] == " total  325 301  24"


def test_many_classes_become_a_summary():
    held = np.zeros((3, 100), np.int64)
    held[0, [7, 42, 99, 3]] = [40, 30, 20, 10]
    held[1, 5] = 6
    lines = table(held, [f"class{k}" for k in range(100)]).splitlines()
    assert lines[0].split() == ["client", "size", "held", "effective", "most", "of"]
    assert lines[1].split()[:3] == ["0", "100", "4"]
    assert lines[1].endswith("class7 40, class42 30, class99 20")
    assert lines[2].split()[:4] == ["1", "6", "1", "1.0"]
    assert lines[3].split() == ["2", "0", "0", "0.0"]
    assert lines[4].split() == ["total", "106", "5"]
    assert max(map(len, lines)) <= 100


def test_bar_is_proportional():
    assert [len(bar(v, 10)) for v in (0, 0.001, 5, 10)] == [0, 1, 5, 10]
    assert bar(5.5, 10) == "█████▌"


def test_levels_hide_counts():
    """Few and none look the same, and a record more or less changes a level at a bound alone."""
    few, none = np.array([[40, 1], [13, 7]]), np.array([[40, 0], [13, 7]])
    assert levels(few).tolist() == levels(none).tolist() == [[100, 0], [25, 25]]
    assert levels(np.zeros((2, 2), dtype=int)).tolist() == [[0, 0], [0, 0]]
