import pytest

from feddpms.errors import RunFolderError
from feddpms.experiments import Line, insert, table

COMMON = {
    "data": "fmnist",
    "fraction": 0.1,
    "beta": 0.5,
    "clients": 10,
    "rounds": 25,
    "local_epochs": 3,
    "epsilon": None,
    "delta": None,
    "ablation": None,
    "command": "c",
    "minutes": 1.0,
    "versions": {},
    "accuracies": (),
}


def line(method, seed, final, **more):
    values = {"final_accuracy": final, "last5_accuracy": final and final - 0.1, **more}
    return Line(**{**COMMON, "method": method, "seed": seed, **values})


LINES = [
    *(line("feddpms", seed, final) for seed, final in enumerate((0.72, 0.74, 0.76))),
    *(line("fedavg", seed, final) for seed, final in enumerate((0.70, 0.71, 0.72))),
]


def rows(text):
    return [
        [c.strip() for c in row.strip("|").split("|")] for row in text.splitlines() if "|" in row
    ]


def test_a_table_by_hand():
    """Gains 2, 3 and 4 points: mean 3, deviation 1, interval 3 ± 4.303 / sqrt(3), relative 3/71."""
    text = table("table1", LINES)
    assert text.startswith(
        "**fmnist, 10 % of the training data, beta 0.5, 10 clients, 25 rounds of 3 epochs**"
    )
    head, _, fedavg, feddpms = rows(text)
    assert head[0] == "method"
    assert fedavg[:5] == ["fedavg", "3", "71.0 ± 1.0", "61.0 ± 1.0", "reference"]
    assert feddpms == [
        *("feddpms", "3", "74.0 ± 2.0", "64.0 ± 2.0", "+3.0 ± 1.0", "+0.5 to +5.5"),
        *("+4.2", "+3.3"),
    ]


def test_the_papers_number_stands_where_it_belongs():
    cifar = [line(m, 0, 0.5, data="cifar100", clients=30) for m in ("fedavg", "feddpms", "moon")]
    assert [row[-1] for row in rows(table("table2", cifar))[2:]] == ["-", "+7.3", "-"]
    assert [row[-1] for row in rows(table("lambda", cifar))[2:]] == ["-"] * 3


def test_differences_are_paired_by_seed():
    """Seed 7 has no partner: it is in the mean of its method, and in no difference."""
    text = table("table1", [*LINES, line("feddpms", 7, 0.1)])
    assert rows(text)[3][1:3] == ["4", f"{100 * (0.72 + 0.74 + 0.76 + 0.1) / 4:.1f} ± 32.0"]
    assert rows(text)[3][4] == "+3.0 ± 1.0"
    assert table("table1", [*LINES[:3], *LINES[:2:-1]]) == table("table1", LINES)


def test_a_diverged_run_is_in_no_mean():
    text = table("table1", [*LINES, line("feddpms", 3, None), line("moon", 0, None)])
    assert rows(text)[3][:3] == ["feddpms", "3 of 4", "74.0 ± 2.0"]
    assert rows(text)[4][:3] == ["moon", "0 of 1", "diverged"]


def test_what_may_not_be_compared_stands_apart():
    others = [line("fedavg", 0, 0.4, beta=0.1), line("fedavg", 0, 0.4, rounds=5)]
    assert table("table1", LINES + others).count("**fmnist") == 3


def test_ablations_have_rows_of_their_own():
    text = table("ablation", [*LINES, line("feddpms", 0, 0.6, ablation="no synthesis")])
    assert [row[0] for row in rows(text)[2:]] == ["fedavg", "feddpms", "feddpms, no synthesis"]


def test_a_table_is_put_between_its_marks(tmp_path):
    document = tmp_path / "results.md"
    document.write_text("a\n<!-- table1 -->\nold\n<!-- end table1 -->\nb\n")
    insert(document, "table1", "new\n")
    assert document.read_text() == "a\n<!-- table1 -->\nnew\n<!-- end table1 -->\nb\n"
    with pytest.raises(RunFolderError, match="<!-- table2 -->") as told:
        insert(document, "table2", "new\n")
    assert "\n" not in str(told.value)
    assert "new" in document.read_text()


def test_rows_are_in_the_order_of_their_numbers():
    names = ("epsilon 16", "epsilon 0.5", "epsilon 1000", "epsilon 2", None)
    made = [line("feddpms", 0, 0.5, ablation=name) for name in names]
    order = [row[0] for row in rows(table("privacy", [*made, line("fedavg", 0, 0.5)]))[2:]]
    numbers = ("0.5", "2", "16", "1000")
    assert order == ["fedavg", "feddpms", *(f"feddpms, epsilon {n}" for n in numbers)]
