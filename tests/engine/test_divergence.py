"""Runs that diverge: named, ended, and never averaged."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError

from contract.test_contract import CASES, LOCAL, same
from feddpms import FedAvg, FedProx, config, records, runs
from feddpms.algorithms import About, Training
from feddpms.data import Data, Partition
from feddpms.engine import Crew, Engine, Workers, evaluate, simulate
from feddpms.engine.finite import not_finite
from feddpms.errors import ConfigError
from feddpms.folder import CHECKPOINT
from feddpms.models import NetSettings
from feddpms.privacy import Ledger
from feddpms.report.compare import compare as group
from feddpms.report.compare import text_table
from feddpms.report.load import find, load
from feddpms.rng import Rng
from feddpms.types import Event, Message
from small import CLASSES, LOOSE, TASK, small_net, three_shards, unseen

NAN, INF = math.nan, math.inf
WILD = Training(epochs=1, batch_size=8, optimizer="sgd", lr=1e30)


@dataclass
class Spoilt:
    """FedAvg, with one thing that goes wrong in the second round."""

    wrong: str = ""
    clients: tuple[int, ...] = (1,)
    value: float = NAN
    about: ClassVar[About] = About("aggregation", "nobody")

    def __post_init__(self):
        self.averaged = []

    def start(self, model, task):
        return FedAvg().start(model, task)

    def ask(self, state, client, round):
        return FedAvg().ask(state, client, round)

    def client(self, ask, me):
        reply, memory = FedAvg().client(ask, me)
        if me.round == 2 and me.id in self.clients:
            reply = self._spoilt(reply)
        return reply, memory

    def _spoilt(self, reply):
        if self.wrong == "train_loss":
            return replace(reply, numbers={**reply.numbers, "train_loss": self.value})
        if self.wrong == "inner":
            bad = {"control": {"w": torch.tensor([0.0, self.value])}}
            return replace(reply, inner=Message("train", bad, {}, (Event("control", "none"),)))
        if self.wrong != "model":
            return reply
        model = {k: v.clone() for k, v in reply.trees["model"].items()}
        model["classifier.head.bias"][-1] = self.value
        return replace(reply, trees={"model": model})

    def server(self, state, replies):
        self.averaged.append(dict(replies))
        after = FedAvg().server(state, replies)
        factor = {"overflow": 1e39, "huge": 3e37}.get(self.wrong)
        if factor and len(self.averaged) == 2:
            bias = "classifier.head.weight"
            after = replace(after, model={**after.model, bias: after.model[bias].sign() * factor})
        return after


def go(method, local=LOCAL, rounds=4, workers=None, **engine):
    ledger, kept = Ledger(), []
    task = replace(TASK, rounds=rounds)
    shards = dict(enumerate(three_shards()))
    crew = Crew(method, shards, unseen(), small_net(), task, local, LOOSE, Rng(0))
    note = lambda record, progress: kept.append(progress)  # noqa: E731
    return simulate(crew, Engine(**engine), ledger, note, workers), ledger, kept


REPLIES = {
    "a NaN in a model": (Spoilt("model"), "model of client 1 not finite"),
    "an infinity": (Spoilt("model", (0, 2), INF), "model of clients 0, 2 not finite"),
    "below": (Spoilt("model", (2,), -INF), "model of client 2 not finite"),
    "a loss": (Spoilt("train_loss", (0, 1)), "train_loss of clients 0, 1 not finite"),
    "an inner message": (Spoilt("inner", (2,), INF), "control of client 2 not finite"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_who_sent_what_is_not_finite_is_named_and_nothing_is_averaged(name):
    method, reason = REPLIES[name]
    method.averaged.clear()
    outcome, ledger, kept = go(method)
    sound, _, _ = go(FedAvg(), rounds=1)
    assert [r.diverged for r in outcome.rounds] == ["", reason]
    assert len(method.averaged) == 1
    assert same(outcome.model, sound.model)
    assert [p.diverged for p in kept] == ["", reason]
    last = outcome.rounds[-1]
    assert (last.test_accuracy, last.test_loss) == (
        sound.rounds[0].test_accuracy,
        sound.rounds[0].test_loss,
    )
    assert last.numbers["clients"] == 3
    told = [e.client for e in ledger.entries if e.event.channel == "control"]
    assert told == ([2] if method.wrong == "inner" else [])  # it was sent, so it is written down


def test_a_global_model_that_is_not_finite_is_not_kept():
    outcome, _, _ = go(Spoilt("overflow"))
    assert [r.diverged for r in outcome.rounds] == ["", "global model not finite"]
    assert same(outcome.model, go(FedAvg(), rounds=1)[0].model)


def test_a_loss_that_is_not_finite_leaves_no_accuracy():
    outcome, _, _ = go(Spoilt("huge"))
    last = outcome.rounds[-1]
    assert (last.round, last.diverged) == (2, "test loss not finite")
    assert not math.isfinite(last.test_loss)
    assert math.isnan(last.test_accuracy)
    assert all(map(math.isnan, last.per_class_accuracy))
    assert all(v.isfinite().all() for v in outcome.model.values())


def test_a_loss_above_the_bound_ends_the_run():
    sound = go(FedAvg())[0].rounds
    first = sound[0].test_loss
    assert sound[-1].test_loss < first - 0.01
    outcome, _, _ = go(FedAvg(), max_loss=first - 0.001)
    (record,) = outcome.rounds
    assert record.diverged == f"test loss {first:.3g} above engine.max_loss={first - 0.001:g}"
    assert (record.test_loss, record.test_accuracy) == (first, sound[0].test_accuracy)
    assert len(go(FedAvg(), max_loss=first + 0.001)[0].rounds) == 4


def test_a_sound_run_says_nothing():
    outcome, _, kept = go(FedAvg())
    assert {r.diverged for r in outcome.rounds} == {""}
    assert {p.diverged for p in kept} == {""}


@pytest.mark.parametrize("name", CASES)
def test_every_method_with_an_absurd_rate_is_marked_and_ends(name):
    outcome, _, _ = go(CASES[name], WILD)
    *before, record = outcome.rounds
    assert all(r.phase == "knowledge" for r in before)  # at a rate of its own
    assert record.diverged.endswith("not finite")
    if CASES[name].about.scope == "federated":
        assert "of clients 0, 1, 2" in record.diverged
    assert all(v.isfinite().all() for v in outcome.model.values())


def test_workers_name_the_same():
    workers = Workers(2)
    outcome, _, _ = go(Spoilt("model", (0, 2)), workers=workers)
    workers.close()
    assert outcome.rounds[-1].diverged == "model of clients 0, 2 not finite"


def test_a_crowd_is_not_named_one_by_one():
    bad = Message("train", {"model": {"w": torch.tensor([NAN])}}, {"train_loss": INF})
    good = Message("train", {"model": {"w": torch.tensor([1.0]), "n": torch.tensor(3)}})
    crowd = dict.fromkeys(range(20, 0, -1), bad) | {99: good}
    said = "model, train_loss of clients 1, 2, 3, 4, 5, 6, 7, 8 and 12 more not finite"
    assert not_finite(crowd) == said
    assert not_finite({99: good}) == ""
    assert not_finite({}) == ""


def test_the_score_of_a_network_that_says_nothing():
    net = small_net()
    with torch.no_grad():
        net.classifier.head.bias.fill_(NAN)
    score = evaluate(net, unseen(), CLASSES)
    assert not math.isfinite(score.loss)
    assert math.isnan(score.accuracy)
    assert all(map(math.isnan, score.per_class))


@pytest.mark.parametrize("value", [0, -1, NAN, INF])
def test_the_bound_is_a_number_above_zero(value):
    with pytest.raises(ValidationError):
        Engine(max_loss=value)


# Folders, tables, comparisons


SMALL = config.Run(
    method=FedAvg(),
    rounds=3,
    data=Data(fraction=0.08),
    partition=Partition(clients=3, beta=5.0),
    net=NetSettings(width=0.25),
    local=Training(epochs=1, batch_size=8, optimizer="sgd", lr=0.01),
)
BROKEN = replace(SMALL, method=FedProx(mu=1e30))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "all"
    methods = [{"name": "fedprox", "mu": 1e30}, {"name": "fedavg"}]
    return folder, runs.compare(SMALL, methods, [0, 1], folder)


def test_in_a_comparison_the_other_cells_go_on(compared):
    folder, results = compared
    assert [len(r.rounds) for r in results] == [1, 3, 1, 3]
    for result in results[::2]:
        assert math.isnan(result.accuracy)
        assert result.diverged.endswith("not finite in round 1")
    for result in results[1::2]:
        assert 0 < result.accuracy < 1
        assert result.diverged == ""
    assert runs.resume(folder) == []


def test_tables_and_page_say_diverged_and_in_which_round(compared):
    folder, _ = compared
    (together,) = group(find([folder]))
    text = text_table([together])
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["fedprox", "0"]]
    assert line.split()[2:] == ["of", "2", "diverged", "(round", "1)", *["-"] * 4]
    rows = {row.method: row for row in together.rows}
    assert rows["fedprox"].accuracy is None
    assert len(rows["fedprox"].left_out) == 2
    assert "fedprox, seed 1: diverged (model" in text
    page = (folder / "report.html").read_text()
    assert "diverged (round 1)" in page
    assert "not finite in round 1)" in page


def test_a_diverged_run_keeps_its_record_and_its_privacy_claim(compared):
    folder, results = compared
    own = load(folder / "fedprox-seed0")
    assert own.status.startswith("diverged (model")
    assert own.short_status == "diverged (round 1)"
    assert own.claim == results[0].claim
    assert not (own.path / CHECKPOINT).exists()
    assert (own.path / "model.safetensors").exists()


class Stopped(BaseException):
    """A run stopped from outside."""


def stop(record):
    raise Stopped


def test_a_diverged_run_that_was_stopped_does_not_train_on(compared, tmp_path):
    with pytest.raises(Stopped):
        runs.run(BROKEN, tmp_path / "run", stop)
    assert (tmp_path / "run" / CHECKPOINT).exists()
    (result,) = runs.resume(tmp_path / "run")
    assert len(result.rounds) == 1
    assert result.diverged
    whole = compared[0] / "fedprox-seed0"
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()
    kept = load(tmp_path / "run").rounds
    assert [r.diverged for r in kept] == [r.diverged for r in load(whole).rounds]


def test_records_without_the_field_still_load(compared, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("run.toml", "ledger.jsonl"):
        (old / name).write_bytes((compared[0] / "fedavg-seed0" / name).read_bytes())
    text = (compared[0] / "fedavg-seed0" / "records.jsonl").read_text()
    assert ', "diverged": ""' in text
    (old / "records.jsonl").write_text(text.replace(', "diverged": ""', ""))
    assert load(old).status == "finished"
    assert load(old).rounds == load(compared[0] / "fedavg-seed0").rounds


def test_the_reason_survives_the_log(compared):
    (record,) = [
        r
        for r in records.read(compared[0] / "fedprox-seed0" / "records.jsonl")
        if isinstance(r, records.RoundRecord)
    ]
    assert record.diverged.startswith("model")


def test_a_bound_below_every_loss_is_the_users_choice(tmp_path):
    result = runs.run(replace(SMALL, engine=Engine(max_loss=1e-9)), tmp_path / "run")
    assert "above engine.max_loss=1e-09 in round 1" in result.diverged
    with pytest.raises(ConfigError, match=r"engine\.max_loss"):
        config.parse({"engine": {"max_loss": "none"}})
