"""The group `actor_rollout_ref`, and its keys of the reference."""

from dataclasses import dataclass

from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.declare import group, key
from distflow.config.keys.fsdp import RefFsdpConfig
from distflow.config.keys.model import ModelConfig
from distflow.config.keys.rollout import RolloutConfig


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy; built only if a KL term or a preference loss reads it."""

    path: str | None = key(
        None, "folder or hub id of the reference; null is the policy at the start of the run"
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "maximum tokens in a micro-batch; null is the actor's", minimum=1
    )
    fsdp_config: RefFsdpConfig = group(RefFsdpConfig, taken_by="sharded_ref")


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """The policy: its model, its update, its rollout, its reference."""

    model: ModelConfig = group(ModelConfig)
    actor: ActorConfig = group(ActorConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    ref: RefConfig = group(RefConfig, taken_by="ref")
