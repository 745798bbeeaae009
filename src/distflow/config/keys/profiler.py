"""Keys of `profiler`."""

from dataclasses import dataclass

from distflow.config.keys.declare import key


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of operators and kernels from torch's profiler, in the folder `profiles` of the
    run."""

    enable: bool = key(
        False,
        "record what the training thread of each worker computes, and the kernels of its device",
    )
    steps: tuple[int, ...] = key(
        (2,), "the steps that are recorded, counted from 1", taken_if=lambda own: own.enable
    )
