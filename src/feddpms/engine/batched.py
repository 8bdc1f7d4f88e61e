"""Clients that train at once on one device: their networks are one stack, their steps one step.

Each client's rule runs unchanged in a thread of its own, but only one thread runs at a time, in the
order of the clients. Where a rule calls `fit`, its loss meets a network that is a stand-in: a call
waits until every client has asked, and calls that are alike run as one over stacked weights.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from feddpms.algorithms import Client
from feddpms.algorithms.batches import shuffled
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.fit import load
from feddpms.engine.stack import Stack
from feddpms.types import Loss, Tree

CALLS = ("features", "encode", "decode", "classify", "code")
"""what a stand-in can do, as a network does it"""


def run_together(jobs: Sequence[Callable[..., Any]]) -> list[Any]:
    """Results of clients' jobs, in order.

    Args:
        jobs: each is called in a thread, with the argument `together` for its client. They share no
            network.

    Raises:
        Exception: as the first job that failed raised it; no job goes on then.
    """
    seats = [_Seat(job) for job in jobs]
    try:
        while live := [seat for seat in seats if not seat.over]:
            for seat in (seat for seat in live if seat.ready):
                seat.resume()
                if seat.error:
                    raise seat.error
            _serve([seat for seat in live if not seat.over])
        return [seat.result for seat in seats]
    finally:
        for seat in seats:
            seat.stop()


@dataclass
class _Begin:
    """A client asks to train: its network as it starts, what to train, and its correction."""

    me: Client
    trained: list[str]
    correction: Correction


@dataclass
class _Call:
    """A client asks for what its network makes of tensors [b, ...]."""

    name: str
    given: tuple[Tensor, ...]
    graph: bool


@dataclass
class _Derivative:
    """A client asks for a derivative with a graph, inside its loss."""

    value: Tensor
    by: Tensor


@dataclass
class _Step:
    """A client asks for a step down its loss; after the last one it wants its model."""

    value: Tensor
    last: bool


class _Stopped(BaseException):
    """Ends a client's thread where it waits; no rule catches it."""


class _Seat:
    """A client's thread, which runs only between `resume` and its next request."""

    def __init__(self, job: Callable[..., Any]):
        self.request: Any = None
        self.answer: Any = None
        self.stack: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ready, self.over, self._stopped = True, False, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let it run until it asks or ends."""
        self._go.release()
        self._back.acquire()

    def stop(self) -> None:
        """End it, wherever it waits, and let go of what it held on the device."""
        self._stopped = True
        self._go.release()
        self._thread.join()
        self.request = self.answer = self.stack = None

    def ask(self, request: Any) -> Any:
        """Called by the thread itself: wait for the answer to a request."""
        self.request, self.ready = request, False
        self._back.release()
        self._wait()
        return self.answer

    def reply(self, answer: Any) -> None:
        """Answer its request; it goes on when resumed."""
        self.request, self.answer, self.ready = None, answer, True

    def train(
        self, me: Client, start: Tree, loss: Loss, correction: Correction | None
    ) -> tuple[Tree, int, float]:
        """Train in step with the others; what `fit` does alone."""
        load(me.net, start)
        self.ask(_Begin(me, list(start), correction or Correction()))
        net, batches, steps = _StandIn(self), shuffled(me), 0
        batch = next(batches)
        while True:
            value = loss(net, batch)
            batch, steps = next(batches, None), steps + 1
            fitted = self.ask(_Step(value, last=batch is None))
            if batch is None:
                tree, total = fitted
                return tree, steps, total / steps

    def _wait(self) -> None:
        self._go.acquire()
        if self._stopped:
            raise _Stopped

    def _run(self, job: Callable[..., Any]) -> None:
        try:
            self._wait()
            self.result = job(together=self.train)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._back.release()


class _StandIn:
    """A client's network inside its loss, with as much of one as a loss may use."""

    def __init__(self, seat: _Seat):
        self._seat = seat

    def __call__(self, *given: Tensor) -> Any:
        """What the network makes of a batch."""
        return self._ask("forward", *given)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CALLS:
            raise AttributeError(f"a network of clients that train at once has no {name!r}")
        return partial(self._ask, name)

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The client's own weights."""
        return self._seat.stack.weights(self._seat)

    def derivative(self, value: Tensor, by: Tensor, create_graph: bool = True) -> tuple[Tensor]:
        """As `torch.autograd.grad`, for a derivative that is itself trained through."""
        assert create_graph
        return self._seat.ask(_Derivative(value, by))

    def _ask(self, name: str, *given: Tensor) -> Any:
        return self._seat.ask(_Call(name, given, torch.is_grad_enabled()))


def _serve(seats: list[_Seat]) -> None:
    """Answer what is most urgent: what losses need, then steps, then beginnings.

    So a step is taken once every client that trains has its loss, and training begins once nobody
    trains.
    """
    for kinds in ((_Call, _Derivative), (_Step,), (_Begin,)):
        groups: dict[Any, list[_Seat]] = {}
        for seat in seats:
            if isinstance(seat.request, kinds):
                groups.setdefault(_alike(seat), []).append(seat)
        for group in groups.values():
            _answer(group)
        if groups:
            return


def _alike(seat: _Seat) -> Any:
    """What requests that are answered as one have in common."""
    match seat.request:
        case _Call(name, given, graph):
            kinds = [(t.shape[1:], t.dtype) for t in given]
            return id(seat.stack), name, graph, tuple(kinds)
        case _Begin(me, trained, correction):
            return tuple(trained), me.local, me.lr, correction.decoupled
    return type(seat.request), id(seat.stack)


def _answer(group: list[_Seat]) -> None:
    """Answer requests that are alike."""
    asked, stack = [seat.request for seat in group], group[0].stack
    match asked[0]:
        case _Begin(me, trained):
            nets, corrections = [a.me.net for a in asked], [a.correction for a in asked]
            stack = Stack(group, nets, trained, corrections, me.local, me.lr)
            for seat in group:
                seat.stack = stack
                seat.reply(None)
        case _Call(name, _, graph):
            with torch.set_grad_enabled(graph):  # as in the thread that asks
                answers = stack.call(group, name, [a.given for a in asked])
            for seat, answer in zip(group, answers, strict=True):
                seat.reply(answer)
        case _Derivative():
            values, by = [a.value for a in asked], [a.by for a in asked]
            slopes = torch.autograd.grad(values, by, create_graph=True)
            for seat, slope in zip(group, slopes, strict=True):
                seat.reply((slope,))
        case _Step():
            stack.step([a.value for a in asked])
            gone = [seat for seat, a in zip(group, asked, strict=True) if a.last]
            fitted = dict(zip(gone, stack.leave(gone), strict=True))
            for seat in group:
                seat.reply(fitted.get(seat))
