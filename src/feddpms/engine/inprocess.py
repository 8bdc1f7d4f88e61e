"""Clients on this machine: in turn, in worker processes, or several at once on one device."""

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddpms.algorithms import Client, Method, Training
from feddpms.algorithms.fit import load
from feddpms.clock import Spent, clock
from feddpms.engine.batched import run_together
from feddpms.engine.device import moved
from feddpms.engine.evaluate import PART, Score, Tally, tally, total
from feddpms.engine.grid import stored, tensors
from feddpms.engine.shelf import Shelf
from feddpms.engine.workers import Job, Workers
from feddpms.privacy import Account, Kept, Privacy
from feddpms.rng import Rng
from feddpms.types import Memory, Message, Shard, Task, Tree


@dataclass(frozen=True)
class Crew:
    """What clients and scoring need; the same for all rounds.

    Attributes:
        method: the method that the clients run.
        shards: each client's own examples, by client.
        test: common test set.
        net: a network to work with; whoever uses it overwrites its weights.
        task: what everybody knows.
        local: how clients train.
        privacy: target of their releases.
        rng: where the clients' random streams are.
        folder: where clients keep their accounts if their noise is secure, since a second draw
            would be a second release; None, and with seeded noise, for memory.
    """

    method: Method
    shards: Mapping[int, Shard]
    test: Shard
    net: Any
    task: Task
    local: Training
    privacy: Privacy
    rng: Rng
    folder: Path | None = None


