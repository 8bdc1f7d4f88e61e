"""The loop of rounds: choose a cohort, ask, serve, evaluate, record."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le

from feddpms.algorithms import Method, Training
from feddpms.engine.evaluate import Score, average
from feddpms.engine.grid import Grid, size, unfold
from feddpms.engine.inprocess import Crew, InProcess, one_thread
from feddpms.engine.workers import Workers
from feddpms.models import trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.records import RoundRecord
from feddpms.rng import Rng
from feddpms.types import Memory, Message, Shard, Task, Tree, settings

PRIVATE = ("examples", "steps", "train_loss")


@settings
class Engine:
    """How the rounds are run."""

    cohort: Annotated[float, Gt(0), Le(1)] = 1.0
    """share of the clients that take part in a round, at least one client"""


@dataclass(frozen=True)
class Outcome:
    """What a simulation ends with.

    Attributes:
        model: the final global model (the initial one for `local`, whose models stay at clients).
        rounds: one record a round.
        memories: what each client keeps.
        released: what each client shared under noise, as anyone on the way saw it; what it shared
            in the clear is not kept.
    """

    model: Tree
    rounds: tuple[RoundRecord, ...]
    memories: Mapping[int, Memory] = field(default_factory=dict)
    released: Mapping[int, Tree] = field(default_factory=dict)


def simulate(
    method: Method,
    shards: list[Shard],
    test: Shard,
    net: Any,
    task: Task,
    local: Training,
    privacy: Privacy,
    engine: Engine,
    rng: Rng,
    ledger: Ledger,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    accounts: Path | None = None,
    workers: Workers | None = None,
) -> Outcome:
    """Run a method over clients that live in this process.

    Args:
        method: what to run.
        shards: each client's examples.
        test: common test set.
        net: a network with the initial weights; used as work space.
        task: what everybody knows.
        local: how clients train.
        privacy: target of their releases.
        engine: how the rounds are run.
        rng: the root of all random streams.
        ledger: where privacy events are written down.
        on_round: called with each round's record.
        accounts: folder for the clients' accounts, used if their noise is secure.
        workers: processes to use; the result is the same without.

    Raises:
        ConfigError: a setting of the method does not fit the run.
    """
    if method.about.scope == "pooled":
        pooled = Shard(torch.cat([s.x for s in shards]), torch.cat([s.y for s in shards]))
        shards, task = [pooled], Task(task.classes, 1, task.rounds, task.latent)
    initial = {k: v.clone() for k, v in net.state_dict().items()}
    state = method.start(_visible(method, initial), task)
    clients = dict(enumerate(shards))
    crew = Crew(method, clients, test, net, task, local, privacy, rng, accounts)
    grid = InProcess(crew, workers)
    records, released = [], {}
    with one_thread():
        for number in range(1, task.rounds + 1):
            began = time.perf_counter()
            cohort = _cohort(engine.cohort, len(shards), rng.numpy("cohort", number))
            state, exchange = _round(method, state, grid, cohort, number, ledger)
            released |= exchange.released
            score = _score(method, state, grid)
            records.append(_record(number, exchange, score, time.perf_counter() - began))
            on_round(records[-1])
    return Outcome(state.model, tuple(records), grid.memories, released)


@dataclass
class _Exchange:
    """What went back and forth in a round."""

    asks: dict[int, Message]
    replies: dict[int, Message]
    down: int
    up: int
    released: dict[int, Tree]


def _round(
    method: Method, state: Any, grid: Grid, cohort: list[int], number: int, ledger: Ledger
) -> tuple[Any, _Exchange]:
    """One round: those asked to share do so first; then everybody trains."""
    down = up = 0
    released: dict[int, Tree] = {}
    for _ in range(2):
        asks = {c: method.ask(state, c, number) for c in cohort}
        sharing = {c: a for c, a in asks.items() if a.kind == "share"}
        replies = grid.ask_all(sharing or asks, number)
        for client, reply in sorted(replies.items()):
            for message in unfold(reply):
                ledger.record(number, client, message.events)
        state = method.server(state, replies)
        down += sum(map(size, (sharing or asks).values()))
        up += sum(map(size, replies.values()))
        if not sharing:
            return state, _Exchange(asks, replies, down, up, released)
        released = {c: _noisy(reply) for c, reply in replies.items() if _noisy(reply)}
    raise AssertionError("a method asked to share twice in one round")


def _noisy(reply: Message) -> Tree:
    """What a reply holds if all of it was paid for."""
    if any(e.mechanism == "none" for e in reply.events):
        return {}
    return {k: v for tree in reply.trees.values() for k, v in tree.items()}


def _visible(method: Method, tree: Tree) -> Tree:
    """The part of the network that a method may train."""
    return tree if method.about.generative else trunk(tree)


def _cohort(share: float, clients: int, rng) -> list[int]:
    """The clients of a round, in order; all of them for a share of 1."""
    n = max(1, round(share * clients))
    return sorted(rng.choice(clients, n, replace=False).tolist())


def _score(method: Method, state: Any, grid: InProcess) -> Score:
    """Score of the global model, or mean score of the clients' own models."""
    if method.about.scope != "local":
        return grid.score([state.model])[0]
    clients, memories = range(grid.crew.task.clients), grid.memories
    own = [memories.get(c, Memory()).trees.get("model", state.model) for c in clients]
    return average(grid.score(own))


def _record(number: int, exchange: _Exchange, score: Score, seconds: float) -> RoundRecord:
    """The record of a round."""
    sums: dict[str, float] = {"clients": len(exchange.replies)}
    steps = loss = 0.0
    for message in (m for r in exchange.replies.values() for m in unfold(r)):
        for name, value in message.numbers.items():
            if name not in PRIVATE:
                sums[name] = sums.get(name, 0) + value
        taken = message.numbers.get("steps", 0)
        if taken:  # private training sends no loss, and the round has none then
            loss += taken * message.numbers.get("train_loss", math.nan)
        steps += taken
    return RoundRecord(
        round=number,
        phase=next(iter(exchange.asks.values())).kind,
        test_accuracy=score.accuracy,
        test_loss=score.loss,
        per_class_accuracy=score.per_class,
        train_loss=loss / steps if steps else float("nan"),
        numbers={**sums, "steps": steps},
        seconds=seconds,
        bytes_up=exchange.up,
        bytes_down=exchange.down,
    )
