"""Builds the losses that an optimizer step minimises from the config."""

from typing import Any

from distflow.algorithms.losses.distillation import Distillation
from distflow.algorithms.objectives import (
    KTOObjective,
    PolicyObjective,
    PreferenceObjective,
    ValueObjective,
)
from distflow.algorithms.registry import (
    PolicyLoss,
    check_options,
    find_policy_loss,
    is_decoupled,
)
from distflow.algorithms.rollout_correction import Correction
from distflow.algorithms.score_centering import ScoreCentering
from distflow.builtin_names import WORKFLOWS
from distflow.config import Config
from distflow.config.derived_settings import (
    clip_range,
    config_of,
    is_rl,
    own_losses,
    trained_policies,
)
from distflow.config.keys.distill import teachers_of
from distflow.import_target import load_function


def policy_objective(config: Config, derives_old: bool = False) -> PolicyObjective:
    """The actor's loss. derives_old: its own log-probs serve as the old ones, see `may_derive_old`.
    Raises ValueError for an unknown loss or option.
    """
    actor = config.actor_rollout_ref.actor
    corrects = config.algorithm.rollout_correction.rollout_is is not None
    loss = find_policy_loss(actor.policy_loss)
    interpolates = interpolates_prox(config)

    return PolicyObjective(
        loss,
        _loss_options(loss, config),
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=_scale(config, actor.loss_agg_mode, loss.returns_scalar),
        entropy_coef=actor.entropy_coef,
        kl_loss_type=actor.kl_loss_type if actor.use_kl_loss else None,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        weights_field="rollout_is_weights" if corrects and not interpolates else None,
        interpolates=interpolates,
        derives_old=derives_old,
        correction=correction(config) if corrects and interpolates else None,
        off_policy_mask_threshold=actor.off_policy_mask_threshold,
        actor={**vars(actor), **actor.policy_loss_kwargs} if loss.returns_scalar else {},
        domains=_by_domain(config, derives_old),
        logprob_level=config.algorithm.logprob_level,
        action_dim=_unit_tokens(config) if config.algorithm.logprob_level == "action" else 1,
        centering=_centering(config),
        distillation=distillation(config),
    )


def distillation(config: Config) -> Distillation | None:
    """What teachers add to the actor's loss; None without any."""
    settings = config.distill
    if not teachers_of(settings):
        return None

    return Distillation(
        # the config checks these two
        settings.signal,  # type: ignore[arg-type]
        settings.divergence,  # type: ignore[arg-type]
        settings.beta,
        settings.rl_coef,
        settings.kl_coef,
        settings.ce_coef,
    )


def _centering(config: Config) -> ScoreCentering | None:
    settings = config.algorithm.rollout_correction
    if not settings.score_centering:
        return None
    return ScoreCentering(correction(config) if settings.rollout_is else None)


def _unit_tokens(config: Config) -> int:
    """The tokens of an action; a rule refuses workflows without actions."""
    workflow = WORKFLOWS[config.actor_rollout_ref.rollout.workflow or ""]
    count: Any = load_function(workflow.unit_tokens)
    return int(count(config))


def _by_domain(config: Config, derives_old: bool) -> dict[str, PolicyObjective]:
    """The objectives of the domains with their own policy loss."""
    found = dict[str, PolicyObjective]()
    run = find_policy_loss(config.actor_rollout_ref.actor.policy_loss)

    for domain in own_losses(config):
        try:
            each = found[domain] = policy_objective(config_of(config, domain), derives_old)
        except ValueError as error:
            raise ValueError(f"algorithm.domains.{domain}: {error}") from error

        pair = (run, each.policy_loss)
        key = f"algorithm.domains.{domain}.policy_loss={each.policy_loss.name}"

        if len({is_decoupled(loss.name) for loss in pair}) == 2:
            raise ValueError(
                f"{key}: a decoupled loss needs log-probs of a proximal policy, which are computed "
                "for all rows, so either all domains have such a loss or none; the run's is "
                f"{run.name}"
            )

        selecting = [loss.name for loss in pair if loss.selects]
        if run.name != each.policy_loss.name and selecting:
            raise ValueError(
                f"{key}: {selecting[0]} selects its tokens over the whole step, not over the rows "
                "of a domain; use another loss, or one loss for all domains"
            )

    return found


