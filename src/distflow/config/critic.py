"""Keys of `critic`: the value model of PPO."""

from dataclasses import dataclass

from distflow.config.actor import OptimConfig
from distflow.config.fsdp import TrainedFsdpConfig
from distflow.config.keys import group, key
from distflow.config.names import LOSS_AGG_MODES, VALUE_LOSSES


@dataclass(frozen=True)
class CriticModelConfig:
    """Where the critic's weights come from."""

    path: str | None = key(None, "folder or hub id of the critic; null is the actor's, with a new value head")


@dataclass(frozen=True)
class CriticConfig:
    """How the critic is updated."""

    model: CriticModelConfig = group(CriticModelConfig)
    value_loss: str = key("mse", "loss of a value: half its squared error, or Huber's", choices=VALUE_LOSSES)
    huber_delta: float = key(10.0, "error from which Huber's loss grows linearly", above=0)
    cliprange_value: float = key(0.5, "how far a value may move from the old one", above=0)
    loss_agg_mode: str = key("token-mean", "how losses of tokens become one number", choices=LOSS_AGG_MODES)
    ppo_epochs: int = key(1, "passes over a batch", minimum=1)
    ppo_mini_batch_size: int | None = key(None, "prompts an optimizer step; null is the actor's", minimum=1)
    ppo_max_token_len_per_gpu: int | None = key(None, "tokens in one micro-batch; null is the actor's", minimum=1)
    max_grad_norm: float = key(1.0, "gradients are clipped to this norm", above=0)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    fsdp_config: TrainedFsdpConfig = group(TrainedFsdpConfig)
