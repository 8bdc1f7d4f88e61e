"""The loop of rounds: choose a cohort, ask, serve, evaluate, record."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt

from feddpms.algorithms import Method
from feddpms.algorithms.correction import require_optimizer
from feddpms.clock import clock
from feddpms.engine.checkpoint import known_types
from feddpms.engine.device import repeatable
from feddpms.engine.evaluate import Score, average
from feddpms.engine.finite import all_finite, not_finite
from feddpms.engine.grid import Grid, size, stored, unfold
from feddpms.engine.heap import keep_memory
from feddpms.engine.inprocess import Crew, InProcess, one_thread
from feddpms.engine.shelf import Shelf
from feddpms.engine.workers import Workers
from feddpms.errors import ConfigError
from feddpms.models import trunk
from feddpms.privacy import Kept, Ledger, Privacy
from feddpms.privacy.mechanism import PAPER, TUNED
from feddpms.records import RoundRecord
from feddpms.types import Memory, Message, Shard, Tree, settings

PRIVATE = ("examples", "steps", "train_loss", "path_length")


@settings
class Engine:
    """How the rounds are run."""

    cohort: Annotated[float, Gt(0), Le(1)] = 1.0
    """share of the clients that take part in a round, at least one client"""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """chance of each of them to fall silent for a round: it is asked, and does and sends nothing"""
    max_loss: Annotated[float, Gt(0)] = 1e4
    """mean test loss, in nats, above which a run has diverged and ends"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where images and weights are, and training runs; results differ by rounding"""
    clients_at_once: Annotated[int, Ge(1)] = 1
    """clients that train together on the device, in one process; results differ by rounding"""

    @property
    def one_process(self) -> bool:
        """Whether worker processes cannot help."""
        return self.device != "cpu" or self.clients_at_once > 1


def require_engine(engine: Engine, privacy: Privacy, workers: int = 1) -> None:
    """Refuse settings that this machine, or another setting, does not allow.

    Args:
        engine: how the rounds are to be run.
        privacy: whether training is private.
        workers: processes to use.

    Raises:
        ConfigError: says what to set instead.
    """
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device=cuda needs a GPU that torch finds; set engine.device=cpu")
    if engine.one_process and workers > 1:
        raise ConfigError(
            f"engine.device={engine.device} with engine.clients_at_once={engine.clients_at_once} "
            f"runs in one process, got {workers} workers; set --workers 1"
        )
    if engine.clients_at_once > 1 and privacy.training.kind != "none":
        raise ConfigError(
            f"engine.clients_at_once={engine.clients_at_once} cannot train privately "
            f"(privacy.training.kind={privacy.training.kind}); set engine.clients_at_once=1"
        )


