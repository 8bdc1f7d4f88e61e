"""Record a client on some records, replay it on a neighbour: all that may differ is paid for.

The idea is "Re:cord-play" (Cebere et al., PETS 2026, arXiv 2602.17454). A client rule runs on data
set D, and each call of the one Gaussian primitive is recorded. It runs again on a neighbour D' with
the same randomness, and each call gives back what it gave on D. By the guarantee of the primitive,
this is all the help that noise can be. So whatever still differs, other than the un-noised values
within their sensitivities, tells D from D'. Several calls may move by the same record: each is paid
for by itself.

What must hold, by the name of the rule:

    calls   the same calls in the same order: statistic, multiplier, shape
    value   an un-noised value moves by at most its declared l2 sensitivity, and not at all if the
            record is not in the sample of the step
    noise   every coordinate of what the primitive gives has noise
    source  no noise is drawn beside the primitive
    paid    the events that are sent pay for exactly the calls that were made
    sent    trees, numbers and events (with digests) of what leaves, and the ledger, are equal
    told    log records of any level, printed text and warnings are equal
    raised  exceptions are equal

Wall time is not compared, nor is what a client keeps in memory. Nothing is said about the size and
the independence of the noise, about outcomes that only chance noise leads to, nor about pairs that
were not tried: neighbours have to seek boundaries.

Two kinds of randomness belong to a record, not to a place in a batch: the coin that puts it in a
Poisson sample, and the noise of its latent code in training. A neighbour has a record more, so a
plain stream would give the common records other numbers from there on. They are coupled: a common
record gets the same ones on both sides. That is the coupling that the analysis of the mechanism
uses, and it changes no distribution. The coin of the record that differs is set.
"""

import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from feddpms.algorithms import feddpms
from feddpms.privacy import Account, account, mechanism, noise
from feddpms.privacy.mechanism import GradientSum
from feddpms.types import Event, Message, Shard

ROUNDING = 1e-5
"""Part of the sensitivity that rounding may add. Codes and gradients of single records are float32,
and the last bit of a common record's depends on how many records are in its batch."""
ROOM = 1000
"""more than there are records"""
ODD = ROOM - 1
"""identity of the record that is in one data set alone, or that is replaced"""


class Violation(AssertionError):
    """Two neighbours can be told apart by more than what was paid for."""

    def __init__(self, rule: str, text: str):
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass(frozen=True)
class Side:
    """One of two neighbours: its records, and who each of them is."""

    shard: Shard
    ids: Tensor


@dataclass(frozen=True)
class Pair:
    """Two neighbouring data sets.

    Attributes:
        name: what is special.
        left: the one that is recorded.
        right: the one that is replayed.
        coin: whether the odd record is in each step's Poisson sample: `in`, `out`, or by `turns`.
    """

    name: str
    left: Side
    right: Side
    coin: str = "in"


@dataclass(frozen=True)
class Call:
    """One call of the Gaussian primitive."""

    statistic: Any
    multiplier: float
    value: Tensor
    output: Tensor


@dataclass
class Trace:
    """What one run did."""

    sent: list[Any] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    raised: str = ""


Path = Callable[[Shard], Iterable[Message | Account]]
"""A client on its records: yields what leaves it, in order. An account stands for its ledger."""


