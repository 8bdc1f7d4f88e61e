"""Clients that fall silent: asked, and neither heard of nor changed."""

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from contract.test_contract import CASES, FEDERATED, LOCAL, same
from engine.test_engine import Scripted
from engine.test_engine import go as play
from feddpms.algorithms import FedAvg
from feddpms.engine import Crew, Engine, Workers, evaluate, simulate
from feddpms.privacy import Ledger
from feddpms.rng import Rng
from small import CLASSES, LOOSE, TASK, blobs, small_net, three_shards, unseen

SOME = 0.5
"""silences, over 8 rounds of three clients, some rounds in part and one as a whole"""


def silent(clients: int, round: int, dropout: float = SOME) -> set[int]:
    """Who falls silent in a round of the seed 0, by the stream's name."""
    draws = {c: Rng(0).numpy("dropout", c, round).random() for c in range(clients)}
    return {c for c, draw in draws.items() if draw < dropout}


def go(method, rounds=8, dropout=SOME, workers=None, **engine):
    ledger = Ledger()
    task = replace(TASK, rounds=rounds)
    shards = dict(enumerate(three_shards()))
    crew = Crew(method, shards, unseen(), small_net(), task, LOCAL, LOOSE, Rng(0))
    engine = Engine(dropout=dropout, **engine)
    kept = []
    note = lambda record, progress: kept.append((record, progress.state))  # noqa: E731
    return simulate(crew, engine, ledger, note, workers), ledger, kept


def test_the_rounds_of_these_tests_have_every_kind_of_silence():
    sizes = [len(silent(3, r)) for r in range(1, 9)]
    assert 0 in sizes
    assert 3 in sizes
    assert {1, 2} & set(sizes)


def test_who_falls_silent_is_asked_and_not_heard_of():
    method = Scripted(shares=False)
    records = play(method, rounds=8, dropout=SOME).rounds
    heard = [tuple(sorted({0, 1, 2} - silent(3, r))) for r in range(1, 9)]
    assert [asked for _, asked in method.told.served] == [h for h in heard if h]
    assert [c for _, c, _ in method.told.asked] == [c for who in heard for c in who]
    for record, who in zip(records, heard, strict=True):
        assert record.numbers["clients"] == len(who)
        assert record.bytes_down == 3 * 20
        assert record.bytes_up == len(who) * (28 + 8 + 4 * 8)
        assert record.numbers["steps"] == sum(c + 1 for c in who)


def test_each_falls_silent_as_often_as_said_and_for_itself():
    method = Scripted(shares=False)
    rounds, clients = 200, 8
    play(method, rounds=rounds, shards=[blobs(2, [0, 1], 1)] * clients, dropout=0.3)
    answers = [sum(c == k for _, c, _ in method.told.asked) for k in range(clients)]
    assert all(abs(n / rounds - 0.7) < 4 * math.sqrt(0.21 / rounds) for n in answers)
    sizes = [len(asked) for _, asked in method.told.served]
    spread = sum((n - 5.6) ** 2 for n in sizes) / len(sizes)
    assert spread == pytest.approx(clients * 0.21, rel=0.3)  # of independent coins


def test_a_silent_client_neither_shares_nor_trains_in_that_round_and_is_asked_again():
    method = Scripted()
    records = play(method, rounds=8, dropout=SOME).rounds
    expected, shared = [], set()
    for r in range(1, 9):
        here = {0, 1, 2} - silent(3, r)
        new = tuple(sorted(here - shared))
        shared |= here
        expected += [("share", new)] if new else []
        expected += [("train", tuple(sorted(here)))] if here else []
    assert method.told.served == expected
    known = set()
    for r, record in enumerate(records, 1):
        here = {0, 1, 2} - silent(3, r)
        unknown = {0, 1, 2} - known
        known |= here
        assert record.bytes_down == len(unknown) * 8 + len(known) * 20


def test_a_round_in_which_nobody_even_shares_is_recorded():
    outcome = play(Scripted(), rounds=1, dropout=1 - 1e-12)
    (record,) = outcome.rounds
    assert record.phase == "share"
    assert record.numbers == {"clients": 0, "steps": 0}
    assert (record.bytes_down, record.bytes_up) == (3 * 8, 0)


@pytest.mark.parametrize("name", CASES)
def test_if_nobody_answers_the_state_stays(name):
    outcome, ledger, kept = go(CASES[name], rounds=3, dropout=1 - 1e-12)
    start = small_net().state_dict()
    assert all(same(v, start[k]) for k, v in outcome.model.items())
    assert same(kept[0][1], kept[-1][1])
    score = evaluate(small_net(), unseen(), CLASSES)
    for record in outcome.rounds:
        assert math.isnan(record.train_loss)
        assert {k: record.numbers[k] for k in ("clients", "steps")} == {"clients": 0, "steps": 0}
        assert (record.test_accuracy, record.test_loss) == (score.accuracy, score.loss)
        assert record.bytes_up == 0
    assert not ledger.entries
    assert not dict(outcome.memories)


@pytest.mark.parametrize("name", FEDERATED)
def test_every_method_goes_on_without_some(name):
    outcome, ledger, kept = go(CASES[name])
    asked = 1 if CASES[name].about.scope == "pooled" else 3
    assert all(v.isfinite().all() for v in outcome.model.values())
    assert not same(outcome.model, kept[0][1].model)
    first = {}
    for record, _ in kept:
        away = silent(asked, record.round)
        assert record.numbers["clients"] == asked - len(away)
        first |= dict.fromkeys(set(range(asked)) - away - first.keys(), record.round)
    told = {e.client: e.round for e in reversed(ledger.entries)}
    assert told == first  # what a client sends is written down the first time, and not before
    before = kept[0][1]
    for record, state in kept[1:]:
        if not record.numbers["clients"]:
            assert same(before, state)
        before = state


@pytest.mark.parametrize("name", ["local", "fedmix+moon", "feddpms+moon"])
def test_silence_is_the_same_in_workers_and_at_once(name):
    alone, ledger, _ = go(CASES[name], rounds=5)
    workers = Workers(2)
    together, other, _ = go(CASES[name], 5, workers=workers)
    workers.close()
    assert same(together.model, alone.model)
    assert same(dict(together.memories), dict(alone.memories))
    assert other.entries == ledger.entries
    numbers = [r.numbers["clients"] for r in alone.rounds]
    at_once, _, _ = go(CASES[name], 5, clients_at_once=2)
    assert [r.numbers["clients"] for r in at_once.rounds] == numbers
    assert len(set(numbers)) > 1


def test_without_dropout_nothing_changes():
    plain, _, _ = go(FedAvg(), 3, dropout=0.0)
    assert all(r.numbers["clients"] == 3 for r in plain.rounds)
    assert not same(plain.model, go(FedAvg(), 3)[0].model)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, math.nan, "often"])
def test_dropout_is_a_chance_below_one(value):
    with pytest.raises(ValidationError):
        Engine(dropout=value)
