"""What sharing keeps to itself, says in the ledger, and refuses."""

from dataclasses import replace

import pytest
import torch

from contract.test_contract import LOCAL, go, same
from feddpms import config, runs
from feddpms.algorithms import FedAvg, FedDPMS, Moon, Sharing
from feddpms.engine import Crew, Engine, simulate
from feddpms.errors import ConfigError, PrivacyError
from feddpms.privacy import Ledger
from feddpms.report.load import find
from feddpms.rng import Rng
from feddpms.synthesis import Pool, candidates, shared
from feddpms.types import Message, Shard
from small import LOOSE, TASK, blobs, client, small_net, three_shards, unseen

CHANNELS = {"real examples", "class counts"}


def others(outcome):
    """What each client holds of others' examples."""
    return {c: m.trees["others"] for c, m in sorted(outcome.memories.items()) if m.trees}


def rows(x) -> set[bytes]:
    return {image.numpy().tobytes() for image in x}


def test_a_client_holds_different_examples_of_others_in_classes_that_it_lacks():
    shards = three_shards()
    outcome, _ = go(Sharing())
    held = others(outcome)
    assert [tree["y"].unique().tolist() for tree in held.values()] == [[2], [0], [1]]
    assert [len(tree["y"]) for tree in held.values()] == [8, 13, 10]  # a third of its own
    for k, tree in held.items():
        whose = rows(torch.cat([s.x for j, s in enumerate(shards) if j != k]))
        assert rows(tree["x"]) <= whose
        assert len(rows(tree["x"])) == len(tree["y"])


def test_what_others_sent_is_kept_and_drawn_by_the_seed():
    one, other = (go(Sharing())[0] for _ in range(2))
    assert same(others(one), others(other))
    shards = dict(enumerate(three_shards()))
    crew = Crew(Sharing(), shards, unseen(), small_net(), TASK, LOCAL, LOOSE, Rng(1))
    another = others(simulate(crew, Engine(), Ledger()))
    for k, tree in others(one).items():
        assert rows(tree["x"]) != rows(another[k]["x"])
    longer = others(go(Sharing(preliminary_rounds=1), rounds=9)[0])
    assert same(longer, others(go(Sharing(preliminary_rounds=1), rounds=2)[0]))


def test_candidates_do_not_depend_on_who_answered_first():
    bank = {k: shared(s, 3, 5, Rng(0).torch("shared", k)) for k, s in enumerate(three_shards() * 2)}
    backwards = dict(reversed(bank.items()))
    for sent in ({}, {0: frozenset({0, 3})}):
        one, other = (candidates(Pool(None, 0, b, sent), 0, 0.5, 8) for b in (bank, backwards))
        assert one
        assert same(one, other)


def test_a_class_is_asked_for_until_there_is_enough_of_it():
    """Client 0 wants 8 of class 2; those of a client that it was sent are not sent again."""
    bank = {k: shared(s, 3, 5, Rng(0).torch("shared", k)) for k, s in enumerate(three_shards())}
    sent = [
        len(candidates(Pool(None, 0, bank, {0: frozenset(known)}), 0, 0.5, 8).get("y", ()))
        for known in ((), (0,), (0, 1), (0, 1, 2))
    ]
    assert sent == [10, 10, 5, 0]
    full = {**bank, 1: shared(three_shards()[1], 3, 8, Rng(0).torch("shared", 1))}
    assert candidates(Pool(None, 0, full, {0: frozenset({0, 1})}), 0, 0.5, 8) == {}


@pytest.mark.parametrize("engine", [{"cohort": 0.4}, {"dropout": 0.5}])
def test_clients_that_come_late_or_fall_silent_get_what_they_want_in_the_end(engine):
    outcome, ledger = go(Sharing(preliminary_rounds=1), rounds=16, **engine)
    gets = {k: len(tree["y"]) for k, tree in others(outcome).items()}
    assert gets == {0: 8, 1: 13, 2: 10}
    shares = [e for e in ledger.entries if e.event.channel == "real examples"]
    assert sorted({e.client for e in shares}) == [0, 1, 2]
    assert len({e.round for e in shares}) > 1


def test_nothing_is_shared_in_the_preliminary_rounds_which_are_as_many_as_those_of_feddpms():
    for rounds, first in {2: 1, 3: 1, 5: 2, 10: 4, 13: 5, 50: 20}.items():
        task = replace(TASK, rounds=rounds)
        dpms = FedDPMS(secondary="train")
        state = dpms.start(small_net().state_dict(), task)
        assert Sharing().start(small_net().state_dict(), task).left == first
        assert dpms._left(state) == first
    outcome, ledger = go(Sharing(), rounds=5)
    plain, _ = go(FedAvg(), rounds=5)
    assert {e.round for e in ledger.entries if e.event.channel in CHANNELS} == {3}
    for number, (got, want) in enumerate(zip(outcome.rounds, plain.rounds, strict=True), 1):
        assert (got.train_loss == want.train_loss) == (number <= 2)
        assert (got.bytes_up == want.bytes_up) == (number != 3)
        assert (got.bytes_down == want.bytes_down) == (number != 3)


