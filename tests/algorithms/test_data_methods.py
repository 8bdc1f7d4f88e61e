"""What methods that enrich data leave to the method they wrap, and what they refuse."""

from dataclasses import replace

import pytest
import torch

from contract.test_contract import MADE, go, same
from feddpms import config, runs
from feddpms.algorithms import FedDG, FedProx, Moon, Sharing, Zdac, Zdas
from feddpms.data import load
from feddpms.errors import ConfigError
from feddpms.prepare import prepare
from feddpms.rng import Rng
from small import TASK, small_net

NEUTRAL = {
    "feddg": FedDG(weight=0),
    "zdac": Zdac(**{**MADE, "per_class": 0}),
    "zdas": Zdas(**MADE, steps=0),
    "sharing": Sharing(per_class=0),
}


@pytest.mark.parametrize("inner", [FedProx(mu=0.1), Moon()], ids=["fedprox", "moon"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_the_neutral_setting_is_the_inner_method_bit_for_bit(name, inner):
    """MOON looks at what it kept, so that is handed on too."""
    outcome, _ = go(replace(NEUTRAL[name], inner=inner))
    plain, _ = go(inner)
    assert same(outcome.model, plain.model)
    for got, want in zip(outcome.rounds, plain.rounds, strict=True):
        assert got.train_loss == want.train_loss


@pytest.mark.parametrize("name", ["zdac", "zdas+moon"])
def test_a_network_without_running_statistics_is_refused_before_anything_is_written(name, tmp_path):
    settings = config.parse({"method": name, "rounds": 4, "net": {"norm": "group"}})
    with pytest.raises(ConfigError, match=r"set net\.kind=conv and net\.norm=batch") as told:
        runs.run(settings, tmp_path / "new")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["zdac", "zdas+moon"])
def test_what_is_checked_before_a_run_is_the_network_of_the_run(name):
    settings = config.parse({"method": name, "rounds": 4, "data": {"fraction": 0.1}})
    prepared = prepare(settings, load(settings.data, Rng(0)))
    again = prepared.task.network.build().state_dict()
    assert {k: v.shape for k, v in prepared.net.state_dict().items()} == {
        k: v.shape for k, v in again.items()
    }


def test_a_server_without_a_plan_of_the_network_is_refused():
    with pytest.raises(ConfigError, match=r"^Task\.network must build"):
        Zdas().start(small_net().state_dict(), replace(TASK, network=None))


def test_the_servers_draws_follow_from_the_initial_weights():
    one, same_again, other = (Zdas().start(small_net(s).state_dict(), TASK).rng for s in (0, 0, 1))
    assert one == same_again
    assert one != other


def test_what_the_server_spends_on_images_counts_as_synthesis():
    outcome, _ = go(Zdas(**MADE))
    assert [r.timing["synthesis"] > 0 for r in outcome.rounds] == [False, True, True, True]


def test_a_client_that_was_left_out_makes_its_images_when_it_comes():
    """One client of three a round: images are of the first round after the wait in which it is."""
    outcome, _ = go(Zdac(**MADE, period=3), rounds=9, cohort=0.3)
    made = {c: int(m.trees["made"]["round"]) for c, m in outcome.memories.items() if m.trees}
    assert len(made) == 3
    assert all(1 < round <= 9 for round in made.values())
    assert len(set(made.values())) == 3


def test_images_are_made_of_what_is_lacking_and_weigh_as_set():
    outcome, _ = go(Zdac(**MADE, weight=0.5))
    lacked = [m.synthetic for _, m in sorted(outcome.memories.items())]
    assert [sorted(set(s.y.tolist())) for s in lacked] == [[2], [0], [1]]
    assert all(s.weight == 0.5 for s in lacked)
    assert all(torch.equal(s.x, s.x.clamp(0, 1)) for s in lacked)
