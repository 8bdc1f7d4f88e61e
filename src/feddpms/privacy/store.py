"""What a client has released, kept so that it can be sent again instead of drawn again."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from feddpms.errors import PrivacyError
from feddpms.privacy.mechanism import UPDATES
from feddpms.records import write_file
from feddpms.types import Tree


class Store:
    """The latest release of each channel, as bytes.

    Args:
        folder: where files are kept; None for memory, which keeps no model updates: they are as
            large as the model, and a simulation can draw them again.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._kept: dict[str, bytes] = {}
        if folder and not folder.exists():
            folder.mkdir(parents=True)
            _sync(folder.parent)

    def kept(self) -> Tree:
        """What is kept in memory, as uint8 tensors by channel."""
        return {c: torch.frombuffer(bytearray(b), dtype=torch.uint8) for c, b in self._kept.items()}

    def restore(self, kept: Tree) -> None:
        """Keep in memory what `kept` gave."""
        self._kept = {c: b.numpy().tobytes() for c, b in kept.items()}

    def put(self, channel: str, release: bytes) -> None:
        """Keep the bytes; they are on disk when this returns."""
        if self._folder:
            write_file(self._path(self._folder, channel), release)
            _sync(self._folder)
        elif channel != UPDATES:
            self._kept[channel] = release

    def get(self, channel: str, round: int) -> bytes | None:
        """The bytes of a channel; of model updates, only those of this round.

        Raises:
            PrivacyError: the file is not what was stored.
        """
        if not self._folder:
            return self._kept.get(channel)
        path = self._path(self._folder, channel)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                of = int((file.metadata() or {}).get("round", "0"))
        except (SafetensorError, ValueError):
            raise PrivacyError(
                f'expected the stored "{channel}" at {path}, got something else; restore the '
                "file, or start a client with a new budget"
            ) from None
        return path.read_bytes() if channel != UPDATES or of == round else None

    @staticmethod
    def _path(folder: Path, channel: str) -> Path:
        """Where a channel's latest release is."""
        return folder / f"{channel.replace(' ', '-')}.safetensors"


def _sync(folder: Path) -> None:
    """Make a new name in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
