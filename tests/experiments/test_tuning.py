"""Settings are chosen by one rule, with as many tries for each method, and never on test images."""

import pytest
from test_tables import line, rows, table

from feddpms import config
from feddpms.config import method_name
from feddpms.experiments import EXPERIMENTS, Scale, cells, tuning
from feddpms.experiments.tuning import GRIDS, winners, words

SMALL = Scale(fraction=0.1, rounds=20, epochs=3, width=0.5)
DEFAULT = config.parse({})


def tried(method, accuracies, data="fmnist"):
    """Lines of a grid with these accuracies, one seed or several for each value."""
    return [
        line(method, seed, a and a + 0.1, data=data, ablation=words(method, value))
        for value, seeds in zip(GRIDS[method][1], accuracies, strict=False)
        for seed, a in enumerate(seeds)
    ]


def value_of(run, method):
    node = run
    for name in GRIDS[method][0].split("."):
        node = getattr(node, name)
    return node


def test_every_method_of_the_paper_has_as_many_tries_and_its_default_among_them():
    assert set(GRIDS) == {"fedavg", "fedprox", "fedmix", "moon", "feddpms"}
    assert len({len(values) for _, values in GRIDS.values()}) == 1
    for method, (_, values) in GRIDS.items():
        assert value_of(config.parse({"method": method}), method) in values


def test_tries_hold_out_training_examples_and_differ_in_what_their_name_says():
    found = {}
    for one in cells("tuning", SMALL, [0], {"data": ["cifar10"]}):
        run = config.parse(one.values)
        method = method_name(run.method)
        assert run.data.validation == 0.2
        assert one.ablation == words(method, value_of(run, method))
        found.setdefault(method, []).append(value_of(run, method))
    assert found == {method: list(values) for method, (_, values) in GRIDS.items()}


def test_nothing_else_holds_examples_out():
    for name in EXPERIMENTS.keys() - {"tuning"}:
        runs = [config.parse(one.values) for one in cells(name, SMALL, [0], {})]
        assert {run.data.validation for run in runs} == {0}


def test_the_best_mean_over_seeds_wins():
    lines = tried("fedprox", [(0.5, 0.5), (0.9, 0.3), (0.6, 0.62), (0.1, 0.1)])
    assert winners(lines) == {"fmnist": {"fedprox": 0.1}}


def test_the_last_five_rounds_decide_and_not_the_last():
    lines = [
        line("moon", 0, final, last5_accuracy=five, ablation=words("moon", value))
        for value, final, five in zip(
            GRIDS["moon"][1], (0.9, 0.1, 0.1, 0.1), (0.1, 0.2, 0.8, 0.3), strict=True
        )
    ]
    assert winners(lines) == {"fmnist": {"moon": 5.0}}


def test_what_diverged_for_a_seed_is_not_chosen():
    lines = tried("fedmix", [(0.9, None), (0.5, 0.5), (0.4, 0.4), (None, None)])
    assert winners(lines) == {"fmnist": {"fedmix": 0.05}}
    assert winners(tried("fedmix", [(None,)] * 4)) == {}


def test_an_unfinished_grid_chooses_nothing():
    assert winners(tried("fedprox", [(0.5,), (0.6,), (0.7,)])) == {}


def test_values_tried_with_other_seeds_choose_nothing():
    assert winners(tried("fedprox", [(0.5, 0.5), (0.6,), (0.7, 0.7), (0.5, 0.5)])) == {}


def test_data_sets_choose_apart():
    lines = tried("moon", [(0.9,), (0.1,), (0.1,), (0.1,)])
    lines += tried("moon", [(0.1,), (0.1,), (0.1,), (0.9,)], "cifar10")
    assert winners(lines) == {"fmnist": {"moon": 0.1}, "cifar10": {"moon": 10.0}}


@pytest.fixture
def chosen(monkeypatch):
    values = {"fmnist": {"fedavg": 0.003, "moon": 5.0, "feddpms": 70}}
    monkeypatch.setattr(tuning, "TUNED", values)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", ["table1", "figure2", "tuning", "ablation"])
def test_fedavgs_learning_rate_is_everybodys_where_it_was_chosen(name):
    for one in cells(name, SMALL, [0], {}):
        run = config.parse(one.values)
        if name == "tuning" and method_name(run.method) == "fedavg":
            continue  # which tries them
        own = run.data.name == "fmnist"
        assert run.local.lr == (0.003 if own else DEFAULT.local.lr)


@pytest.mark.usefixtures("chosen")
def test_a_method_takes_what_was_chosen_for_it():
    runs = [config.parse(one.values) for one in cells("table1", SMALL, [0], {"method": ["moon"]})]
    assert {run.data.name: run.method.mu for run in runs} == {
        "fmnist": 5.0,
        "cifar10": 1.0,
        "cifar100": 1.0,
    }


@pytest.mark.usefixtures("chosen")
def test_a_sweep_keeps_what_it_sweeps():
    made = cells("lambda", SMALL, [0], {"data": ["fmnist"]})
    assert [config.parse(one.values).method.vae.weight for one in made] == [
        0.0005,
        0.005,
        0.05,
        0.5,
    ]


def test_a_table_says_that_test_images_were_not_scored():
    lines = tried("fedavg", [(0.5,), (0.6,)])
    text = table("tuning", [*lines, line("fedavg", 0, 0.7, validation=0.2)])
    assert "10 % of the training data, 20 % of it held out and scored, beta 0.5" in text
    assert len(rows(text)) == 2 + 2 + 2 + 1
