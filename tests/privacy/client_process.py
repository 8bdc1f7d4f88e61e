"""A client that can be killed at any step of a release; test_account.py starts it.

Every line on stdin is one order, as JSON. Each is carried out by a child of its own, forked so that
only the first start pays for the imports, and killed with SIGKILL at the step that the order names.
A step is what stands before, in the middle of, and after each call that changes a file, draws noise
or sends. The answer, one line of JSON on stdout, says what became of the child.
"""

import hashlib
import json
import os
import signal
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import opacus.grad_sample  # noqa: F401  the children would import it one by one
import torch
from safetensors.torch import save

from feddpms.algorithms import FedAvg, FedDPMS, Training
from feddpms.algorithms.private import training_event
from feddpms.errors import PrivacyError
from feddpms.models import NetSettings, build
from feddpms.privacy import Account, DpTraining, Privacy
from feddpms.privacy.noise import Secure
from feddpms.rng import Rng
from feddpms.types import Message
from small import CLASSES, LOOSE, client, three_shards

SHARE = {
    "target_epsilon": LOOSE.target_epsilon,
    "count_noise_multiplier": LOOSE.count_noise_multiplier,
    "min_class_count": LOOSE.min_class_count,
    "l2_clip": LOOSE.l2_clip,
}
TRAIN = {
    "weights": "noisy",
    "training": DpTraining(kind="dpsgd", expected_batch_size=20, expected_examples=40),
}
LOCAL = Training(epochs=1, lr=0.01)


@cache
def group_net():
    """A small network that can train privately; every child has a copy by the fork."""
    settings = NetSettings(width=0.25, latent=6, hidden=8, norm="group")
    return build((1, 4, 4), CLASSES, settings, Rng(0))


class Steps:
    """Counts the steps, notes what each would leave on disk, and kills this process at one."""

    def __init__(self, stop: int | None, home: Path):
        self.names: list[str] = []
        self.disks: list[str] = []
        self._home = home
        self._stop = stop
        self._open: dict[int, str] = {}

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if self._stop is None:
            self.disks.append(self._disk())
        if len(self.names) - 1 == self._stop:
            os.kill(os.getpid(), signal.SIGKILL)

    def _disk(self) -> str:
        """A digest of every file's name and bytes."""
        digest = hashlib.sha256()
        for folder, _, files in sorted(os.walk(self._home)):
            digest.update(folder.encode())
            for name in sorted(files):
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(f"{name} {file.read()!r}".encode())
        return digest.hexdigest()

    def watch(self) -> None:
        """Put a step before and after every call that matters."""
        self._around(os, "fsync", lambda file: f"sync {self._open[file]}")
        self._around(os, "replace", lambda _, to: f"rename to {Path(to).name}")
        self._around(Path, "mkdir", lambda path, **_: f"mkdir {path.name}")
        self._around(Secure, "discrete", lambda *_: "draw")
        self._around(Secure, "floating", lambda *_: "draw")
        path_open, os_open = Path.open, os.open

        def opened(path, mode="r", *args, **more):
            if mode in ("r", "rb"):
                return path_open(path, mode, *args, **more)
            self(f"before open {path.name} {mode}")
            file = path_open(path, mode, *args, **more)
            self._open[file.fileno()] = path.name
            self(f"after open {path.name} {mode}")
            return Watched(file, path.name, self)

        def opened_folder(path, *args, **more):
            handle = os_open(path, *args, **more)
            self._open[handle] = "home" if Path(path) == self._home else Path(path).name
            return handle

        Path.open, os.open = opened, opened_folder

    def _around(self, owner, name, says) -> None:
        real = getattr(owner, name)

        def call(*args, **more):
            words = says(*args, **more)
            self(f"before {words}")
            out = real(*args, **more)
            self(f"after {words}")
            return out

        setattr(owner, name, call)


class Watched:
    """A file that is open to write."""

    def __init__(self, file, name: str, steps: Steps):
        self._file, self._name, self._steps = file, name, steps

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, content):
        """Half of it reaches the disk, then the rest is in the file's buffer."""
        half = len(content) // 2
        self._steps(f"before write {self._name}")
        self._file.write(content[:half])
        self._file.flush()
        self._steps(f"half of write {self._name}")
        self._file.write(content[half:])
        self._steps(f"after write {self._name}")

    def flush(self):
        self._file.flush()
        self._steps(f"after flush {self._name}")

    def truncate(self, size):
        self._file.truncate(size)
        self._file.flush()
        self._steps(f"after cut {self._name}")


def privacy(order) -> Privacy:
    return Privacy(noise=order["noise"], **(SHARE if order["ask"] == "share" else TRAIN))


def answer(order, steps: Steps) -> None:
    """Answer one ask as a client on a machine of its own does, and send it."""
    settings, net = privacy(order), group_net()
    account = Account(settings, 0, Path(order["folder"]))
    me = client(
        three_shards()[1],
        net,
        order["round"],
        account=account,
        privacy=settings,
        local=LOCAL,
    )
    broadcast = {k: v.clone() for k, v in net.state_dict().items()}
    method = FedDPMS() if order["ask"] == "share" else FedAvg()
    reply, _ = method.client(Message(order["ask"], {"model": broadcast}), me)
    send(serialised(reply), Path(order["outbox"]), steps)


def serialised(reply: Message) -> bytes:
    """The bytes that would cross the wire."""
    flat = {f"{t}/{k}": v.contiguous() for t, tree in reply.trees.items() for k, v in tree.items()}
    rest = {"numbers": dict(reply.numbers), "events": [asdict(e) for e in reply.events]}
    return json.dumps(rest).encode() + b"\n" + save(dict(sorted(flat.items())))


def send(content: bytes, outbox: Path, steps: Steps) -> None:
    """To a file; what is in it has left the client, even if it is half of a reply."""
    half = len(content) // 2
    steps("before send")
    with open(outbox, "xb", buffering=0) as file:
        file.write(content[:half])
        steps("half of send")
        file.write(content[half:])
    steps("after send")


def said(end: dict, steps: Steps) -> bytes:
    return json.dumps({**end, "steps": steps.names, "disks": steps.disks}).encode()


def carry_out(order) -> dict:
    """What became of one order."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        home = Path(order["outbox"]).parent
        steps, end = Steps(order["stop"], home), {"status": "failed", "error": ""}
        try:
            steps.watch()
            answer(order, steps)
            end["status"] = "sent"
        except PrivacyError as error:
            end = {"status": "refused", "error": str(error)}
        except BaseException as error:
            end["error"] = repr(error)
        os.write(write, said(end, steps))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        last = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL and not last:
        return {"status": "killed", "error": "", "steps": []}
    return json.loads(last)


def warm_up() -> None:
    """Do once what every child would do again: find the noise multiplier, import what is slow."""
    settings = privacy({"ask": "train", "noise": "secure"})
    training_event(client(three_shards()[1], group_net(), privacy=settings, local=LOCAL))
    Secure().discrete(torch.zeros(1), 1.0)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line))), flush=True)
