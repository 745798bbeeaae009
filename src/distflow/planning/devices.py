"""The figures of a device: what it computes, moves and holds. `devices.toml` has the known ones."""

import os
import re
import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from distflow.errors import UserError, hint

GB = 10**9


@dataclass(frozen=True)
class Device:
    name: str
    flops: float
    """Per second in bfloat16, on a CPU in float32."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to another device of its machine."""
    network: float
    """Bytes per second to another machine."""
    is_cpu: bool = False
    """Whether its memory is the host's."""
    cores: int = 1
    """Cores of a CPU."""
    threads: int | None = None
    """Threads that torch uses on a CPU by default, if the environment limits them."""

    @property
    def kind(self) -> str:
        """The key of amounts that differ between a CPU and a GPU."""
        return "cpu" if self.is_cpu else "gpu"

    def shared(self, workers: int, threads: int | None = None) -> "Device":
        """The share of one of several workers that compute on the same CPU, each with so many
        threads, or its share of the cores. A GPU is never shared."""
        if not self.is_cpu:
            return self

        part = min(threads / self.cores, 1.0) if threads else 1 / workers
        return replace(
            self,
            flops=self.flops * part,
            bandwidth=self.bandwidth * part,
            memory=self.memory / workers,
        )


def find_device(name: str) -> Device:
    """A device of the table by its name, e.g. h100, or the name that torch gives it. A CPU is this
    machine's. Raises UserError for another name."""
    text = files("distflow.planning").joinpath("devices.toml").read_text("utf-8")
    entries = tomllib.loads(text)["device"]
    words = set(name.upper().replace("-", " ").split())
    found = [entry for entry in entries if entry["name"] == name.lower()]

    found += [entry for entry in entries if {word.upper() for word in entry["words"]} <= words]
    if not found:
        names = [entry["name"] for entry in entries]
        raise UserError(
            f"there is no device '{name}'{hint(name.lower(), names)}; the known ones: "
            f"{', '.join(names)}"
        )

    entry = found[0]
    device = Device(
        entry["name"],
        flops=entry["tflops"] * 1e12,
        bandwidth=entry["gbps"] * GB,
        memory=entry["memory_gb"] * GB,
        link=entry["link_gbps"] * GB,
        network=entry["network_gbps"] * GB,
    )

    return _cpu_here(device) if device.name == "cpu" else device


def _cpu_here(core: Device) -> Device:
    """This machine's CPU. core: the figures of one of its cores."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    limit = re.match(r"\s*([1-9]\d{0,3})\b", os.environ.get("OMP_NUM_THREADS", ""))

    return replace(
        core,
        flops=core.flops * cores,
        bandwidth=core.bandwidth * cores,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        is_cpu=True,
        cores=cores,
        threads=int(limit[1]) if limit else None,
    )


def device_here() -> str:
    """The name of this machine's accelerator, as its driver reports it; "cpu" if there is none."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "cpu"
