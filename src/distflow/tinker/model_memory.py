"""Which of the models are in memory: beyond a limit the longest unused wait on disk."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from distflow.device_transfer import free_bytes
from distflow.tinker.messages import BadRequest

_CONTAINER = Path("/sys/fs/cgroup")


class Model(Protocol):
    """One that may leave memory and comes back equal."""

    num_bytes: int
    """In memory, when it trains."""

    def to_disk(self, folder: Path) -> None:
        """After an error it is in memory, as before."""

    def from_disk(self, folder: Path) -> None: ...


class ModelMemory:
    """Used by one thread."""

    def __init__(self, max_bytes: float, folder: Path) -> None:
        """folder: those on disk are in its folder `.idle`, without what a killed server left."""
        self._max_bytes = max_bytes
        self._folder = folder / ".idle"
        self._there: dict[str, Model] = {}
        """Those in memory, the longest unused first."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def use(self, name: str, model: Model) -> None:
        """Have it in memory. Raises BadRequest for a model that is too large, OSError of a full
        disk, each with nothing changed."""
        if model.num_bytes > self._max_bytes:
            raise BadRequest(
                f"the model needs {model.num_bytes / 1e9:,.2f} GB to train, and this server has "
                f"{self._max_bytes / 1e9:,.2f} GB for models: choose an adapter of a smaller rank"
            )

        is_there = self._there.pop(name, None) is not None
        if not is_there:
            self._make_room(model.num_bytes)
        self._there[name] = model

        place = self._folder / name
        if not is_there and place.exists():
            # it uses the memory itself
            model.from_disk(place)
            shutil.rmtree(place)

    def forget(self, name: str) -> bool:
        """Whether it was in memory."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        return self._there.pop(name, None) is not None

    def _make_room(self, num_bytes: int) -> None:
        while sum(each.num_bytes for each in self._there.values()) > self._max_bytes - num_bytes:
            name, unused = next(iter(self._there.items()))
            place = self._folder / name
            place.mkdir(parents=True, exist_ok=True)
            try:
                unused.to_disk(place)
            except BaseException:
                shutil.rmtree(place)
                raise
            del self._there[name]


def max_model_bytes(device: torch.device, num_processes: int) -> float:
    """A share of what is free: passes need memory too, and on an accelerator, which one process
    has, the sampler's cache takes half of what it finds. num_processes: of this machine."""
    if device.type != "cpu":
        return 0.3 * free_bytes(device)

    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert available is not None
    free = int(available[1]) * 1024
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit = int((_CONTAINER / "memory.max").read_text())
        free = min(free, limit - int((_CONTAINER / "memory.current").read_text()))

    return 0.5 * free / num_processes
