"""Worker processes: clients and parts of the test set in parallel, with the same result as in turn.

Each worker runs on one thread, as a single process does, so the number of workers changes no bit.
Images are in shared memory; messages are copied, what many of them have in common once a worker. A
worker trusts what its parent sends it: pickle never crosses the border of this program.
"""

import fcntl
import io
import os
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.multiprocessing as mp
from torch import Tensor

from feddpms.engine.heap import keep_memory
from feddpms.errors import FeddpmsError

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a worker's crew, and its arguments; the crew itself comes first."""


CREW, COMMON, JOB = b"c", b"t", b"j"
"""kinds of what a worker is sent: how to make its crew, tensors of jobs to come, a job"""
PIPE = 1 << 20
"""bytes of a pipe, the most that Linux gives: who answers need not wait until it is read"""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Processes that wait for work.

    Args:
        count: how many, at least 2; with one, nothing is gained over the process itself.
    """

    def __init__(self, count: int):
        # Workers fork from a server that has this module imported and has never run a thread.
        context: Any = mp.get_context("forkserver" if os.name == "posix" else "spawn")
        if os.name == "posix":
            context.set_forkserver_preload(["feddpms.engine.workers", "feddpms.config"])
        self.count = count
        self._links = []
        for _ in range(count):
            (read, answers), (asks, write) = _pipe(context), _pipe(context)
            process = context.Process(target=_work, args=(asks, answers), daemon=True)
            process.start()
            asks.close()
            answers.close()
            self._links.append(_Link(process, read, write))

    def share(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Let every worker make what its jobs need: the first argument of each from now on.

        Args:
            make: called by each worker with the arguments.
            arguments: tensors among them go to shared memory; nobody may change them after that.
        """
        # torch's own way: a tensor goes as a handle of shared memory, which one reader takes
        for link in self._links:
            self._send(link, CREW, ForkingPickler.dumps((make, arguments)))

    def run(self, jobs: Sequence[Job], tensors: Iterable[Tensor] = ()) -> list[Any]:
        """Do all jobs, first come first served, and return their results in order.

        Args:
            jobs: the longest first, so that no worker is left alone with a long one.
            tensors: some in the jobs' arguments, each as often as a job has it; no job changes
                them. A worker gets what several jobs have only once.

        Raises:
            FeddpmsError: as the job raised it.
            RuntimeError: a job failed otherwise, or a worker was killed.
        """
        common = _repeated(tensors)
        places = {id(t): place for place, t in enumerate(common)}
        bundle = packed(common)
        for link in self._links:
            self._send(link, COMMON, bundle)
        results: list[Any] = [None] * len(jobs)
        waiting, failure = deque(enumerate(jobs)), None
        self._give(waiting, places)
        while busy := {link.read: link for link in self._links if link.numbers}:
            for ready in wait(list(busy)):
                link = busy[ready]  # pyright: ignore[reportArgumentType]
                done, value = self._take(link)
                number = link.numbers.popleft()
                if done:
                    results[number] = value
                else:
                    failure = failure or value
                    waiting.clear()
                self._give(waiting, places)
        if failure:
            raise failure
        return results

    def _give(self, waiting: deque[tuple[int, Job]], places: Mapping[int, int]) -> None:
        """Give each worker a job, then each a second one, so that none waits for its next."""
        for most in (1, 2):
            for link in self._links:
                if waiting and len(link.numbers) < most:
                    number, job = waiting.popleft()
                    self._send(link, JOB, packed(job, places))
                    link.numbers.append(number)

    def _send(self, link: "_Link", kind: bytes, content: Any) -> None:
        """Send a worker something, in one piece, since each piece wakes it."""
        try:
            link.write.send_bytes(kind + content)
        except BrokenPipeError:
            self._killed()

    def _take(self, link: "_Link") -> tuple[bool, Any]:
        """A worker's next answer."""
        try:
            return unpacked(link.read.recv_bytes())
        except EOFError:
            self._killed()

    def _killed(self) -> NoReturn:
        self.close()
        raise RuntimeError("a worker process was killed; is there enough memory?") from None

    def close(self) -> None:
        """Stop the workers."""
        for link in self._links:
            link.read.close()
            link.write.close()
        for link in self._links:
            link.process.join(timeout=1)
            link.process.kill()


