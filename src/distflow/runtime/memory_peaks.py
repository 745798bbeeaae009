"""Peak memory of a process, and use of its GPU, by phase."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from distflow.data.global_random_states import device_module

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


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
        self._whole = {"process": float(_peak_rss())}
        self._by_phase = _forget_peak()

    def charge(self, phase: str) -> None:
        """End a phase or a part of it: the peaks since the last call count for it."""
        if self._by_phase:
            self._seen("process", phase, float(_peak_rss()))
            _forget_peak()

        if (device := torch.accelerator.current_accelerator()) and device_module():
            self._seen(device.type, phase, float(torch.accelerator.max_memory_allocated()))
            torch.accelerator.reset_peak_memory_stats()

        for name, value in read_gpu().items():
            self._phases[f"gpu/{name}/{phase}"] = value

    def finish_step(self) -> dict[str, float]:
        """`memory/DEVICE/PHASE` of the phases since the last call, `memory/DEVICE/peak` of the
        whole process so far."""
        if not self._by_phase:
            self._whole["process"] = max(self._whole["process"], float(_peak_rss()))
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


def _peak_rss() -> int:
    """Peak resident memory since the last reset."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _forget_peak() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
