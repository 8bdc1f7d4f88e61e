"""Worker processes: clients and parts of the test set in parallel, with the same result as in turn.

Each worker runs on one thread, as a single process does, so the number of workers changes no bit.
Images are in shared memory; messages are copied. A worker trusts what its parent sends it: pickle
never crosses the border of this program.
"""

import io
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from feddpms.errors import FeddpmsError

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a worker's crew, and its arguments; the crew itself comes first."""


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
        self._links: list[Any] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def share(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Let every worker make what its jobs need: the first argument of each from now on.

        Args:
            make: called by each worker with the arguments.
            arguments: tensors among them go to shared memory; nobody may change them after that.
        """
        for link in self._links:
            link.send_bytes(b"crew")
            link.send((make, arguments))  # torch sends a tensor as a handle of shared memory

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Do all jobs, first come first served, and return their results in order.

        Args:
            jobs: the longest first, so that no worker is left alone with a long one.

        Raises:
            FeddpmsError: as the job raised it.
            RuntimeError: a job failed otherwise, or a worker was killed.
        """
        results: list[Any] = [None] * len(jobs)
        waiting, failure = deque(enumerate(jobs)), None
        given = {link: deque[int]() for link in self._links}
        self._give(waiting, given)
        while any(given.values()):
            ready: list[Any] = wait([link for link, numbers in given.items() if numbers])
            for link in ready:
                done, value = self._take(link)
                number = given[link].popleft()
                if done:
                    results[number] = value
                else:
                    failure = failure or value
                    waiting.clear()
                self._give(waiting, given)
        if failure:
            raise failure
        return results

    def _give(self, waiting: deque[tuple[int, Job]], given: dict[Any, deque[int]]) -> None:
        """Give each worker a job, then each a second one, so that none waits for its next."""
        for most in (1, 2):
            for link, numbers in given.items():
                if waiting and len(numbers) < most:
                    number, job = waiting.popleft()
                    link.send_bytes(b"job")
                    link.send_bytes(packed(job))
                    numbers.append(number)

    def _take(self, link: Any) -> tuple[bool, Any]:
        """A worker's next answer."""
        try:
            return pickle.loads(link.recv_bytes())
        except EOFError:
            self.close()
            raise RuntimeError("a worker process was killed; is there enough memory?") from None

    def close(self) -> None:
        """Stop the workers."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=1)
            process.kill()


def _read(link: Any, inbox: SimpleQueue[Any]) -> None:
    """Put what arrives in an inbox: a crew as a tuple, a job as bytes."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(link.recv() if link.recv_bytes() == b"crew" else link.recv_bytes())
    os._exit(0)  # the parent is gone, and nobody waits for what is being done


def packed(value: Any) -> bytes:
    """A value as bytes for `pickle.loads`; torch's own way takes 30 times as long for a tensor."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its numbers, shape and strides."""

    def reducer_override(self, value: Any) -> Any:
        """How to make a tensor again; anything else, and what has gaps, goes the usual way."""
        if type(value) is not Tensor or value.requires_grad or not _dense(value):
            return NotImplemented
        numbers = value.as_strided((value.numel(),), (1,))
        return _tensor, (numbers.numpy(), tuple(value.shape), value.stride())


def _dense(value: Tensor) -> bool:
    """Whether NumPy knows the type, and the numbers lie side by side, in either order."""
    if value.dtype == torch.bfloat16:
        return False
    if value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return True
    return value.is_contiguous()


def _tensor(numbers: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor from its numbers."""
    return torch.from_numpy(numbers).as_strided(shape, stride)


def _work(link: Any) -> None:
    """What a worker does until its parent is gone."""
    torch.set_num_threads(1)
    crew: Any = None
    inbox: SimpleQueue[Any] = SimpleQueue()
    # A thread reads, so that a parent that sends never waits for a worker that sends.
    Thread(target=_read, args=(link, inbox), daemon=True).start()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        while True:
            message = inbox.get()
            if isinstance(message, tuple):
                make, arguments = message
                crew = make(*arguments)
                continue
            function, arguments = pickle.loads(message)
            try:
                answer = (True, function(crew, *arguments))
            except FeddpmsError as error:
                answer = (False, error)
            except Exception:
                answer = (False, RuntimeError(f"in a worker:\n{traceback.format_exc()}"))
            link.send_bytes(packed(answer))