def test_what_leaves_in_the_clear_is_in_the_ledger_and_nowhere_released():
    outcome, ledger = go(Sharing())
    told = [(e.client, e.event.channel) for e in ledger.entries if e.event.channel in CHANNELS]
    assert sorted(told) == [(k, channel) for k in range(3) for channel in sorted(CHANNELS)]
    assert all(e.event.mechanism == "none" for e in ledger.entries)
    assert outcome.released == {}


def test_without_examples_it_is_its_inner_method_in_every_byte():
    got, ledger = go(Sharing(per_class=0, inner=Moon()))
    want, plain = go(Moon())
    assert same(got.model, want.model)
    assert [r.bytes_up for r in got.rounds] == [r.bytes_up for r in want.rounds]
    assert [r.bytes_down for r in got.rounds] == [r.bytes_down for r in want.rounds]
    assert [r.numbers for r in got.rounds] == [r.numbers for r in want.rounds]
    assert [r.bytes_client for r in got.rounds] == [r.bytes_client for r in want.rounds]
    assert [r.bytes_server for r in got.rounds] == [r.bytes_server for r in want.rounds]
    assert ledger.entries == plain.entries


def test_what_is_logged_follows_from_the_counts_in_the_clear():
    """Bytes that a client and the server keep, and examples drawn, by the counts alone."""
    outcome, _ = go(Sharing(preliminary_rounds=1), rounds=3)
    record, example = outcome.rounds[1], 16 * 4 + 8
    plain = go(FedAvg(), rounds=3)[0].rounds[1]
    assert record.numbers["shared_drawn"] == 8 + 13 + 10
    assert "shared_drawn" not in outcome.rounds[2].numbers
    assert record.bytes_client - plain.bytes_client == 13 * example
    everything = sum(len(s) for s in three_shards()) * example + 3 * 3 * 8
    assert record.bytes_server - plain.bytes_server == everything
    assert record.bytes_up - plain.bytes_up == everything + 3 * 8


def test_an_example_of_others_weighs_as_set():
    """With next to no weight they change nothing."""
    method, net = Sharing(weight=1e-12), small_net()
    model = {k: v.clone() for k, v in net.state_dict().items() if not k.startswith("decoder")}
    shard, foreign = three_shards()[0], blobs(20, [2], 5)
    seen = []

    def loss(net, batch):
        seen.append((batch.y, batch.weight))
        return net(batch.x).sum()

    ask = Message(
        "train", {"new": {"x": foreign.x, "y": foreign.y}}, inner=Message("train", {"model": model})
    )
    method.client(ask, client(shard, net, loss=loss))
    for y, weight in seen:
        assert (weight == torch.where(y == 2, 1e-12, 1.0)).all()
    assert sum(int((y == 2).sum()) for y, _ in seen) == 2 * 8


def test_real_examples_are_not_shown_as_synthetic_ones(tmp_path):
    settings = config.parse({"method": "sharing", "rounds": 3, "data": {"fraction": 0.1}})
    result = runs.run(settings, tmp_path / "run")
    assert sum(r.numbers.get("shared_drawn", 0) for r in result.rounds) > 0
    assert {p.suffix for p in (tmp_path / "run").iterdir()} == {
        ".toml",
        ".jsonl",
        ".html",
        ".safetensors",
    }
    assert not (tmp_path / "run" / "images.safetensors").exists()
    assert not (tmp_path / "run" / "released.safetensors").exists()
    (loaded,) = find([tmp_path / "run"])
    assert not loaded.images
    assert "real examples" in (tmp_path / "run" / "report.html").read_text()


PRIVATE = {"weights": "noisy", "training": {"kind": "dpsgd"}}


def test_private_training_is_refused_before_anything_is_written(tmp_path):
    values = {"method": "sharing", "rounds": 3, "privacy": PRIVATE, "net": {"norm": "group"}}
    with pytest.raises(ConfigError, match=r"^sharing cannot train privately: ") as told:
        runs.run(config.parse(values), tmp_path / "new")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "new").exists()


def test_a_client_with_a_budget_sends_no_example():
    me = client(three_shards()[0], small_net(), privacy=replace(LOOSE, max_epsilon=1.0))
    with pytest.raises(PrivacyError, match="real examples, class counts would leave in the clear"):
        Sharing().client(Message("share"), me)


def test_a_client_that_holds_one_class_alone_shares_it():
    lone = Shard(blobs(7, [1], 3).x, torch.ones(7, dtype=torch.int64))
    reply, _ = Sharing(per_class=5).client(Message("share"), client(lone, small_net()))
    tree = reply.trees["shared"]
    assert tree["counts"].tolist() == [0, 7, 0]
    assert tree["y"].tolist() == [1] * 5
    assert {e.channel for e in reply.events} == CHANNELS
