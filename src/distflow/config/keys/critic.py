"""Keys of `critic`."""

from dataclasses import dataclass

from distflow.builtin_names import LOSS_AGG_MODES, VALUE_LOSSES
from distflow.config.keys.declare import group, key
from distflow.config.keys.fsdp import TrainedFsdpConfig
from distflow.config.keys.optim import OptimConfig


@dataclass(frozen=True)
class CriticModelConfig:
    """The source of the critic's weights."""

    path: str | None = key(
        None, "folder or hub id of the critic; null: the actor's with a new value head"
    )


@dataclass(frozen=True)
class CriticConfig:
    """How the critic is updated."""

    model: CriticModelConfig = group(CriticModelConfig)
    value_loss: str = key(
        "mse",
        "value loss: half the squared error, or the Huber loss",
        choices=VALUE_LOSSES,
        taken_by="train_critic",
    )
    huber_delta: float = key(
        10.0,
        "error above which the Huber loss is linear",
        above=0,
        taken_by="train_critic",
        taken_if=lambda own: own.value_loss == "huber",
    )
    cliprange_value: float = key(
        0.5, "maximum distance of a value from the old value", above=0, taken_by="train_critic"
    )
    loss_agg_mode: str = key(
        "token-mean",
        "how token losses are aggregated",
        choices=LOSS_AGG_MODES,
        taken_by="train_critic",
    )
    ppo_epochs: int = key(1, "passes over the batch of a step", minimum=1)
    ppo_mini_batch_size: int | None = key(
        None, "prompts per optimizer step; null is the actor's", minimum=1
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None, "maximum tokens in a micro-batch; null is the actor's", minimum=1
    )
    max_grad_norm: float = key(1.0, "maximum norm of the gradient", above=0)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    fsdp_config: TrainedFsdpConfig = group(TrainedFsdpConfig)
