"""From the config's numbers to what an optimizer step minimises."""

from distflow.algorithms.objective import PolicyObjective, SFTObjective, ValueObjective
from distflow.algorithms.registry import PolicyLoss, check_options, find_policy_loss, takes_weights
from distflow.config import Config
from distflow.config.program import clip_range
from distflow.config.watch import plain


def policy_objective(config: Config) -> PolicyObjective:
    """The actor's loss. Raises ValueError for an unknown loss or option."""
    actor = config.actor_rollout_ref.actor
    loss, mends = find_policy_loss(actor.policy_loss), mends_mismatch(config)
    return PolicyObjective(
        loss,
        _loss_options(loss, config),
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=_scale(config, actor.loss_agg_mode, loss.seed_style),
        entropy_coef=actor.entropy_coef,
        kl_loss_type=actor.kl_loss_type if actor.use_kl_loss else None,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        weights_field="rollout_is_weights" if config.algorithm.rollout_correction.level or mends else None,
        weights_optional=mends,
        off_policy_mask_threshold=actor.off_policy_mask_threshold,
        actor={**plain(actor), **actor.policy_loss_kwargs} if loss.seed_style else None,
    )


def mends_mismatch(config: Config) -> bool:
    """Whether weights are switched on when rollout and trainer drift apart: where none are on anyhow, and the loss can
    be weighed. The decoupled loss has weights of its own."""
    name = config.actor_rollout_ref.actor.policy_loss
    if config.algorithm.rollout_correction.level or name == "decoupled":
        return False
    return takes_weights(name) and config.trust.on_mismatch == "correct"


def loss_terms(config: Config) -> tuple[str, ...]:
    """Metrics of the actor that show what each term of its loss contributed."""
    actor = config.actor_rollout_ref.actor
    names = ["pg", *(["entropy"] if actor.entropy_coef else []), *(["kl"] if actor.use_kl_loss else [])]
    return tuple(f"actor/loss_term/{name}" for name in names)


def value_objective(config: Config) -> ValueObjective:
    """The critic's loss."""
    critic = config.critic
    mode = critic.loss_agg_mode
    return ValueObjective(
        critic.cliprange_value,
        mode,
        _scale(config, mode),
        critic.value_loss,  # type: ignore[arg-type]  # the config checks it
        critic.huber_delta,
    )


def sft_objective(config: Config) -> SFTObjective:
    """Negative log-likelihood of the data's answers."""
    return SFTObjective()


def _loss_options(loss: PolicyLoss, config: Config) -> dict[str, object]:
    """Options that are keys of the actor's group come from there, the others from `policy_loss_kwargs`."""
    actor = config.actor_rollout_ref.actor
    names = [name for name in loss.options if name in dir(actor)]
    own: dict[str, object] = {}
    if {"clip_ratio", "clip_ratio_low", "clip_ratio_high"} <= set(names):
        names.remove("clip_ratio")  # with both ends given nothing reads it
        own["clip_ratio_low"], own["clip_ratio_high"] = clip_range(config)
    own |= {name: getattr(actor, name) for name in names if name not in own}
    if not loss.seed_style:
        free = [name for name in (*loss.options, *loss.selection_options) if name not in dir(actor)]
        check_options(f"policy loss '{loss.name}' (actor.policy_loss_kwargs)", actor.policy_loss_kwargs, free)
        own |= actor.policy_loss_kwargs
    return own


def _scale(config: Config, mode: str, always: bool = False) -> float | None:
    """always: for a loss that may ask for another mode than the config does."""
    if mode != "seq-mean-token-sum-norm" and not always:
        return None
    return config.actor_rollout_ref.actor.loss_scale_factor or float(config.data.max_response_length)
