import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import Maker, diverge

from feddpms.errors import RunFolderError
from feddpms.report.compare import (
    compare,
    cost_cells,
    duration,
    markdown_table,
    size,
    text_table,
)
from feddpms.report.load import find


def flat_at(*values: float):
    """The rounds, with these test accuracies at the end and 0.99 before: the best is not last."""

    def change(lines):
        accuracies = [0.99] * (len(lines) - len(values)) + list(values)
        return [
            replace(r, test_accuracy=a, test_loss=1 - a, numbers={"steps": 10.0})
            for r, a in zip(lines, accuracies, strict=True)
        ]

    return change


def rows_of(root: Path):
    (group,) = compare(find([root]))
    return group, {row.label: row for row in group.rows}


def test_the_final_round_counts_and_not_the_best(make: Maker):
    make("fedavg", 0, change=flat_at(0.5, 0.6, 0.7, 0.6, 0.5))
    make("fedavg", 1, change=flat_at(0.6, 0.6, 0.6, 0.6, 0.7))
    _, rows = rows_of(make.root)
    row = rows["fedavg"]

    assert row.accuracy is not None
    assert row.last_five is not None
    assert row.loss is not None
    assert row.accuracy.mean == pytest.approx(0.6)
    assert row.accuracy.sd == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert row.last_five.mean == pytest.approx(0.6)
    assert row.last_five.sd == pytest.approx(statistics.stdev([0.58, 0.62]))
    assert row.loss.mean == pytest.approx(0.4)
    assert "60.0 ± 14.1" in text_table(compare(find([make.root])))
    assert "99" not in text_table(compare(find([make.root])))


def test_unfinished_and_diverged_runs_are_named_and_in_no_mean(make: Maker):
    for seed in (0, 1):
        make("fedavg", seed, change=flat_at(0.5))
    make("fedavg", 2, change=lambda lines: flat_at(0.9)(lines)[:12])
    make("fedavg", 3, change=lambda lines: diverge(flat_at(0.9)(lines)))
    make("moon", 0, change=diverge)
    group, rows = rows_of(make.root)
    row = rows["fedavg"]

    assert row.accuracy is not None
    assert row.accuracy.n == 2
    assert row.accuracy.mean == pytest.approx(0.5)
    assert [f.run.seed for f in row.runs] == [0, 1]
    assert [f.run.seed for f in row.left_out] == [2, 3]
    assert rows["moon"].accuracy is None
    assert rows["moon"].difference is None
    text = text_table([group])
    assert "fedavg, seed 2: unfinished (12 of 20 rounds)" in text
    assert "fedavg, seed 3: diverged (loss not finite in round 14)" in text
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["moon", "0"]]
    assert line.split()[2:] == ["of", "1", "diverged", "(round", "14)", *["-"] * 4]
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["fedavg", "2"]]
    assert line.split()[2:7] == ["of", "4", "50.0", "±", "0.0"]


def test_one_seed_has_no_spread_and_no_interval(make: Maker):
    make("fedavg", change=flat_at(0.5))
    make("moon", change=flat_at(0.6))
    group, rows = rows_of(make.root)
    d = rows["moon"].difference

    assert rows["moon"].accuracy is not None
    assert rows["moon"].accuracy.sd is None
    assert d is not None
    assert (d.n, d.sd, d.low, d.high) == (1, None, None, None)
    assert "60.0 ± -" in text_table([group])
    assert "+10.0 ± -" in text_table([group])


def test_differences_are_paired_by_seed(make: Maker):
    for seed, base, gain in ((0, 0.4, 0.02), (1, 0.6, 0.03), (2, 0.8, 0.04)):
        make("fedavg", seed, change=flat_at(base))
        make("moon", seed, change=flat_at(base + gain))
    make("moon", 7, change=flat_at(0.1))
    _, rows = rows_of(make.root)
    d = rows["moon"].difference

    assert rows["fedavg"].difference is None
    assert d is not None
    assert d.n == 3
    assert d.mean == pytest.approx(0.03)
    assert d.sd == pytest.approx(0.01)
    half = 4.302653 * 0.01 / 3**0.5  # the 97.5 % point of t with 2 degrees of freedom
    assert d.low == pytest.approx(0.03 - half, rel=1e-5)
    assert d.high == pytest.approx(0.03 + half, rel=1e-5)


