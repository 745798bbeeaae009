"""From the config's numbers to what an optimizer step minimises."""

from dataclasses import asdict

from distflow.algorithms.objective import PolicyObjective, SFTObjective, ValueObjective
from distflow.algorithms.registry import PolicyLoss, check_options, find_policy_loss
from distflow.config import Config


def policy_objective(config: Config) -> PolicyObjective:
    """The actor's loss. Raises ValueError for an unknown loss or option."""
    actor = config.actor_rollout_ref.actor
    loss = find_policy_loss(actor.policy_loss)
    numbers = {**asdict(actor), **actor.policy_loss_kwargs}
    return PolicyObjective(
        loss,
        _loss_options(loss, config),
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=_scale(config),
        entropy_coef=actor.entropy_coef,
        kl_loss_type=actor.kl_loss_type if actor.use_kl_loss else None,
        kl_loss_coef=actor.kl_loss_coef,
        weights_field="rollout_is_weights" if config.algorithm.rollout_correction.level else None,
        actor=numbers,
    )


def policy_reads(config: Config) -> tuple[str, ...]:
    """The columns that the actor's update reads; "?name" where it can do without."""
    objective = policy_objective(config)
    optional = tuple(f"?{name}" for name in objective.loss.optional)
    return ("prompt_ids", "response_ids", *objective.reads, *optional)


def policy_takes(config: Config) -> tuple[str, ...]:
    """The config keys that the actor's update uses: those of a term or an option only where it is on."""
    prefix = "actor_rollout_ref.actor."
    actor = config.actor_rollout_ref.actor
    loss = find_policy_loss(actor.policy_loss)
    names = ["policy_loss", "policy_loss_kwargs", "loss_agg_mode", "entropy_coef", "use_kl_loss", "ppo_epochs"]
    names += ["ppo_mini_batch_size", *loss.options]
    if loss.seed_style:  # it is handed the numbers of the whole group
        names += ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
    elif actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        names = [name for name in names if name != "clip_ratio"]
    if actor.use_kl_loss:
        names += ["kl_loss_coef", "kl_loss_type"]
    if actor.loss_agg_mode == "seq-mean-token-sum-norm":
        names.append("loss_scale_factor")
    return (*(prefix + name for name in names), "trainer.critic_warmup")


def loss_terms(config: Config) -> tuple[str, ...]:
    """Metrics of the actor that show what each term of its loss contributed."""
    actor = config.actor_rollout_ref.actor
    names = ["pg", *(["entropy"] if actor.entropy_coef else []), *(["kl"] if actor.use_kl_loss else [])]
    return tuple(f"actor/loss_term/{name}" for name in names)


def value_objective(config: Config) -> ValueObjective:
    """The critic's loss."""
    return ValueObjective(config.critic.cliprange_value, config.critic.loss_agg_mode, _scale(config))


def sft_objective(config: Config) -> SFTObjective:
    """Negative log-likelihood of the data's answers."""
    return SFTObjective()


def _loss_options(loss: PolicyLoss, config: Config) -> dict[str, object]:
    """Options that are keys of the actor's group come from there, the others from `policy_loss_kwargs`."""
    actor = config.actor_rollout_ref.actor
    own = {name: getattr(actor, name) for name in loss.options if hasattr(actor, name)}
    if not loss.seed_style:
        free = [name for name in loss.options if name not in own]
        check_options(f"policy loss '{loss.name}' (actor.policy_loss_kwargs)", actor.policy_loss_kwargs, free)
        own |= actor.policy_loss_kwargs
    return own


def _scale(config: Config) -> float:
    return config.actor_rollout_ref.actor.loss_scale_factor or float(config.data.max_response_length)
