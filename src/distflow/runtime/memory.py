"""Peak memory by phase: resident memory of this process, and what torch allocated on the accelerator.

Peaks are read and reset at every border of a phase. Linux keeps that of resident memory (`VmHWM`), and forgets it when
5 is written to `/proc/self/clear_refs` (proc(5)); where that is refused, or there is no such file, no peak can be told
from an earlier phase's, and only that of the whole process is given. Verifiers are processes of their own and are not
in it; pages shared with other processes are.
"""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryPeaks:
    """`charge` at the end of each phase, `finish_step` once a step. Bytes."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._whole = {"process": float(_peak_rss())}
        self._by_phase = _forget_peak()

    def charge(self, phase: str) -> None:
        """The phase, or a part of it, is over: the peaks since the last call were its own."""
        if self._by_phase:
            self._seen("process", phase, float(_peak_rss()))
            _forget_peak()
        if torch.cuda.is_initialized():
            self._seen("cuda", phase, float(torch.cuda.max_memory_allocated()))
            torch.cuda.reset_peak_memory_stats()

    def finish_step(self) -> dict[str, float]:
        """`memory/DEVICE/PHASE` of the phases since the last call, `memory/DEVICE/peak` of the whole process so far."""
        if not self._by_phase:
            self._whole["process"] = max(self._whole["process"], float(_peak_rss()))
        found = self._phases | {f"memory/{device}/peak": peak for device, peak in self._whole.items()}
        self._phases = {}
        return found

    def _seen(self, device: str, phase: str, peak: float) -> None:
        name = f"memory/{device}/{phase}"
        self._phases[name] = max(self._phases.get(name, 0.0), peak)
        self._whole[device] = max(self._whole.get(device, 0.0), peak)


def _peak_rss() -> int:
    """Since it was last forgotten."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> bool:
    """Whether the system allows it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
