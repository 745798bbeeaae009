"""Keys of `fsdp_config`, with verl's names."""

from dataclasses import dataclass

from distflow.config.keys.declare import key


@dataclass(frozen=True)
class TrainedFsdpConfig:
    """Offloading of a model that is trained; offload_policy with actor.strategy=fsdp."""

    param_offload: bool = key(False, "keep weights in host memory while they are not in use")
    optimizer_offload: bool = key(
        False, "keep the optimizer's moments in host memory between updates"
    )
    offload_policy: bool = key(
        False,
        (
            "keep weights, gradients and moments in host memory: layers are copied when they run; "
            "optimizer on the host"
        ),
        taken_by="fsdp",
    )


@dataclass(frozen=True)
class ActorFsdpConfig(TrainedFsdpConfig):
    """Sharding and offloading of the policy; fsdp_size also applies to the critic and the
    reference."""

    fsdp_size: int = key(
        -1,
        "data-parallel ranks that shard one copy of the weights; -1 is all",
        minimum=-1,
        taken_by="fsdp",
    )


@dataclass(frozen=True)
class RefFsdpConfig:
    """Offloading of the frozen reference."""

    param_offload: bool = key(
        False, "keep weights in host memory: a layer is copied to the device when it runs"
    )