@dataclass
class _Link:
    """A worker as its parent sees it."""

    process: Any
    read: Any
    write: Any
    numbers: deque[int] = field(default_factory=deque[int])
    """of the jobs that it has been given and has not answered, in order"""


def _repeated(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that occur several times, once each."""
    held = list(tensors)
    times = Counter(map(id, held))
    return list({id(t): t for t in held if times[id(t)] > 1}.values())


def _pipe(context: Any) -> tuple[Any, Any]:
    """Two ends, to read from and to write to, with much room between where the system allows it."""
    read, write = context.Pipe(duplex=False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # a system may allow less; only time depends on it
            fcntl.fcntl(write.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
    return read, write


def _listen(link: Any, inbox: SimpleQueue[Any]) -> None:
    """Put what arrives in an inbox."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(link.recv_bytes())
    os._exit(0)  # the parent is gone, and nobody waits for what is being done


def packed(value: Any, places: Mapping[int, int] = MappingProxyType({})) -> bytes:
    """A value as bytes for `unpacked`; torch's own way takes 30 times as long for a tensor.

    Args:
        value: tensors in tuples, lists, dicts and dataclasses.
        places: of what the reader has already, by `id`.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, places).dump(value)
    return buffer.getvalue()


def unpacked(data: Any, common: Sequence[Tensor] = ()) -> Any:
    """What `packed` made bytes of.

    Args:
        data: bytes, from this program alone.
        common: what the reader has already, by place.
    """
    return _Unpickler(io.BytesIO(data), common).load()


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its numbers, shape and strides, or as its place if the reader has it."""

    def __init__(self, file: Any, places: Mapping[int, int]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places

    def persistent_id(self, value: Any) -> int | None:
        """Where the reader has a value; None where it has not."""
        return self._places.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """How to make a tensor again; anything else, and what has gaps, goes the usual way."""
        if type(value) is not Tensor or value.requires_grad or not _dense(value):
            return NotImplemented
        numbers = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().data
        given = pickle.PickleBuffer(numbers), value.dtype, tuple(value.shape), value.stride()
        return _tensor, given


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(self, file: Any, common: Sequence[Tensor]):
        super().__init__(file)
        self._common = common

    def persistent_load(self, place: int) -> Tensor:
        """What is held at a place."""
        return self._common[place]


def _dense(value: Tensor) -> bool:
    """Whether there are numbers, and they lie side by side, in either order."""
    if not value.numel():
        return False
    return value.is_contiguous() or (
        value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
    )


def _tensor(numbers: bytearray, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    """A tensor from its numbers."""
    return torch.frombuffer(numbers, dtype=dtype).as_strided(shape, stride)


def _work(asks: Any, answers: Any) -> None:
    """What a worker does until its parent is gone."""
    torch.set_num_threads(1)
    keep_memory()
    crew: Any = None
    common: list[Tensor] = []
    inbox: SimpleQueue[Any] = SimpleQueue()
    # A thread reads, so that a parent that sends never waits for a worker that sends.
    Thread(target=_listen, args=(asks, inbox), daemon=True).start()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        while True:
            message = inbox.get()
            kind, data = message[:1], memoryview(message)[1:]
            if kind == CREW:
                make, arguments = pickle.loads(data)
                crew = make(*arguments)
            elif kind == COMMON:
                common = unpacked(data)
            else:
                answers.send_bytes(packed(_answer(crew, *unpacked(data, common))))


def _answer(crew: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Whether a job was done, and its result or what went wrong."""
    try:
        return True, function(crew, *arguments)
    except FeddpmsError as error:
        return False, error
    except Exception:
        return False, RuntimeError(f"in a worker:\n{traceback.format_exc()}")