@dataclass(frozen=True)
class Outcome:
    """What a simulation ends with.

    Attributes:
        model: the final global model (the initial one for `local`, whose models stay at clients).
        rounds: one record a round.
        memories: what the clients keep.
        released: what each client shared under noise, as anyone on the way saw it; what it shared
            in the clear is not kept.
    """

    model: Tree
    rounds: tuple[RoundRecord, ...]
    memories: Mapping[int, Memory] = field(default_factory=dict)
    released: Mapping[int, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """What a run needs to go on after a round.

    Attributes:
        round: the last round that is done.
        state: what the server remembers.
        accounts: the accounts that are kept in memory.
        released: as in `Outcome`.
        diverged: why no round follows, as in a record; empty if one may.
    """

    round: int
    state: Any
    accounts: Mapping[int, Kept]
    released: Mapping[int, Tree]
    diverged: str = ""


OnRound = Callable[[RoundRecord, Progress], None]


def simulate(
    crew: Crew,
    engine: Engine,
    ledger: Ledger,
    on_round: OnRound = lambda record, progress: None,
    workers: Workers | None = None,
    begin: Progress | None = None,
    memories: Shelf | None = None,
) -> Outcome:
    """Run a method over clients that live on this machine.

    Args:
        crew: the method, its clients' examples, the test set, a network with the initial weights,
            and all else that stays the same.
        engine: how the rounds are run.
        ledger: where privacy events are written down.
        on_round: called after each round with its record, and with what it takes to go on.
        workers: processes to use; the result is the same without.
        begin: go on after this round; None to begin.
        memories: where what the clients keep is, with what they kept before this round; None for a
            temporary place.

    Returns:
        What it ends with; of the rounds, those run now. A run that diverges ends with that round.

    Raises:
        ConfigError: a setting of the method or of the engine does not fit the run.
    """
    require_engine(engine, crew.privacy, workers.count if workers else 1)
    keep_memory()
    method = crew.method
    require_optimizer(method, crew.local)
    if method.about.scope == "pooled":
        crew = _pooled(crew)
    memories = Shelf(known=known_types(method)) if memories is None else memories
    memories.room = size_of_cohort(engine.cohort, len(crew.shards))
    grid = InProcess(crew, workers, memories, engine.device, engine.clients_at_once, engine.dropout)
    task, records = crew.task, list[RoundRecord]()
    if begin:
        state, released, done = begin.state, dict(begin.released), begin.round
        done = task.rounds if begin.diverged else done
        grid.restore(begin.accounts)
    else:
        initial = {k: v.clone() for k, v in crew.net.state_dict().items()}
        state, released, done = method.start(visible(method, initial), task), {}, 0
    with one_thread(), repeatable(engine.device):
        for number in range(done + 1, task.rounds + 1):
            began = time.perf_counter()
            cohort = _cohort(memories.room, len(crew.shards), crew.rng.numpy("cohort", number))
            state, exchange = _round(method, state, grid, cohort, number, ledger)
            released |= exchange.released
            with clock.part("evaluate"):
                score = _score(method, state, grid)
            diverged = exchange.broken or _too_bad(score, engine.max_loss)
            kept = {"bytes_client": grid.most_kept(exchange.replies), "bytes_server": stored(state)}
            record = _record(number, exchange, score, time.perf_counter() - began, diverged)
            timing, numbers = _timing(crew, grid, record), {**record.numbers, **_told(state)}
            records.append(replace(record, numbers=numbers, timing=timing, **kept))
            on_round(records[-1], Progress(number, state, grid.kept(), released, diverged))
            memories.tidy()
            if diverged:
                break
    return Outcome(state.model, tuple(records), memories, released)


def _pooled(crew: Crew) -> Crew:
    """One client that holds every client's examples."""
    shards = [crew.shards[c] for c in sorted(crew.shards)]
    pooled = Shard(torch.cat([s.x for s in shards]), torch.cat([s.y for s in shards]))
    return replace(crew, shards={0: pooled}, task=replace(crew.task, clients=1))


@dataclass
class _Exchange:
    """What went back and forth in a round.

    Attributes:
        phase: kind of what was asked last.
        replies: to what was asked last.
        down: bytes sent to clients.
        up: bytes that clients sent.
        released: what those who shared sent under noise.
        broken: why the server could not use it, as in a record; empty if it could.
    """

    phase: str
    replies: dict[int, Message]
    down: int
    up: int
    released: dict[int, Tree]
    broken: str


def _round(
    method: Method, state: Any, grid: Grid, cohort: list[int], number: int, ledger: Ledger
) -> tuple[Any, _Exchange]:
    """One round: those asked to share do so first; then everybody trains.

    Who stays silent when asked to share is not asked to train: the method needs the share for it.
    Who is to rest is asked nothing.
    Nothing that is not finite becomes part of the state.
    """
    down = up = 0
    phase, broken = "rest", ""
    released, replies = dict[int, Tree](), dict[int, Message]()
    for sharing in (True, False):
        asks = {c: method.ask(state, c, number) for c in cohort}
        asks = {c: a for c, a in asks.items() if a.kind != "rest"}
        if not asks:
            break
        shares = {c: a for c, a in asks.items() if a.kind == "share"}
        assert sharing or not shares, "a method asked to share twice in one round"
        sent = shares or asks
        replies = grid.ask_all(sent, number)
        for client, reply in sorted(replies.items()):
            for message in unfold(reply):
                ledger.record(number, client, message.events)
        down += sum(map(size, sent.values()))
        up += sum(map(size, replies.values()))
        if shares:
            released = {c: _noisy(reply) for c, reply in replies.items() if _noisy(reply)}
            phase, cohort = "share", [c for c in cohort if c in replies or c not in shares]
        else:
            phase = next((a.kind for a in sent.values()), phase)
        state, broken = _serve(method, state, replies)
        if broken or not shares:
            break
    return state, _Exchange(phase, replies, down, up, released, broken)


def _serve(method: Method, state: Any, replies: Mapping[int, Message]) -> tuple[Any, str]:
    """The next state; the old one, and why, if it or a reply holds what is not finite."""
    broken = not_finite(replies)
    if broken or not replies:
        return state, broken
    after = method.server(state, replies)
    return (after, "") if all_finite(after.model) else (state, "global model not finite")


def _noisy(reply: Message) -> Tree:
    """What a reply holds under noise; the paper's exact counts are left out, its means are not."""
    clear = {e.channel for e in reply.events if e.mechanism == "none"} - {TUNED}
    paper = any(e.channel == PAPER for e in reply.events)
    if clear and not paper:
        return {}
    trees = reply.trees.values()
    return {k: v for tree in trees for k, v in tree.items() if not (paper and k == "counts")}


def visible(method: Method, tree: Tree) -> Tree:
    """The part of the network that a method may train."""
    return tree if method.about.generative else trunk(tree)


def size_of_cohort(share: float, clients: int) -> int:
    """How many clients take part in a round; all of them for a share of 1."""
    return max(1, round(share * clients))


def _cohort(size: int, clients: int, rng) -> list[int]:
    """The clients of a round, in order."""
    return sorted(rng.choice(clients, size, replace=False).tolist())


def _score(method: Method, state: Any, grid: InProcess) -> Score:
    """Score of the global model, or mean score of the clients' own models."""
    if method.about.scope != "local":
        return grid.score([state.model])[0]
    clients, scores = range(grid.crew.task.clients), list[Score]()
    room = grid.memories.room or len(clients)  # no more models in memory than those of a cohort
    for first in clients[::room]:
        kept = [grid.memories.get(c, Memory()) for c in clients[first : first + room]]
        scores += grid.score([memory.trees.get("model", state.model) for memory in kept])
    return average(scores)


def _timing(crew: Crew, grid: InProcess, record: RoundRecord) -> dict[str, float]:
    """Seconds of a round by part; `exchange` is what no part accounts for.

    Of several processes that work side by side, each counts for its share. `images_per_second` is
    of training, each step taken as a full batch, since true sizes are the clients' own.
    """
    processes = grid.workers.count if grid.workers else 1
    parts = {k: grid.spent[k] / processes for k in ("train", "synthesis")}
    own = clock.taken()  # of this process: the server's, since clients have reported theirs
    parts["synthesis"] += own["synthesis"]
    parts["evaluate"] = own["evaluate"]
    parts["exchange"] = max(0.0, record.seconds - sum(parts.values()))
    training = crew.privacy.training
    size = crew.local.batch_size if training.kind == "none" else training.expected_batch_size
    grid.spent.clear()
    if parts["train"]:
        parts["images_per_second"] = record.numbers["steps"] * size / parts["train"]
    return parts


def _too_bad(score: Score, bound: float) -> str:
    """Why a score is that of a run that diverged; empty if it is not."""
    if not math.isfinite(score.loss):
        return "test loss not finite"
    return f"test loss {score.loss:.3g} above engine.max_loss={bound:g}" * (score.loss > bound)


def _told(state: Any) -> dict[str, float]:
    """What a state says of itself, and the state of the method inside."""
    inner = _told(state.inner) if hasattr(state, "inner") else {}
    return {**inner, **getattr(state, "numbers", {})}


def _record(
    number: int, exchange: _Exchange, score: Score, seconds: float, diverged: str
) -> RoundRecord:
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
        phase=exchange.phase,
        test_accuracy=score.accuracy,
        test_loss=score.loss,
        per_class_accuracy=score.per_class,
        train_loss=loss / steps if steps else float("nan"),
        numbers={**sums, "steps": steps},
        seconds=seconds,
        bytes_up=exchange.up,
        bytes_down=exchange.down,
        diverged=diverged,
    )
