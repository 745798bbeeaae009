"""Keys of `profiler`."""

from dataclasses import dataclass

from distflow.config.keys import key


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of kernels."""

    enable: bool = key(False, "record a trace of the devices", later=True)
