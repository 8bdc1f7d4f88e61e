from collections import Counter

import pytest

from feddpms import config
from feddpms.config import merge, method_name
from feddpms.errors import ConfigError
from feddpms.experiments import EXPERIMENTS, SCALES, Scale, cells
from feddpms.experiments.presets import METHODS
from feddpms.experiments.tuning import tuned
from feddpms.privacy import calibrate

SMALL = Scale(fraction=0.1, rounds=20, epochs=3, width=0.5)


def runs(name, seeds=(0,), chosen=None):
    return [config.parse(one.values) for one in cells(name, SMALL, seeds, chosen or {})]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_are_runs_of_the_scale_and_all_differ(name):
    made = runs(name, (0, 1))
    assert len(set(map(config.text, made))) == len(made)
    for run in made:
        assert (run.rounds, run.local.epochs, run.net.width) == (20, 3, 0.5)
        assert run.data.fraction == (run.partition.clients / 100 if name == "table2" else 0.1)
        assert run.data.dir == ""
    assert [run.seed for run in made] == sorted(run.seed for run in made)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_methods_of_a_table_differ_in_nothing_else(name):
    """All that is not the method is the same for every method of a setting, and the defaults'."""
    if name in ("privacy", "tuning"):
        return  # epsilon is a setting of the release alone; learning rates are tried
    for run in runs(name):
        size = {
            "rounds": 20,
            "data": {"name": run.data.name, "fraction": run.data.fraction},
            "partition": {"beta": run.partition.beta, "clients": run.partition.clients},
            "net": {"width": 0.5},
            "local": {"epochs": 3},
        }
        plain = config.parse(merge(size, tuned(run.data.name, "fedavg")))
        own, other = config.dump(run), config.dump(plain)
        del own["method"], other["method"]
        assert own == other


def test_table_1_has_five_methods_on_three_data_sets():
    made = Counter((run.data.name, method_name(run.method)) for run in runs("table1"))
    assert set(made) == {(d, m) for d in ("fmnist", "cifar10", "cifar100") for m in METHODS}
    assert set(made.values()) == {1}
    assert {run.partition.beta for run in runs("table1")} == {0.5}


def test_figure_2_goes_over_beta():
    assert {run.partition.beta for run in runs("figure2")} == {0.1, 0.2, 0.3, 0.4, 0.5}
    assert len(runs("figure2")) == 5 * len(runs("table1"))


def test_table_2_keeps_what_a_client_has():
    made = {(run.partition.clients, run.data.fraction) for run in runs("table2")}
    assert made == {(10, 0.1), (20, 0.2), (30, 0.3), (40, 0.4), (50, 0.5)}
    assert {run.data.name for run in runs("table2")} == {"cifar100"}


def test_preliminary_rounds_are_parts_of_all():
    made = {run.method.preliminary_rounds for run in runs("preliminary")}
    assert made == {2, 4, 6, 8, 10, 12}
    dpms = [run.method for run in runs("figure3") if method_name(run.method) == "feddpms"]
    assert {method.preliminary_rounds for method in dpms} == {0, 6, 8, 10}
    assert all((m.secondary == "train") == (m.preliminary_rounds > 0) for m in dpms)


def test_an_ablation_changes_what_it_says():
    found = {c.ablation: config.parse(c.values).method for c in cells("ablation", SMALL, [0], {})}
    assert found["no calibration"].calibration.steps == 0
    assert found["no calibration"].secondary == "rest"
    assert {k for k, m in found.items() if getattr(m, "secondary", "") == "train"} == {
        "images",
        "filtered images",
        "images and calibration",
    }
    assert found["filtered images"].synthesis.filter == "global"
    assert found["images"].calibration.steps == found["filtered images"].calibration.steps == 0
    assert found["images and calibration"].calibration.steps == 100
    weights = {c.ablation: config.parse(c.values).method for c in cells("lambda", SMALL, [0], {})}
    assert all(float(k.split()[1]) == m.vae.weight for k, m in weights.items())
    budgets = {c.ablation: config.parse(c.values).privacy for c in cells("privacy", SMALL, [0], {})}
    assert budgets.pop(None) == config.Run().privacy  # fedavg's
    assert budgets.pop("the paper's release").release == "paper"
    assert all(float(k.split()[1]) == p.target_epsilon for k, p in budgets.items())
    assert all(calibrate(p).latent > 0 for p in budgets.values())


def test_the_papers_scale_is_the_papers():
    """Section 4: 50 rounds of 5 local epochs, all data."""
    assert SCALES["paper"] == Scale(fraction=1.0, rounds=50, epochs=5, width=1.0)


def test_some_cells_can_be_chosen():
    chosen = {"data": ["fmnist"], "method": ["fedavg", "feddpms"], "beta": [0.1, 0.3]}
    made = runs("figure2", (3,), chosen)
    assert {(r.data.name, method_name(r.method), r.partition.beta, r.seed) for r in made} == {
        ("fmnist", m, b, 3) for m in ("fedavg", "feddpms") for b in (0.1, 0.3)
    }


def test_choosing_nothing_says_what_there_is():
    with pytest.raises(ConfigError, match=r"'data': \['cifar10', 'cifar100', 'fmnist'\]") as told:
        cells("table1", SMALL, [0], {"data": ["mnist"]})
    assert "\n" not in str(told.value)
