"""Peak memory of a process, and use of its GPU, by phase."""

import resource
import sys
from contextlib import suppress
from io import FileIO

import torch

from distflow.data.global_random_states import device_module


class MemoryPeaks:
    """Peak memory in bytes by phase: resident memory of this process, and torch's allocations on
    the accelerator. Call `charge` at the end of each phase, `finish_step` once per step.

    Peaks are read and reset at the end of each phase. Linux keeps the peak of resident memory
    (`VmHWM`), and resets it when 5 is written to `/proc/self/clear_refs` (proc(5)); if that is
    denied, or there is no such file, peaks of phases are unknown, and only the peak of the whole
    process is reported. Reward functions are separate processes and not included; pages shared with
    other processes are.
    """

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._resident = _ResidentPeak()
        self._whole = {"process": float(self._resident.read())}
        self._by_phase = self._resident.reset()

    def charge(self, phase: str) -> None:
        """End a phase or a part of it: the peaks since the last call count for it."""
        if self._by_phase:
            self._seen("process", phase, float(self._resident.read()))
            self._resident.reset()

        if (device := torch.accelerator.current_accelerator()) and device_module():
            self._seen(device.type, phase, float(torch.accelerator.max_memory_allocated()))
            torch.accelerator.reset_peak_memory_stats()

        for name, value in read_gpu().items():
            self._phases[f"gpu/{name}/{phase}"] = value

    def finish_step(self) -> dict[str, float]:
        """`memory/DEVICE/PHASE` of the phases since the last call, `memory/DEVICE/peak` of the
        whole process so far."""
        if not self._by_phase:
            self._whole["process"] = max(self._whole["process"], float(self._resident.read()))
        found = self._phases | {
            f"memory/{device}/peak": peak for device, peak in self._whole.items()
        }
        self._phases = {}
        return found

    def _seen(self, device: str, phase: str, peak: float) -> None:
        name = f"memory/{device}/{phase}"
        self._phases[name] = max(self._phases.get(name, 0.0), peak)
        self._whole[device] = max(self._whole.get(device, 0.0), peak)


def read_gpu() -> dict[str, float]:
    """Current utilization of this process's GPU, and all memory in use there; empty if torch uses
    no GPU, or cannot query it (without the package nvidia-ml-py)."""
    if not torch.cuda.is_initialized():
        return {}

    with suppress(ImportError, RuntimeError):
        utilization = torch.cuda.utilization() / 100
        free, total = torch.accelerator.get_memory_info()
        return {"utilization": utilization, "memory_used": float(total - free)}

    return {}


class _ResidentPeak:
    """The peak of resident memory since the last reset. Its files stay open, since opening them
    takes most of the time of a reading."""

    def __init__(self) -> None:
        self._status = _opened("/proc/self/status", "rb")
        self._clear = _opened("/proc/self/clear_refs", "wb")

    def read(self) -> int:
        """Bytes."""
        if self._status is not None:
            self._status.seek(0)
            for line in self._status.read().splitlines():
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset(self) -> bool:
        """Whether it could be."""
        if self._clear is None:
            return False
        try:
            self._clear.write(b"5")
        except OSError:
            return False
        return True


def _opened(path: str, mode: str) -> FileIO | None:
    with suppress(OSError):
        return FileIO(path, mode)
    return None
