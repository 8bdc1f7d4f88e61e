"""Clients in this process, one after another, each training on one thread."""

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from feddpms.algorithms import Client, Method, Training
from feddpms.privacy import Account, Privacy
from feddpms.rng import Rng
from feddpms.types import Memory, Message, Shard, Task


@dataclass
class InProcess:
    """A grid whose clients live here.

    Attributes:
        method: the method that they run.
        shards: each client's own examples, by client.
        net: a network to work with; shared, since every client overwrites its weights.
        task: what everybody knows.
        local: how clients train.
        privacy: target of their releases.
        rng: where the clients' random streams are.
        memories: what each client keeps.
        folder: where clients keep their accounts if their noise is secure, since a second draw
            would be a second release; None, and with seeded noise, for memory.
    """

    method: Method
    shards: Mapping[int, Shard]
    net: Any
    task: Task
    local: Training
    privacy: Privacy
    rng: Rng
    memories: dict[int, Memory] = field(default_factory=dict)
    folder: Path | None = None
    _accounts: dict[int, Account] = field(default_factory=dict)

    def ask_all(self, asks: Mapping[int, Message], round: int) -> dict[int, Message]:
        """Let each client answer in turn."""
        with one_thread():
            return {client: self._ask(client, ask, round) for client, ask in sorted(asks.items())}

    def _ask(self, client: int, ask: Message, round: int) -> Message:
        """One client's answer; its new memory is kept."""
        me = Client(
            id=client,
            shard=self.shards[client],
            net=self.net,
            task=self.task,
            local=self.local,
            lr=self.local.lr_at(round),
            privacy=self.privacy,
            rng=self.rng.at("client", client, round),
            account=self._account(client),
            round=round,
            memory=self.memories.get(client, Memory()),
        )
        reply, self.memories[client] = self.method.client(ask, me)
        return reply

    def close(self) -> None:
        """Close the clients' accounts."""
        for account in self._accounts.values():
            account.close()

    def _account(self, client: int) -> Account:
        """A client's account, opened the first time."""
        if client not in self._accounts:
            kept = self.folder / str(client) if self.folder else None
            secure = self.privacy.noise == "secure"
            self._accounts[client] = Account(self.privacy, client, kept if secure else None)
        return self._accounts[client]


@contextmanager
def one_thread():
    """One thread for torch, since the number of threads changes the last bits of a sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
