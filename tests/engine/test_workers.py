"""Worker processes: the same bits as in turn, whatever happens in them."""

import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from contract.test_contract import CASES, LOCAL, same
from feddpms.algorithms import About, FedAvg
from feddpms.engine import Engine, InProcess, Workers, evaluate, simulate
from feddpms.engine.inprocess import Crew, bundled, settled
from feddpms.engine.workers import packed, unpacked
from feddpms.errors import PrivacyError
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard
from small import LOOSE, TASK, small_net, three_shards, unseen


@pytest.fixture(scope="module")
def workers():
    two = Workers(2)
    yield two
    two.close()


def go(method, workers=None, privacy=LOOSE, folder=None, rounds=4):
    ledger = Ledger()
    task = replace(TASK, rounds=rounds)
    shards = dict(enumerate(three_shards()))
    crew = Crew(method, shards, unseen(), small_net(), task, LOCAL, privacy, Rng(0), folder)
    return simulate(crew, Engine(), ledger, workers=workers), ledger


@pytest.mark.parametrize("name", CASES)
def test_workers_change_no_bit(name, workers):
    alone, ledger = go(CASES[name])
    together, other = go(CASES[name], workers)
    assert same(together.model, alone.model)
    assert same(dict(together.memories), dict(alone.memories))
    assert other.entries == ledger.entries
    for a, b in zip(alone.rounds, together.rounds, strict=True):
        assert (a.test_loss, a.per_class_accuracy) == (b.test_loss, b.per_class_accuracy)


def test_a_test_set_in_parts_scores_as_a_whole(workers):
    g = torch.Generator().manual_seed(0)
    test = Shard(torch.rand(1700, 1, 4, 4, generator=g), torch.randint(0, 3, (1700,), generator=g))
    shards = dict(enumerate(three_shards()))
    crew = Crew(FedAvg(), shards, test, small_net(), TASK, LOCAL, LOOSE, Rng(0))
    models = [small_net(seed=s).state_dict() for s in (1, 2, 3)]
    want = [evaluate(small_net(seed=s), test, 3) for s in (1, 2, 3)]
    assert InProcess(crew).score(models) == want
    assert InProcess(crew, workers).score(models) == want


def test_a_crew_survives_the_border():
    shards = dict(enumerate(three_shards()))
    crew = Crew(FedAvg(), shards, unseen(), small_net(), TASK, LOCAL, LOOSE, Rng(0))
    again = settled(*bundled(crew))
    assert list(again.shards) == [0, 1, 2]
    for c, shard in shards.items():
        assert torch.equal(again.shards[c].x, shard.x)
        assert torch.equal(again.shards[c].y, shard.y)
    assert torch.equal(again.test.x, crew.test.x)
    assert again.net is not crew.net
    assert len(bundled(crew)[-1]) < 500_000  # no image in it


def test_workers_share_images_and_no_weights(workers):
    """Each has its own network: else they would write over one another's."""
    shards = dict(enumerate(three_shards()))
    crew = Crew(FedAvg(), shards, unseen(), small_net(), TASK, LOCAL, LOOSE, Rng(0))
    InProcess(crew, workers)
    where = workers.run([(_pointers, (0.3,)), (_pointers, (0.3,))])
    assert where[0][0] != where[1][0]
    assert all(shared for _, shared, _ in where)
    assert not any(weights for _, _, weights in where)


def _pointers(crew, seconds):
    time.sleep(seconds)  # so that the other worker takes the other job
    weights = next(iter(crew.net.parameters()))
    return os.getpid(), crew.shards[0].x.is_shared(), weights.is_shared()


@dataclass(frozen=True)
class Fails:
    """A method whose clients fail."""

    about: ClassVar[About] = About("aggregation", "nobody")
    kind: str = "ours"

    def start(self, model, task):
        return FedAvg().start(model, task)

    def ask(self, state, client, round):
        return FedAvg().ask(state, client, round)

    def client(self, ask, me):
        if self.kind == "killed" and me.id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "refused":
            raise PrivacyError("no more budget")
        raise ValueError("the client's own mistake")

    def server(self, state, replies):
        return state


def test_a_refusal_in_a_worker_is_the_same_refusal(workers):
    with pytest.raises(PrivacyError, match="no more budget"):
        go(Fails("refused"), workers)
    assert same(go(FedAvg(), workers)[0].model, go(FedAvg())[0].model)  # and the workers go on


def test_a_mistake_in_a_worker_is_told_with_its_place(workers):
    with pytest.raises(RuntimeError, match="the client's own mistake"):
        go(Fails(), workers)


def _noted(crew, path, number):
    if not number:
        raise PrivacyError("no more budget")
    time.sleep(0.2)
    (path / str(number)).touch()


