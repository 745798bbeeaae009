"""Keys of `actor_rollout_ref.actor.fsdp_config`, `critic.fsdp_config` and `actor_rollout_ref.ref.fsdp_config`: how the
weights of `actor.strategy=fsdp` lie over ranks, and what of them waits in the host's memory. The names are verl's."""

from dataclasses import dataclass

from distflow.config.keys import key


@dataclass(frozen=True)
class TrainedFsdpConfig:
    """A model that is trained."""

    param_offload: bool = key(False, "weights wait in the host's memory while nothing uses them")
    optimizer_offload: bool = key(False, "the optimizer's moments wait in the host's memory, but for updates")
    offload_policy: bool = key(
        False,
        "weights, gradients and moments stay in the host's memory: a layer is copied to the device when it runs, and "
        "the optimizer computes on the host",
    )


@dataclass(frozen=True)
class ActorFsdpConfig(TrainedFsdpConfig):
    """The policy; how it lies over ranks holds for critic and reference too."""

    fsdp_size: int = key(
        -1, "data parallel ranks that share one copy of all weights, others hold replicas of it; -1 is all", minimum=-1
    )


@dataclass(frozen=True)
class RefFsdpConfig:
    """The frozen reference."""

    param_offload: bool = key(False, "weights stay in the host's memory: a layer is copied to the device when it runs")
