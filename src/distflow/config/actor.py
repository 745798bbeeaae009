"""Keys of `actor_rollout_ref.actor` and `.ref`: the policy's loss and its optimizer."""

from dataclasses import dataclass

from distflow.config.fsdp import ActorFsdpConfig, RefFsdpConfig
from distflow.config.keys import group, key
from distflow.config.names import (
    KL_TYPES,
    LOSS_AGG_MODES,
    NO_FULL_KL,
    OPTIMIZERS,
    POLICY_LOSSES,
    SCHEDULERS,
    TRAIN_ENGINES,
    WEIGHT_UPDATE_MODES,
    not_there_yet,
)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule advances per optimizer step."""

    optimizer: str = key("adamw", "optimizer", choices=OPTIMIZERS)
    lr: float = key(1e-6, "peak learning rate", minimum=0)
    weight_decay: float = key(0.01, "weight decay", minimum=0)
    betas: tuple[float, float] = key((0.9, 0.999), "decay of Adam's first and second moments, each in [0, 1)")
    eps: float = key(1e-8, "Adam's epsilon", above=0)
    scheduler: str = key("cosine_with_warmup", "shape of the learning rate", choices=SCHEDULERS)
    warmup_ratio: float = key(0.1, "share of all optimizer steps over which it rises", minimum=0, maximum=1)
    lr_warmup_steps: int = key(-1, "optimizer steps over which it rises; -1 goes by warmup_ratio", minimum=-1)
    min_lr_ratio: float = key(0.0, "what is left of it at the end, as a share of lr", minimum=0, maximum=1)


@dataclass(frozen=True)
class ActorConfig:
    """How the policy is updated."""

    strategy: str = key("torch", "train engine", choices=tuple(TRAIN_ENGINES), later=not_there_yet(TRAIN_ENGINES))
    policy_loss: str = key("vanilla", "policy loss", choices=tuple(POLICY_LOSSES), open_names=True)
    policy_loss_kwargs: dict[str, object] = key({}, "options of the chosen loss by name")
    prox: str = key(
        "recompute",
        "proximal log-probs of decoupled PPO: by a forward pass before the update, or interpolated between old and "
        "current ones by version",
        choices=("recompute", "interpolate"),
    )
    loss_agg_mode: str = key("token-mean", "how losses of tokens become one number", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm; null is data.max_response_length", above=0
    )
    clip_ratio: float = key(0.2, "how far the ratio may move from 1", above=0)
    clip_ratio_low: float | None = key(None, "how far it may fall; null is clip_ratio", above=0, maximum=1)
    clip_ratio_high: float | None = key(None, "how far it may rise; null is clip_ratio", above=0)
    clip_ratio_c: float | None = key(3.0, "dual clip: bound of the ratio where the advantage is negative", above=1)
    off_policy_mask_threshold: float | None = key(
        None,
        "sequences whose mean log π_rollout − log π is above it get no loss where A < 0; null is off",
        above=0,
    )
    entropy_coef: float = key(0.01, "coefficient of the entropy bonus; 0 is off")
    use_kl_loss: bool = key(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = key(0.001, "coefficient of that KL", minimum=0)
    kl_loss_type: str = key("low_var_kl", "estimator of that KL", choices=KL_TYPES, advice=NO_FULL_KL)
    ppo_epochs: int = key(1, "passes over a batch", minimum=1)
    ppo_mini_batch_size: int = key(256, "prompts an optimizer step", minimum=1)
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "tokens in one micro-batch; a longer sample is one of its own; null is 16384, on a CPU 4096, whose matrices "
        "its allocator keeps",
        minimum=1,
    )
    max_grad_norm: float = key(1.0, "gradients are clipped to this norm", above=0)
    model_update_frequency: int = key(1, "publish weights to the rollout every so many steps", minimum=1)
    weight_update_mode: str = key(
        "store",
        "how they go to workers that only generate (launcher=ray): through Ray's object store, or as files of "
        "the run's folder",
        choices=WEIGHT_UPDATE_MODES,
    )
    optim: OptimConfig = group(OptimConfig)
    fsdp_config: ActorFsdpConfig = group(ActorFsdpConfig)


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy; built only where a KL term is on."""

    log_prob_max_token_len_per_gpu: int | None = key(
        None, "tokens in one micro-batch of its log-probs; null is the actor's", minimum=1
    )
    fsdp_config: RefFsdpConfig = group(RefFsdpConfig)