def test_after_a_failure_no_further_job_is_begun(workers, tmp_path):
    with pytest.raises(PrivacyError, match="no more budget"):
        workers.run([(_noted, (tmp_path, number)) for number in range(12)])
    assert len(list(tmp_path.iterdir())) <= 4  # what the workers held already


def test_a_killed_worker_is_told():
    two = Workers(2)
    with pytest.raises(RuntimeError, match="a worker process was killed"):
        go(Fails("killed"), two)
    two.close()


SLEEPERS = """
import sys
from feddpms.engine.workers import Workers
from workers_jobs import sleep
if __name__ == "__main__":
    two = Workers(2)
    print(*[link.process.pid for link in two._links], flush=True)
    two.run([(sleep, ())] * 4)
"""


def test_workers_end_at_once_when_their_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(SLEEPERS)
    (tmp_path / "workers_jobs.py").write_text("import time\ndef sleep(crew): time.sleep(60)\n")
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        time.sleep(1)
        parent.kill()
    until = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_accounts_on_disk_are_the_clients_own_in_workers_too(workers, tmp_path):
    pytest.importorskip("opendp")
    secure = replace(LOOSE, noise="secure")
    method = CASES["feddpms"]
    _, ledger = go(method, workers, secure, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]
    noisy = {e.event.digest for e in ledger.entries if e.event.mechanism == "gaussian"}
    assert len(noisy) == 6
    assert not any(e.event.simulated for e in ledger.entries if e.event.digest)


def test_memory_accounts_come_back(workers):
    shards = dict(enumerate(three_shards()))
    crew = Crew(FedAvg(), shards, unseen(), small_net(), TASK, LOCAL, Privacy(), Rng(0))
    grid = InProcess(crew, workers)
    state = FedAvg().start(small_net().state_dict(), TASK)
    for round in (1, 2):
        grid.ask_all({c: FedAvg().ask(state, c, round) for c in range(3)}, round)
    assert [len(a.ledger.entries) for _, a in sorted(grid.accounts.items())] == [4, 4, 4]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4),
        torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(10)[3:7],
        torch.randn(6, 4).T,
        torch.ones(1).expand(3),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(3).bfloat16(),
        torch.tensor([-0.0, float("nan"), float("inf")]),
        torch.randn(2, requires_grad=True),
    ],
)
def test_a_message_carries_a_tensor_bit_for_bit(value):
    (again,) = unpacked(packed([value]))
    assert again.dtype == value.dtype
    assert again.shape == value.shape
    assert again.stride() == value.stride()
    assert again.requires_grad == value.requires_grad
    assert torch.equal(again.isnan(), value.isnan())
    assert torch.equal(again.nan_to_num(), value.nan_to_num())


def test_what_arrives_can_be_changed_without_changing_what_was_sent():
    value = torch.zeros(3)
    again = unpacked(packed(value))
    again += 1
    assert value.sum() == 0


def _place(crew, seconds, tensors):
    time.sleep(seconds)  # so that each worker takes two jobs
    return os.getpid(), [t.data_ptr() for t in tensors], [t.tolist() for t in tensors]


def test_what_jobs_have_in_common_reaches_a_worker_once(workers):
    """Told by where it lies in the worker's memory; what one job alone has lies elsewhere."""
    common, own = torch.tensor([1.0, 2.0]), [torch.tensor([float(i)]) for i in range(4)]
    jobs = [(_place, (0.2, [common, own[i]])) for i in range(4)]
    found = workers.run(jobs, [t for _, (_, given) in jobs for t in given])
    assert [values for _, _, values in found] == [[[1.0, 2.0], [float(i)]] for i in range(4)]
    pids = [pid for pid, _, _ in found]
    assert sorted(map(pids.count, pids)) == [2, 2, 2, 2]
    for pid in pids:
        first, second = (places for other, places, _ in found if other == pid)
        assert first[0] == second[0]
    assert workers.run(jobs)[3][2] == [[1.0, 2.0], [3.0]]  # and told nothing, it is the same


def test_what_was_common_does_not_outlive_its_jobs(workers):
    for value in (1.0, 2.0):
        common = torch.tensor([value])
        found = workers.run([(_place, (0.0, [common]))] * 3, [common] * 3)
        assert [values for _, _, values in found] == [[[value]]] * 3


FAULTS = """
import resource, sys, torch
from feddpms.engine.heap import keep_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for n in range(1_000_000, 4_000_000, 100_000):  # glibc learns from sizes that it has seen
    torch.ones(n)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver()[0], reason="only glibc is told")
def test_memory_is_taken_from_the_system_once():
    """Page faults of tensors of 1,000 to 4,000 pages, each made and dropped before the next."""

    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert faults("keep") < 20_000
    assert faults("leave") > 60_000