def check(path: Path, pair: Pair) -> int:
    """Record the path on one neighbour, replay it on the other.

    Returns:
        How many calls of the primitive there were.

    Raises:
        Violation: a rule is broken.
    """
    tape = _Tape(pair.left, pair.coin)
    before = _run(path, tape)
    _paid(before, tape.calls)
    again = _Tape(pair.right, pair.coin, tape.calls)
    after = _run(path, again)
    where = difference(before.raised, after.raised)
    if where:
        raise Violation("raised", where)
    if len(again.calls) != len(tape.calls):
        raise Violation("calls", f"{len(tape.calls)} and {len(again.calls)}")
    for rule in ("sent", "told"):
        where = difference(getattr(before, rule), getattr(after, rule))
        if where:
            raise Violation(rule, where)
    return len(tape.calls)


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where two values differ first, bit for bit, through records, mappings and tensors; or ""."""
    if type(a) is not type(b):
        return f"{at}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, Tensor):
        alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        alike = alike and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
        return "" if alike else f"{at}: tensors {a} and {b}"
    if isinstance(a, dict):
        a, b = list(a.items()), list(b.items())
    elif is_dataclass(a):
        a, b = ([(f.name, getattr(v, f.name)) for f in fields(v)] for v in (a, b))
    if isinstance(a, list | tuple):
        pairs = enumerate(zip_longest(a, b, fillvalue="nothing"))
        return next((d for i, (x, y) in pairs if (d := difference(x, y, f"{at}/{i}"))), "")
    return "" if a == b or repr(a) == repr(b) == "nan" else f"{at}: {a!r} and {b!r}"


class _Tape:
    """Stands between the product and its noise during one run."""

    def __init__(self, side: Side, coin: str, forced: list[Call] | None = None):
        self.side, self._coin, self._forced = side, coin, forced
        self.calls: list[Call] = []
        self._steps, self._sampled, self._inside = 0, True, False

    def gaussian(self, real, value, statistic, multiplier, source) -> Tensor:
        """Record a call, or check it and give back what was recorded."""
        self._inside = True
        try:
            # Also drawn in a replay, so that the stream stands where it stood.
            output = real(value, statistic, multiplier, source)
        finally:
            self._inside = False
        call = Call(statistic, multiplier, value.clone(), output.clone())
        if self._forced is None:
            if not (output != value).all():
                raise Violation("noise", f"call {len(self.calls)}: a coordinate has none")
        else:
            output = self._compared(call, statistic).output.clone()
        self.calls.append(call)
        return output

    def _compared(self, call: Call, statistic: Any) -> Call:
        """The recorded call in the place of this one, after comparing them."""
        place, forced = len(self.calls), self._forced or []
        if place >= len(forced):
            raise Violation("calls", f"call {place} has nothing to answer it on the other side")
        before = forced[place]
        for key in ("statistic", "multiplier"):
            where = difference(getattr(before, key), getattr(call, key), f"call {place}, {key}")
            if where:
                raise Violation("calls", where)
        if (before.value.shape, before.value.dtype) != (call.value.shape, call.value.dtype):
            raise Violation("calls", f"call {place}: {before.value.shape}, {call.value.shape}")
        moved = float((call.value.double() - before.value.double()).norm())
        takes_part = self._sampled or not isinstance(statistic, GradientSum)
        allowed = statistic.l2_sensitivity * (takes_part + ROUNDING)
        if not moved <= allowed:  # a NaN is no small move
            raise Violation("value", f"call {place}, {statistic}: moved {moved}, not {allowed}")
        return before

    def uniform(self, real, source, n: int) -> Tensor:
        """The coins of one step, each by its record."""
        if n != len(self.side.ids):  # no coin a record
            return real(source, n)
        self._steps += 1
        self._sampled = self._coin == "in" or (self._coin == "turns" and self._steps % 2 == 0)
        coins = torch.rand(ROOM, generator=self._stream(0), dtype=torch.float64)
        coins[ODD] = 0.0 if self._sampled else 1.0
        return coins[self.side.ids]

    def latent_noise(self, index: Tensor, length: int) -> Tensor:
        """Noise of the latent codes of records, each by its record."""
        return torch.randn(ROOM, length, generator=self._stream(1))[self.side.ids[index]]

    def _stream(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(2 * self._steps + purpose)

    def drawn(self, name: str) -> None:
        """Note that a source draws noise."""
        if not self._inside:
            raise Violation("source", f"{name} was called beside the primitive")


def _run(path: Path, tape: _Tape) -> Trace:
    """One run of the path, with the tape in place."""
    trace = Trace()
    with _taped(tape), _captured(trace.told):
        try:
            for leaves in path(tape.side.shard):
                told = leaves.ledger.entries if isinstance(leaves, Account) else leaves
                trace.sent.append(told)
        except Violation:
            raise
        except Exception as error:
            trace.raised = f"{type(error).__name__}: {error}"
    return trace


@contextmanager
def _taped(tape: _Tape) -> Iterator[None]:
    """Put the tape between the product and its noise, under every name it was imported by."""
    real = mechanism.gaussian

    def gaussian(value, statistic, noise_multiplier, source):
        return tape.gaussian(real, value, statistic, noise_multiplier, source)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("feddpms.") and vars(module).get("gaussian") is real:
                stack.enter_context(patch.object(module, "gaussian", gaussian))
        for cls in (noise.Seeded, noise.Secure):
            for name in ("discrete", "floating"):
                watched = _watched(tape, cls, name)
                stack.enter_context(patch.object(cls, name, watched))
            coins = _coins(tape, cls)
            stack.enter_context(patch.object(cls, "uniform", coins))
        stack.enter_context(patch.object(account, "load", _sorted(account.load)))
        loss = _coupled(tape, feddpms.vae_loss)
        stack.enter_context(patch.object(feddpms, "vae_loss", loss))
        yield


def _watched(tape: _Tape, cls: type, name: str) -> Callable:
    real = getattr(cls, name)

    def draw(source, value, std):
        tape.drawn(f"{cls.__name__}.{name}")
        return real(source, value, std)

    return draw


def _coins(tape: _Tape, cls: type) -> Callable:
    real = cls.uniform  # pyright: ignore
    return lambda source, n: tape.uniform(real, source, n)


def _coupled(tape: _Tape, real: Callable) -> Callable:
    """The loss of the auto-encoder, with the noise of a latent code drawn by its record.

    Only that noise is replaced: the loss is the product's own.
    """

    def vae_loss(settings, eps):
        return lambda net, batch: real(
            settings, lambda mean: tape.latent_noise(batch.index, mean.shape[1])
        )(net, batch)

    return vae_loss


def _sorted(real: Callable) -> Callable:
    """Loading with the entries in alphabetical order; safetensors draws one anew each time."""
    return lambda data: dict(sorted(real(data).items()))


@contextmanager
def _captured(told: list[str]) -> Iterator[None]:
    """Note log records of any level, printed text and warnings."""
    root, text = logging.getLogger(), io.StringIO()
    level = root.level

    def handle(_, record):
        told.append(f"{record.name} {record.levelname} {record.getMessage()}")

    with ExitStack() as stack:
        stack.callback(root.setLevel, level)
        root.setLevel(1)
        stack.enter_context(patch.object(logging.Logger, "handle", handle))
        stack.enter_context(redirect_stdout(text))
        stack.enter_context(redirect_stderr(text))
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        yield
    told += [text.getvalue(), *(f"{w.category.__name__} {w.message}" for w in warned)]


def _paid(trace: Trace, calls: list[Call]) -> None:
    """Each call of the primitive has an event that left, and each such event its calls."""
    if trace.raised:
        return
    events = dict.fromkeys(e for m in trace.sent if isinstance(m, Message) for e in _events(m))
    paid, made = Counter(), Counter()
    for e in events:
        if e.mechanism == "gaussian":
            paid[e.noise_multiplier, e.l2_sensitivity, e.neighbours] += e.times
    for c in calls:
        made[c.multiplier, c.statistic.l2_sensitivity, c.statistic.adjacency] += 1
    if paid != made:
        raise Violation("paid", f"paid for {dict(paid)}, made {dict(made)}")


def _events(message: Message) -> list[Event]:
    """All events of a message."""
    return [*message.events, *(_events(message.inner) if message.inner else ())]
