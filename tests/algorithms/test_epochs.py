"""Uneven local work: each client and round draws its epochs."""

import tomllib
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from contract.test_contract import CASES, FEDERATED, RESTING, same
from feddpms import config, runs
from feddpms.algorithms import FedAvg, Training
from feddpms.algorithms.batches import epochs, shuffled
from feddpms.algorithms.fit import fit
from feddpms.config import Run
from feddpms.engine import Crew, Engine, Workers, simulate
from feddpms.errors import ConfigError
from feddpms.prepare import prepare
from feddpms.privacy import DpTraining, Ledger, Privacy
from feddpms.rng import Rng
from small import LOOSE, TASK, client, small_net, three_shards, unseen

UNEVEN = Training(epochs=9, epochs_range=(1, 4), batch_size=8, lr=0.01)


def drawn(number: int, round: int) -> int:
    """By the stream's name: uniform from 1 to 4."""
    return int(Rng(0).at("client", number, round).numpy("epochs").integers(1, 5))


def go(method, local=UNEVEN, rounds=4, workers=None, **engine):
    task = replace(TASK, rounds=rounds)
    shards = dict(enumerate(three_shards()))
    crew = Crew(method, shards, unseen(), small_net(), task, local, LOOSE, Rng(0))
    return simulate(crew, Engine(**engine), Ledger(), workers=workers)


def test_the_batches_are_those_of_the_drawn_number():
    shard = three_shards()[1]  # 40 examples, 5 batches of 8
    for number in range(6):
        me = client(shard, small_net(), id=number, local=UNEVEN)
        steps = list(shuffled(me))
        assert len(steps) == 5 * drawn(number, 1)
        each_epoch = torch.cat([b.index for b in steps]).split(40)
        assert all(sorted(e.tolist()) == list(range(40)) for e in each_epoch)
    assert len({drawn(number, 1) for number in range(6)}) > 1


def test_a_round_has_one_draw_however_often_it_is_asked_for():
    me = client(three_shards()[0], small_net(), local=UNEVEN)
    assert epochs(me) == epochs(me)
    start = small_net().state_dict()
    assert fit(me, start).steps == fit(me, start).steps == 3 * epochs(me)


def test_every_number_of_the_range_comes_and_as_often():
    shard, net = three_shards()[0], small_net()
    draws = [epochs(client(shard, net, round=r, local=UNEVEN)) for r in range(1, 801)]
    assert all(abs(draws.count(n) - 200) < 60 for n in (1, 2, 3, 4))
    assert set(draws) == {1, 2, 3, 4}


def test_a_range_of_one_number_is_that_number():
    same_each = go(FedAvg(), replace(UNEVEN, epochs_range=(2, 2)))
    assert same(same_each.model, go(FedAvg(), replace(UNEVEN, epochs=2, epochs_range=())).model)
    assert not same(same_each.model, go(FedAvg()).model)


@pytest.mark.parametrize("name", FEDERATED)
def test_every_method_takes_the_drawn_steps(name):
    pooled = CASES[name].about.scope == "pooled"
    sizes = [95] if pooled else [24, 40, 31]
    for record in go(CASES[name]).rounds[: -1 if name in RESTING else None]:
        each = [drawn(k, record.round) * -(-n // 8) for k, n in enumerate(sizes)]
        assert record.numbers["steps"] == sum(each)


@pytest.mark.parametrize("name", ["local", "feddpms+moon"])
def test_workers_draw_the_same(name):
    workers = Workers(2)
    together = go(CASES[name], workers=workers)
    workers.close()
    alone = go(CASES[name])
    assert same(together.model, alone.model)
    assert same(dict(together.memories), dict(alone.memories))


def test_clients_that_train_at_once_draw_the_same():
    sgd = replace(UNEVEN, optimizer="sgd", lr=0.05)
    alone, together = go(FedAvg(), sgd, 2), go(FedAvg(), sgd, 2, clients_at_once=3)
    assert [r.numbers for r in alone.rounds] == [r.numbers for r in together.rounds]
    gaps = [(alone.model[k].double() - v.double()).abs().max() for k, v in together.model.items()]
    assert max(gaps) < 1e-5


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("1,5", (1, 5)),
        ("[1,5]", (1, 5)),
        ("[ 2, 2 ]", (2, 2)),
        (" 3 , 7 ", (3, 7)),
        ('"1,5"', (1, 5)),
        ("[]", ()),
        ("", ()),
    ],
)
def test_a_range_is_set_from_the_command_line_and_survives_toml(assignment, expected):
    run = config.parse(config.override({}, [f"local.epochs_range={assignment}"]))
    assert run.local == Training(epochs_range=expected)
    assert config.parse(tomllib.loads(config.text(run))) == run
    assert config.parse(tomllib.loads(config.template(run))) == run
    assert config.parse(config.dump(run)) == run
    hash(run.local)  # clients that train at once are grouped by it


@pytest.mark.parametrize(
    "wrong",
    [
        *("5,1", "0,3", "-1,3", "1,2,3", "3", "[3]", "few,many", "1.5,3", "1,", "[1.0, 2]"),
        *("[true, 2]", "[1, 'a']", "{a = 1}", "true", "false", "0"),
    ],
)
def test_what_is_no_range_is_refused_in_one_line(wrong):
    with pytest.raises(ConfigError) as told:
        config.parse(config.override({}, [f"local.epochs_range={wrong}"]))
    line = str(told.value)
    assert line.startswith("local.epochs_range should be two whole numbers from 1 on"), line
    assert ", got " in line
    assert "\n" not in line


def test_what_is_no_range_is_refused_in_python_too():
    with pytest.raises(ValidationError):
        Training(epochs_range=(5, 1))


def test_private_training_takes_a_public_number_of_steps():
    privacy = Privacy(weights="noisy", training=DpTraining(kind="dpsgd"))
    net = replace(Run().net, norm="group")
    settings = replace(Run(), net=net, privacy=privacy, local=UNEVEN, method=FedAvg())
    data = runs.load(settings.data, Rng(0))
    with pytest.raises(ConfigError, match=r"needs local\.epochs_range=") as told:
        prepare(settings, data)
    assert "\n" not in str(told.value)


def test_a_longer_range_is_worth_more_workers(monkeypatch):
    monkeypatch.setattr(runs, "cores", lambda: 2)
    started = []

    class Started:
        def __init__(self, count):
            started.append(count)

        def close(self):
            pass

    monkeypatch.setattr(runs, "Workers", Started)
    for highest in (1, 1999):
        settings = Run(rounds=1, local=Training(epochs=1, epochs_range=(1, highest)))
        with runs._workers(None, settings, 1000, 1):
            pass
    assert started == [2]