def test_another_partition_under_the_same_seed_is_no_pair(make: Maker):
    make("fedavg", 0)
    folder = make("moon", 0)
    lines = (folder / "records.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace("[[", "[[1", 1)
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    _, rows = rows_of(make.root)

    assert rows["moon"].difference is None


def test_the_reference_is_fedavg_or_else_the_first(make: Maker):
    make("central")
    make("moon")
    group, _ = rows_of(make.root)
    assert group.reference == "central"

    make("fedavg")
    group, _ = rows_of(make.root)
    assert group.reference == "fedavg"
    assert [row.method for row in group.rows] == ["fedavg", "central", "moon"]


@pytest.mark.parametrize(
    "other",
    [
        {"data": "other"},
        {"partition": "classes=2"},
        {"clients": 5},
        {"planned": 30},
        {"test_examples": 99},
        {"classes": tuple("abcdefghij")},
    ],
)
def test_runs_that_may_not_be_compared_stand_in_groups_with_captions_of_their_own(
    make: Maker, other
):
    make("fedavg", 0)
    make("fedavg", 1, **other)
    groups = compare(find([make.root]))

    assert [group.rows[0].accuracy.n for group in groups if group.rows[0].accuracy] == [1, 1]
    if "classes" not in other:
        assert groups[0].caption != groups[1].caption


def test_a_method_with_other_settings_has_a_row_of_its_own(make: Maker):
    for seed in (0, 1):
        make("fedprox", seed, settings="mu = 0.01", name=f"a{seed}")
        make("fedprox", seed, settings=f"mu = 0.1\n[data]\ndir = '/place/{seed}'", name=f"b{seed}")
    group, rows = rows_of(make.root)

    assert list(rows) == ["fedprox (mu=0.01)", "fedprox (mu=0.1)"]
    assert [len(row.runs) for row in group.rows] == [2, 2]


def test_a_row_says_only_what_most_rows_do_not_have(make):
    changes = ("a = 1\n[c]\na = 5", "a = 2\n[c]\na = 5", "a = 3\n[c]\na = 5", "a = 3\n[c]\na = 6")
    texts = [f"[b]\nkind = 'x'\n{change}" for change in changes]
    texts[0] = texts[0].replace("'x'", "'y'")
    for i, text in enumerate(texts):
        make("fedprox", name=f"r{i}", settings=text)
    (group,) = compare(find([make.root]))
    assert [row.label for row in group.rows] == [
        "fedprox (b.a=1, kind=y)",
        "fedprox (b.a=2)",
        "fedprox (b.a=3)",
        "fedprox (b.a=3, c.a=6)",
    ]


def test_a_seed_that_is_there_twice_is_refused(make: Maker):
    make("fedavg", 0, name="a")
    make("fedavg", 0, name="b")

    with pytest.raises(RunFolderError, match=r"two of fedavg with seed 0: .*a and .*b"):
        compare(find([make.root]))


def test_no_runs_are_refused():
    with pytest.raises(RunFolderError, match="got none"):
        compare([])


def test_costs_are_sums_over_rounds_and_means_over_seeds(make: Maker):
    for seed in (0, 1):
        make("feddpms", seed, change=lambda lines: lines)
    _, rows = rows_of(make.root)
    row = rows["feddpms"]

    assert row.bytes_up == pytest.approx(2_440_000 * 26 / 20)
    assert row.bytes_down == pytest.approx(2_440_000)
    assert row.bytes_total == pytest.approx(2_440_000 * 46)
    assert row.seconds == pytest.approx(25)
    assert row.steps == pytest.approx(9200)


def test_text_fits_in_100_columns_and_sends_no_control_characters(make: Maker):
    make("fedavg", 0, partition="\x1b[31mred " + "long " * 60)
    for i in range(2):
        method = "feddpms+scaffold-with-a-name-that-is-very-long-and-then-some-" + "x" * 60
        make(method, i, settings=f"'{'k' * 90}' = {i}", name=f"m{i}", partition="p")
    text = text_table(compare(find([make.root])))

    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_text_and_markdown_of_three_methods(three: Path):
    groups = compare(find([three]))
    text, marked = text_table(groups), markdown_table(groups)

    assert max(map(len, text.splitlines())) <= 100
    assert "never the best" in text
    tables = [line for line in marked.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {8, 9}
    assert "| fedavg | 3 of 4 |" in marked


def test_markdown_shows_marks_as_they_are(make: Maker):
    make("a|b<i>", partition="*all*")

    marked = markdown_table(compare(find([make.root])))
    assert "a\\|b\\<i\\>" in marked
    assert "\\*all\\*" in marked


def test_sizes_and_durations():
    sizes = [size(n) for n in (None, 0, 999, 1000, 2_440_000, 97.6e6, 3.2e12, 5e16)]
    assert sizes == ["-", "0 B", "999 B", "1 kB", "2.44 MB", "97.6 MB", "3.2 TB", "5e+04 TB"]
    times = [duration(s) for s in (None, float("nan"), 0.04, 9.96, 99.6, 7200)]
    assert times == ["-", "-", "0.0 s", "10 s", "1.7 min", "2.0 h"]


def test_what_is_kept_is_the_most_of_any_round_and_seed(make: Maker):
    for seed in (0, 1):
        kept = {"bytes_client": 1000 * (seed + 1), "bytes_server": 5000 - seed}
        make("fedavg", seed, change=lambda r, k=kept: [*r[:3], replace(r[3], **k), *r[4:]])
    group, rows = rows_of(make.root)
    assert (rows["fedavg"].bytes_client, rows["fedavg"].bytes_server) == (2000, 5000)
    head, row = cost_cells(group)
    assert head[4:6] == ["client has", "server has"]
    assert row[4:6] == [size(2000), size(5000)]
