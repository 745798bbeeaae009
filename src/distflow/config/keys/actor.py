"""Keys of `actor_rollout_ref.actor`."""

from dataclasses import dataclass

from distflow.builtin_names import (
    KL_TYPES,
    LOSS_AGG_MODES,
    NO_FULL_KL,
    POLICY_LOSSES,
    TRAIN_ENGINES,
    WEIGHT_UPDATE_MODES,
    not_there_yet,
)
from distflow.config.keys.declare import BY_NAME, group, key
from distflow.config.keys.fsdp import ActorFsdpConfig
from distflow.config.keys.optim import OptimConfig


@dataclass(frozen=True)
class ActorConfig:
    """How the policy is updated."""

    strategy: str = key(
        "torch", "train engine", choices=tuple(TRAIN_ENGINES), later=not_there_yet(TRAIN_ENGINES)
    )
    policy_loss: str = key(
        "vanilla",
        "policy loss",
        choices=tuple(POLICY_LOSSES),
        open_names=True,
        taken_by=(
            "train_actor",
            "compute_old_log_prob",
            "correct_mismatch",
            "reject_mismatch",
            "select_tokens",
        ),
    )
    policy_loss_kwargs: dict[str, object] = key(
        {}, "options of the chosen loss by name", taken_by=("train_actor", "select_tokens")
    )
    prox: str = key(
        "recompute",
        (
            "proximal log-probs of decoupled PPO: a forward pass before the update, or "
            "interpolated by weight version"
        ),
        choices=("recompute", "interpolate"),
        taken_by="decoupled_loss",
    )
    loss_agg_mode: str = key(
        "token-mean",
        "how token losses are aggregated",
        choices=LOSS_AGG_MODES,
        taken_by="train_actor",
    )
    loss_scale_factor: float | None = key(
        None,
        "divisor in seq-mean-token-sum-norm; null is data.max_response_length",
        above=0,
        taken_by="summed_loss",
    )
    clip_ratio: float = key(0.2, "maximum distance of the ratio from 1", above=0, taken_by=BY_NAME)
    clip_ratio_low: float | None = key(
        None,
        "maximum decrease of the ratio; null is clip_ratio",
        above=0,
        maximum=1,
        taken_by=BY_NAME,
    )
    clip_ratio_high: float | None = key(
        None, "maximum increase of the ratio; null is clip_ratio", above=0, taken_by=BY_NAME
    )
    clip_ratio_c: float | None = key(
        3.0,
        "dual clip: upper bound of the ratio for negative advantages",
        above=1,
        taken_by=BY_NAME,
    )
    off_policy_mask_threshold: float | None = key(
        None,
        (
            "exclude a sequence with A < 0 from the loss if its mean log π_rollout − log π is "
            "above this; null is off"
        ),
        above=0,
        taken_by="train_actor",
    )
    entropy_coef: float = key(
        0.01, "coefficient of the entropy bonus; 0 is off", taken_by="train_actor"
    )
    use_kl_loss: bool = key(
        False, "add the KL to the reference to the loss", taken_by="train_actor"
    )
    kl_loss_coef: float = key(
        0.001,
        "coefficient of the KL in the loss",
        minimum=0,
        taken_by="train_actor",
        taken_if=lambda own: own.use_kl_loss,
    )
    kl_loss_type: str = key(
        "low_var_kl",
        "estimator of the KL in the loss",
        choices=KL_TYPES,
        advice=NO_FULL_KL,
        taken_by="train_actor",
        taken_if=lambda own: own.use_kl_loss,
    )
    ppo_epochs: int = key(1, "passes over the batch of a step", minimum=1, taken_by="rl")
    ppo_mini_batch_size: int = key(
        256, "prompts per optimizer step", minimum=1, taken_by=("actor", "critic")
    )
    # A CPU needs less: its allocator keeps the memory.
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        (
            "maximum tokens in a micro-batch; a longer sample is its own micro-batch; null is "
            "16384, on a CPU 4096"
        ),
        minimum=1,
        taken_by=("actor", "critic", "ref", "scoring_model"),
    )
    max_grad_norm: float = key(1.0, "maximum norm of the gradient", above=0, taken_by="actor")
    model_update_frequency: int = key(
        1, "steps between weight syncs to the rollout engines", minimum=1, taken_by="rollout"
    )
    weight_update_mode: str = key(
        "store",
        "weight sync to workers that only generate (launcher=ray): Ray's object store, files in "
        "the run's folder, or process groups (gloo; nccl between GPUs)",
        choices=WEIGHT_UPDATE_MODES,
        taken_by="remote_rollout",
    )
    optim: OptimConfig = group(OptimConfig, taken_by="actor")
    fsdp_config: ActorFsdpConfig = group(ActorFsdpConfig, taken_by="actor")