@dataclass
class InProcess:
    """A grid whose clients live on this machine.

    Attributes:
        crew: what they need.
        workers: processes to use; None for this one alone.
        memories: what the clients keep.
        spent: seconds of the clients' work by part, all processes together.
        device: where examples and network are, and training runs.
        at_once: clients that train together; more than one goes without workers.
        dropout: chance of a client to fall silent for a round.
        accounts: the clients' accounts that are kept in memory.
    """

    crew: Crew
    workers: Workers | None = None
    memories: Shelf = field(default_factory=Shelf)
    device: str = "cpu"
    at_once: int = 1
    dropout: float = 0.0
    spent: Spent = field(default_factory=Spent)
    accounts: dict[int, Account] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device != "cpu":
            self.crew = placed(self.crew, self.device)
        if self.workers:
            self.workers.share(settled, *bundled(self.crew))

    def ask_all(self, asks: Mapping[int, Message], round: int) -> dict[int, Message]:
        """Let each client answer that does not fall silent."""
        order = sorted(c for c in asks if not self._silent(c, round))
        if self.workers or self.at_once > 1:  # the longest first, and those of like size together
            order.sort(key=lambda c: -len(self.crew.shards[c]))
        if self.at_once > 1:
            groups = range(0, len(order), self.at_once)
            order = [c for i in groups for c in sorted(order[i : i + self.at_once])]
        jobs: list[Job] = [
            (answer, (c, asks[c], round, self.memories.get(c, Memory()), self.accounts.get(c)))
            for c in order
        ]
        if self.at_once == 1:
            done = self._do(jobs, (t for ask in asks.values() for t in tensors(ask)))
        else:
            done = self._do_together(jobs)
        answers = dict(zip(order, done, strict=True))
        for client in sorted(answers):
            _, memory, account, spent = answers[client]
            self.memories.put(client, memory, round)
            self.spent.update(spent)
            if account:
                self.accounts[client] = account
        return {client: answers[client][0] for client in sorted(answers)}

    def _silent(self, client: int, round: int) -> bool:
        """Whether a client falls silent: the same for all that it is asked in a round."""
        return self.crew.rng.numpy("dropout", client, round).random() < self.dropout

    def score(self, trees: list[Tree]) -> list[Score]:
        """Score models on the test set."""
        test, classes = self.crew.test, self.crew.task.classes
        share = -(-len(test) // (self.workers.count if self.workers else 1))
        step = -(-share // PART) * PART  # whole parts
        places = [
            (i, range(start, min(start + step, len(test))))
            for i in range(len(trees))
            for start in range(0, len(test), step)
        ]
        jobs: list[Job] = [(scored, (trees[i], part.start, part.stop)) for i, part in places]
        done = self._do(jobs, (t for i, _ in places for t in trees[i].values()))
        parts: list[list[Tally]] = [[] for _ in trees]
        for (i, _), tallies in zip(places, done, strict=True):
            parts[i] += tallies
        return [total(p, test, classes) for p in parts]

    def most_kept(self, clients: Iterable[int]) -> int:
        """Bytes that one of these clients keeps, the most of any; 0 for none."""
        return max((stored(self.memories.get(c, Memory())) for c in clients), default=0)

    def kept(self) -> dict[int, Kept]:
        """The accounts that are kept in memory, to be written down."""
        return {client: account.kept() for client, account in sorted(self.accounts.items())}

    def restore(self, accounts: Mapping[int, Kept]) -> None:
        """Take up the accounts that were kept in memory."""
        privacy = self.crew.privacy
        self.accounts = {c: Account.restored(privacy, c, kept) for c, kept in accounts.items()}

    def _do(self, jobs: list[Job], given: Iterable[Tensor]) -> list[Any]:
        """Results of jobs, in order, given tensors that several of them may have."""
        if self.workers and len(jobs) > 1:
            return self.workers.run(jobs, given)
        with one_thread():
            return [function(self.crew, *arguments) for function, arguments in jobs]

    def _do_together(self, jobs: list[Job]) -> list[Any]:
        """Results of clients' jobs, in order; each client has a network of its own."""
        results = []
        with one_thread():
            for start in range(0, len(jobs), self.at_once):
                group = [
                    partial(function, replace(self.crew, net=copy.deepcopy(self.crew.net)), *given)
                    for function, given in jobs[start : start + self.at_once]
                ]
                results += run_together(group)
        return results


def placed(crew: Crew, device: str) -> Crew:
    """A crew with all examples, and a network of its own, on a device."""
    shards = {c: moved(s, device) for c, s in crew.shards.items()}
    net = copy.deepcopy(crew.net).to(device)
    return replace(crew, shards=shards, test=moved(crew.test, device), net=net)


def bundled(crew: Crew) -> tuple[Any, ...]:
    """A crew as a few large tensors, and the rest as bytes, since every tensor takes a handle."""
    shards = [crew.shards[c] for c in sorted(crew.shards)]
    sizes = {c: len(crew.shards[c]) for c in sorted(crew.shards)}
    nothing = Shard(crew.test.x[:0].clone(), crew.test.y[:0].clone())
    rest = pickle.dumps(replace(crew, shards={}, test=nothing))
    x, y = torch.cat([s.x for s in shards]), torch.cat([s.y for s in shards])
    return x, y, sizes, crew.test.x, crew.test.y, rest


def settled(
    x: Tensor, y: Tensor, sizes: dict[int, int], test_x: Tensor, test_y: Tensor, rest: bytes
) -> Crew:
    """A crew again, from what `bundled` gave."""
    parts = list(sizes.values())
    shards = map(Shard, x.split(parts), y.split(parts))
    test = Shard(test_x, test_y)
    return replace(pickle.loads(rest), shards=dict(zip(sizes, shards, strict=True)), test=test)


def answer(
    crew: Crew,
    client: int,
    ask: Message,
    round: int,
    memory: Memory,
    account: Account | None,
    together: Callable[..., Any] | None = None,
) -> tuple[Message, Memory, Account | None, Spent]:
    """One client's reply, its new memory, its account if that is kept in memory, and seconds."""
    secure = crew.folder if crew.privacy.noise == "secure" else None
    device = crew.shards[client].x.device
    own = account or Account(crew.privacy, client, secure / str(client) if secure else None)
    with closing(own), clock.part("synthesis" if ask.kind == "share" else "train"):
        me = Client(
            id=client,
            shard=crew.shards[client],
            net=crew.net,
            task=crew.task,
            local=crew.local,
            lr=crew.local.lr_at(round),
            privacy=crew.privacy,
            rng=crew.rng.at("client", client, round),
            account=own,
            round=round,
            memory=moved(memory, device),
            together=together,
        )
        reply, memory = crew.method.client(moved(ask, device), me)
    return moved(reply, "cpu"), moved(memory, "cpu"), None if secure else own, clock.taken()


def scored(crew: Crew, tree: Tree, start: int, stop: int) -> list[Tally]:
    """What a model gets right in a stretch of the test set."""
    part = Shard(crew.test.x[start:stop], crew.test.y[start:stop])
    return tally(load(crew.net, tree), part, crew.task.classes)


@contextmanager
def one_thread():
    """One thread for torch, since the number of threads changes the last bits of a sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
