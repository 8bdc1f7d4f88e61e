import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from contract.test_contract import go as a_run
from contract.test_contract import settled
from feddpms.algorithms import About, Central, FedAvg, Local, Scaffold, Training
from feddpms.algorithms.fit import load
from feddpms.algorithms.trees import trained
from feddpms.engine import Crew, Engine, InProcess, Score, evaluate, simulate
from feddpms.engine.evaluate import average
from feddpms.engine.grid import size, stored, unfold
from feddpms.errors import PrivacyError
from feddpms.models import trunk
from feddpms.privacy import Ledger
from feddpms.rng import Rng
from feddpms.types import Event, Memory, Message, Shard, Task
from small import CLASSES, LOOSE, TASK, small_net, three_shards, unseen

LOCAL = Training(epochs=1, batch_size=8, lr=0.01, lr_decay=0.5, lr_period=2)


class Says(nn.Module):
    """The logits are the picture."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x.flatten(1)) if self.training else x.flatten(1)


def scored() -> Shard:
    """Six examples of classes 0, 1, 3 of four; right are 1 of 2, 2 of 3, and 1 of 1."""
    said, y = [0, 3, 1, 1, 0, 3], [0, 0, 1, 1, 1, 3]
    x = torch.zeros(6, 1, 2, 2)
    for i, c in enumerate(said):
        x[i, 0, c // 2, c % 2] = 2.0
    return Shard(x, torch.tensor(y))


@pytest.mark.parametrize("batch", [1, 2, 4, 6, 500])
def test_a_score_counts_every_example_once(batch):
    score = evaluate(Says(), scored(), 4, batch)
    assert score.accuracy == 4 / 6
    assert score.per_class[:2] == (1 / 2, 2 / 3)
    assert math.isnan(score.per_class[2])
    assert score.per_class[3] == 1
    total = math.log(math.exp(2) + 3)
    assert score.loss == pytest.approx(total - 4 / 6 * 2, rel=1e-6)


def test_scoring_is_in_eval_mode_and_changes_no_weight_or_buffer():
    net = small_net().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    one = evaluate(net, unseen(), CLASSES, 7)
    other = evaluate(net, unseen(), CLASSES)
    assert one.accuracy == other.accuracy
    assert one.loss == pytest.approx(other.loss)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_scores_are_averaged_part_by_part():
    got = average([Score(0.2, 1.0, (0.0, 0.4)), Score(0.4, 3.0, (1.0, 0.4))])
    assert got == Score(pytest.approx(0.3), 2.0, (0.5, 0.4))


def test_the_size_of_a_message_is_its_tensors_numbers_and_inner_message():
    tree = {"a": torch.zeros(3, 5), "b": torch.zeros(2, dtype=torch.int64)}
    assert size(Message("train")) == 0
    assert size(Message("train", {"x": tree, "y": tree}, {"n": 1.0, "m": 2})) == 2 * 76 + 16
    inner = Message("train", {"x": tree}, {"n": 1.0}, inner=Message("train", {"x": tree}))
    assert size(Message("vae", {"x": tree}, inner=inner)) == 76 + 84 + 76


def test_unfolding_lists_the_messages_from_the_outside_in():
    inner = Message("b", inner=Message("c"))
    assert [m.kind for m in unfold(Message("a", inner=inner))] == ["a", "b", "c"]


@dataclass
class Told:
    """What a scripted method saw, in order."""

    asked: list[tuple[str, int, int]] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    served: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


@dataclass(frozen=True)
class Known:
    """A scripted state: the model, and who has shared."""

    model: dict
    shared: frozenset[int] = frozenset()


@dataclass
class Scripted:
    """A method that trains nothing; each client first shares 3 numbers and an event."""

    about: ClassVar[About] = About("aggregation", "nobody")
    shares: bool = True
    again: bool = False
    told: Told = field(default_factory=Told)

    def start(self, model, task):
        return Known(model)

    def ask(self, state, client, round):
        if self.shares and (self.again or client not in state.shared):
            return Message("share", {"hint": {"v": torch.zeros(2)}})
        return Message("train", {"model": {"v": torch.zeros(5)}})

    def client(self, ask, me):
        self.told.asked.append((ask.kind, me.id, len(me.shard)))
        self.told.lr.append(me.lr)
        self.told.threads.append(torch.get_num_threads())
        self.told.draws.append(me.rng.number("batches"))
        seen = Memory({"seen": {"n": me.memory.trees.get("seen", {"n": torch.tensor(0)})["n"] + 1}})
        if ask.kind == "share":
            return Message("share", {"v": {"v": torch.zeros(3)}}, {}, (Event("v", "none"),)), seen
        numbers = {
            "examples": len(me.shard),
            "steps": me.id + 1,
            "train_loss": float(me.id),
            "kept": 2,
        }
        inner = Message(
            "train", {"model": {"v": torch.zeros(7)}}, {"tried": 1}, (Event("m", "none"),)
        )
        return Message("train", {}, numbers, (), inner), seen

    def server(self, state, replies):
        kinds = {r.kind for r in replies.values()}
        assert len(kinds) == 1
        self.told.served.append((kinds.pop(), tuple(sorted(replies))))
        shared = {c for c, r in replies.items() if r.kind == "share"}
        return Known(state.model, state.shared | shared)


def go(method, rounds=3, shards=None, rng=0, ledger=None, on_round=lambda record: None, **engine):
    shards = shards or three_shards()
    task = Task(CLASSES, len(shards), rounds, TASK.latent)
    clients = dict(enumerate(shards))
    crew = Crew(method, clients, unseen(), small_net(), task, LOCAL, LOOSE, Rng(rng))
    ledger = Ledger() if ledger is None else ledger
    return simulate(crew, Engine(**engine), ledger, lambda record, _: on_round(record))


def test_sharing_happens_once_and_before_training():
    method = Scripted()
    go(method)
    kinds = [kind for kind, _ in method.told.served]
    assert kinds == ["share", "train", "train", "train"]
    assert [(k, c) for k, c, _ in method.told.asked[:6]] == [
        *[("share", c) for c in range(3)],
        *[("train", c) for c in range(3)],
    ]


def test_bytes_of_both_exchanges_are_counted_both_ways():
    first, second, _ = go(Scripted()).rounds
    assert (second.bytes_down, second.bytes_up) == (3 * 20, 3 * (28 + 8 + 4 * 8))
    assert first.bytes_down == second.bytes_down + 3 * 8
    assert first.bytes_up == second.bytes_up + 3 * 12


def test_events_of_every_message_of_both_exchanges_reach_the_ledger():
    ledger = Ledger()
    go(Scripted(), ledger=ledger)
    assert [e.channel for e in ledger.events(1)] == ["v", "m"]
    assert ledger.clients() == [0, 1, 2]


def test_a_record_sums_what_clients_report_and_keeps_what_is_theirs_out():
    record = go(Scripted()).rounds[0]
    assert record.phase == "train"
    assert record.numbers == {"clients": 3, "kept": 6, "tried": 3, "steps": 6}
    assert record.train_loss == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)


def test_without_steps_the_training_loss_is_nan():
    assert math.isnan(go(Local(), rounds=1).rounds[0].train_loss)


def test_asking_to_share_twice_in_a_round_is_our_mistake():
    with pytest.raises(AssertionError, match="share twice"):
        go(Scripted(again=True))


def test_only_those_who_have_not_shared_do_so_first():
    """Two clients of three a round: in some round one shares while the other waits."""
    method = Scripted()
    go(method, rounds=12, cohort=0.67)
    shared = [asked for kind, asked in method.told.served if kind == "share"]
    assert sorted(len(asked) for asked in shared) == [1, 2]
    assert sorted(c for asked in shared for c in asked) == [0, 1, 2]
    assert sum(kind == "train" for kind, _ in method.told.served) == 12


@pytest.mark.parametrize(
    ("share", "clients", "expected"),
    [(1.0, 7, 7), (0.3, 10, 3), (0.01, 7, 1), (0.5, 6, 3), (0.99, 3, 3)],
)
def test_the_size_of_a_cohort(share, clients, expected):
    method = Scripted(shares=False)
    go(method, rounds=2, shards=[unseen()] * clients, cohort=share)
    for _, asked in method.told.served:
        assert len(set(asked)) == expected
        assert set(asked) <= set(range(clients))


def test_cohorts_follow_from_the_seed_and_differ_between_rounds():
    def cohorts(seed):
        method = Scripted(shares=False)
        go(method, rounds=6, shards=[unseen()] * 8, rng=seed, cohort=0.25)
        return [asked for _, asked in method.told.served]

    assert cohorts(0) == cohorts(0)
    assert cohorts(0) != cohorts(1)
    assert len(set(cohorts(0))) > 1


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan])
def test_a_cohort_is_a_share_of_the_clients(share):
    with pytest.raises(ValidationError):
        Engine(cohort=share)


def test_the_learning_rate_follows_the_round():
    method = Scripted(shares=False)
    go(method, rounds=5)
    assert method.told.lr[::3] == [LOCAL.lr_at(t) for t in range(1, 6)]
    assert method.told.lr[::3] == [0.01, 0.01, 0.005, 0.005, 0.0025]
    assert method.told.lr[::3] == method.told.lr[2::3]


def test_every_client_and_round_has_its_own_random_stream():
    method = Scripted(shares=False)
    go(method, rounds=3)
    assert len(set(method.told.draws)) == 9
    assert method.told.draws[4] == Rng(0).at("client", 1, 2).number("batches")


def test_a_client_finds_its_memory_again():
    outcome = go(Scripted(), rounds=3)
    assert {c: int(m.trees["seen"]["n"]) for c, m in outcome.memories.items()} == {0: 4, 1: 4, 2: 4}


def test_the_grid_asks_in_the_order_of_the_clients():
    method = Scripted(shares=False)
    shards = dict(enumerate(three_shards()))
    grid = InProcess(Crew(method, shards, unseen(), small_net(), TASK, LOCAL, LOOSE, Rng(0)))
    replies = grid.ask_all({c: Message("train") for c in (2, 0)}, 1)
    assert list(replies) == [c for _, c, _ in method.told.asked] == [0, 2]


def test_every_round_is_told_as_it_ends():
    seen = []
    outcome = go(Scripted(), on_round=seen.append)
    assert tuple(seen) == outcome.rounds
    assert [r.round for r in seen] == [1, 2, 3]
    assert all(r.seconds >= 0 for r in seen)


def test_central_training_pools_every_example():
    @dataclass
    class Pooled(Scripted):
        about: ClassVar[About] = About("bound", "pooled", scope="pooled")

    method = Pooled(shares=False)
    go(method, rounds=1)
    assert method.told.asked == [("train", 0, sum(map(len, three_shards())))]
    assert go(Central(), rounds=1).rounds[0].numbers["clients"] == 1


def test_local_training_scores_the_mean_of_the_clients_models():
    outcome = go(Local(), rounds=2)
    scores = [
        evaluate(load(small_net(), outcome.memories[c].trees["model"]), unseen(), CLASSES)
        for c in range(3)
    ]
    last = outcome.rounds[-1]
    assert len({s.loss for s in scores}) == 3
    assert last.test_accuracy == pytest.approx(sum(s.accuracy for s in scores) / 3)
    assert last.test_loss == pytest.approx(sum(s.loss for s in scores) / 3)
    assert last.per_class_accuracy == pytest.approx(
        [sum(s.per_class[c] for s in scores) / 3 for c in range(CLASSES)]
    )


def test_a_local_client_that_has_not_trained_counts_with_the_initial_model():
    outcome = go(Local(), rounds=1, cohort=0.3)
    (trained,) = outcome.memories
    own = evaluate(load(small_net(), outcome.memories[trained].trees["model"]), unseen(), CLASSES)
    first = evaluate(small_net(), unseen(), CLASSES)
    assert outcome.rounds[0].test_loss == pytest.approx((own.loss + 2 * first.loss) / 3)


def test_the_score_is_that_of_the_global_model():
    outcome = go(FedAvg(), rounds=2)
    score = evaluate(load(small_net(), outcome.model), unseen(), CLASSES)
    last = outcome.rounds[-1]
    assert (last.test_accuracy, last.test_loss) == (score.accuracy, score.loss)
    assert last.per_class_accuracy == score.per_class


@pytest.mark.parametrize("fails", [False, True])
def test_training_is_on_one_thread_and_the_number_is_restored(fails):
    def stop(record):
        raise PrivacyError("stop")

    threads, method = torch.get_num_threads(), Scripted()
    try:
        torch.set_num_threads(3)
        if fails:
            with pytest.raises(PrivacyError):
                go(method, on_round=stop)
        else:
            go(method)
        assert set(method.told.threads) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_the_networks_weights_are_the_start_and_are_not_shared_with_the_state():
    """A state that aliased the work space would change under the clients' hands."""
    outcome = go(Scripted(shares=False), rounds=1)
    start = small_net().state_dict()
    assert all(torch.equal(v, start[k]) for k, v in outcome.model.items())
    local = go(Local(), rounds=2)
    assert all(torch.equal(v, start[k]) for k, v in local.model.items())


def test_a_record_says_what_client_and_server_keep():
    """SCAFFOLD: a control at each client; model and control at the server; buffers in the model."""
    model = trunk(small_net().state_dict())
    weights = sum(v.nbytes for v in trained(model).values())
    outcome, _ = a_run(settled(Scaffold), cohort=0.7)
    for record in outcome.rounds:
        assert record.bytes_client == weights
        assert record.bytes_server == weights + sum(v.nbytes for v in model.values())
    assert a_run(FedAvg())[0].rounds[-1].bytes_client == 0


def test_what_is_kept_counts_at_any_depth():
    tree = {"w": torch.zeros(3), "n": torch.tensor(1)}
    inner = Memory({"a": tree})
    assert stored(inner) == 20
    made = Shard(torch.zeros(2, 1), torch.zeros(2).long())
    assert stored(Memory({"b": tree}, made, inner)) == 40  # how many were made is not told
    assert stored({0: (tree, [tree]), 1: "name"}) == 40
