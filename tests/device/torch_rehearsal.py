"""The rehearsal's device as a module of torch, `torch.rehearsal`: torch imports it by an entry
point, as it imports the backends of real devices. With `REHEARSAL_LOG` a process writes what it
waited for and copied into that folder.
"""

import atexit
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path

import rehearsal_backend
import torch
import torch.distributed as dist

NAME = "rehearsal"
Place = tuple[str, str, str]
"""What happened ("wait", "to device", "to host", "allocated", "collective"), by which operation,
and where in `src`."""


def load() -> None:
    """Once in a process."""
    if hasattr(torch, NAME):
        return

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(NAME))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("rehearsal_ccl", _over_gloo, devices=[NAME])

    if folder := os.environ.get("REHEARSAL_LOG"):
        events = Events()
        events.start()
        atexit.register(events.write, Path(folder) / f"{os.getpid()}.json")


def _num_devices() -> int:
    return int(os.environ.get("REHEARSAL_DEVICES", "1"))


class _Module(types.ModuleType):
    """What torch and its users ask a device's module for."""

    Stream = torch.Stream
    Event = torch.Event

    class device:
        def __init__(self, device: object) -> None:
            given = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
            self.index = 0 if given.index is None else given.index

        def __enter__(self) -> None:
            self.before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self.before)

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(_num_devices)
    current_device = staticmethod(torch.accelerator.current_device_index)
    set_device = staticmethod(
        lambda device: torch.accelerator.set_device_index(torch.device(NAME, device).index)
    )
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream())
    stream = staticmethod(lambda stream: stream)  # torch.Stream is a context of itself
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize())
    get_device_name = staticmethod(lambda device=None: "the rehearsal's device")
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(_num_devices()):
            rehearsal_backend.default_generator(index).manual_seed(seed)

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device: int | str | torch.device = 0) -> torch.Tensor:
        return rehearsal_backend.default_generator(torch.device(NAME, device).index).get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: int | str | torch.device = 0) -> None:
        rehearsal_backend.default_generator(torch.device(NAME, device).index).set_state(state)

    @classmethod
    def get_rng_state_all(cls) -> list[torch.Tensor]:
        return [cls.get_rng_state(index) for index in range(_num_devices())]

    @classmethod
    def set_rng_state_all(cls, states: list[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            cls.set_rng_state(state, index)


class Events:
    """Counts what happens, from `start` to `stop`."""

    def __init__(self) -> None:
        self.counts: Counter[Place] = Counter()
        self.bytes: Counter[Place] = Counter()

    def start(self, watched_bytes: int = -1) -> None:
        """watched_bytes: allocations from this size on are events too; -1 none."""
        rehearsal_backend.watch_allocations(watched_bytes)
        rehearsal_backend.listen(self._happened)

    def stop(self) -> None:
        rehearsal_backend.listen(None)
        rehearsal_backend.watch_allocations(-1)

    def __enter__(self) -> "Events":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def of(self, kind: str, file: str = "") -> Counter[Place]:
        """Those of one kind, in a file of `src`."""
        return Counter(
            {place: n for place, n in self.counts.items() if place[0] == kind and file in place[2]}
        )

    def write(self, path: Path) -> None:
        self.stop()
        path.write_text(
            json.dumps([[*place, n, self.bytes[place]] for place, n in self.counts.items()])
        )

    def _happened(self, kind: str, what: str, size: int) -> None:
        place = (kind, what, _place_in_src())
        self.counts[place] += 1
        self.bytes[place] += size


_HELPERS = ("send", "to_host", "read_numbers", "Batch.to")


def _place_in_src() -> str:
    """The innermost file and function of `src` that is running, but for the helpers that copy and
    read for others; "" in threads that run none."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        function = frame.f_code.co_qualname.split(".<locals>")[0]
        if "/distflow/" in name and "site-packages" not in name and function not in _HELPERS:
            return f"{name.rpartition('/distflow/')[2]} {function}"
        frame = frame.f_back

    return ""


def _over_gloo(store: dist.Store, rank: int, size: int, timeout: object) -> object:
    return rehearsal_backend.over_gloo(
        dist.ProcessGroupGloo(store, rank, size, timeout), rank, size
    )
