"""Keys of `cost`."""

from dataclasses import dataclass

from distflow.config.keys.declare import key


@dataclass(frozen=True)
class CostConfig:
    """What `distflow plan` multiplies by."""

    gpu_hour: float | None = key(
        None, "price of a device for an hour, in any currency; null: no costs", minimum=0
    )