def interpolates_prox(config: Config) -> bool:
    """Whether the loss reads proximal log-probs that no forward pass computes."""
    actor = config.actor_rollout_ref.actor
    return is_decoupled(actor.policy_loss) and actor.prox == "interpolate"


def takes_rollouts(config: Config) -> bool:
    """Whether the old log-probs are the rollout engine's, so that the ratio is to the sampling
    policy."""
    if is_decoupled(config.actor_rollout_ref.actor.policy_loss):
        return False
    return config.algorithm.recompute_old_log_probs == "false"


def may_derive_old(config: Config) -> bool:
    """Whether every optimizer step updates the sampling policy: a step is one mini-batch, of
    samples of this version. The loss's own log-probs are then the old ones."""
    actor = config.actor_rollout_ref.actor
    if not is_rl(config) or is_decoupled(actor.policy_loss) or trained_policies(config):
        return False
    if config.algorithm.recompute_old_log_probs != "auto":
        return False

    waits = config.async_.max_staleness == 0 and actor.model_update_frequency == 1
    is_one_batch = actor.ppo_mini_batch_size >= config.data.train_batch_size
    return waits and actor.ppo_epochs == 1 and is_one_batch


def is_anchored(config: Config) -> bool:
    """Whether the ratio of a step's first update is 1, because it is relative to the trainer's own
    log-probs."""
    return not is_rl(config) or not (interpolates_prox(config) or takes_rollouts(config))


def correction(config: Config) -> Correction:
    """The config's importance weights: the trainer's policy over the sampling policy."""
    settings = config.algorithm.rollout_correction
    # the config checks them
    return Correction(settings.rollout_is, settings.rollout_is_threshold)  # type: ignore[arg-type]


def loss_terms(config: Config) -> tuple[str, ...]:
    """Metrics of the actor that show what each term of its loss contributed."""
    actor = config.actor_rollout_ref.actor
    added = distillation(config)
    names = ["pg"] if added is None or added.has_advantages else []
    if added is not None:
        names += added.terms
    if actor.entropy_coef:
        names.append("entropy")
    if actor.use_kl_loss:
        names.append("kl")
    settings = config.algorithm.rollout_correction
    if settings.score_centering and not settings.rollout_is:  # weights may center by themselves
        names.append("centering")
    return tuple(f"actor/loss_term/{name}" for name in names)


def preference_objective(config: Config) -> PreferenceObjective:
    algorithm = config.algorithm
    return PreferenceObjective(algorithm.preference_loss, algorithm.preference_loss_kwargs)


def kto_objective(config: Config) -> KTOObjective:
    return KTOObjective(**vars(config.algorithm.kto))


def value_objective(config: Config) -> ValueObjective:
    critic = config.critic
    return ValueObjective(
        critic.cliprange_value,
        critic.loss_agg_mode,
        _scale(config, critic.loss_agg_mode),
        critic.value_loss,  # type: ignore[arg-type]  # the config checks it
        critic.huber_delta,
    )


def _loss_options(loss: PolicyLoss, config: Config) -> dict[str, object]:
    """Options that are keys of the actor's group come from there, the others from
    `policy_loss_kwargs`."""
    actor = config.actor_rollout_ref.actor
    names = [name for name in loss.options if name in dir(actor)]
    own: dict[str, object] = {}
    if {"clip_ratio_low", "clip_ratio_high"} <= set(names):
        own["clip_ratio_low"], own["clip_ratio_high"] = clip_range(config)
    own |= {name: getattr(actor, name) for name in names if name not in own}
    if config.algorithm.rollout_correction.rollout_is and "behav_imp_weight_mode" in loss.options:
        own["behav_imp_weight_mode"] = "disabled"  # the correction provides the weights instead

    if not loss.returns_scalar:
        free = [name for name in (*loss.options, *loss.selection_options) if name not in dir(actor)]
        check_options(
            f"policy loss '{loss.name}' (actor.policy_loss_kwargs)", actor.policy_loss_kwargs, free
        )
        own |= actor.policy_loss_kwargs

    return own


def _scale(config: Config, mode: str, always: bool = False) -> float | None:
    """always: for a loss that may use a mode other than the config's."""
    if mode != "seq-mean-token-sum-norm" and not always:
        return None
    return config.actor_rollout_ref.actor.loss_scale_factor or float(
        config.data.max_response_length
    )
