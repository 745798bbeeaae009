"""Rules of the algorithm: KL terms, losses, corrections, dynamic sampling."""

from collections.abc import Iterator

from distflow.builtin_names import FILTER_METRICS, POLICY_LOSSES
from distflow.config.derived_settings import is_rl
from distflow.config.keys.algorithm import spread
from distflow.config.keys.schema import Config
from distflow.config.per_domain import filters_groups, reward_functions
from distflow.config.rules import ACTOR, ROLLOUT, Finding

_CONTROL = "algorithm.kl_ctrl"
_CORRECTION = "algorithm.rollout_correction"


def kl_control(config: Config) -> Iterator[Finding]:
    """The controller of the KL in the reward is whole, and there is something to control."""
    algorithm, control = config.algorithm, config.algorithm.kl_ctrl
    adaptive = control.type == "adaptive"
    targets = (("target_kl", control.target_kl, "0.1"), ("horizon", control.horizon, "10000"))
    for name, value, example in targets:
        if adaptive and value is None:
            yield Finding(
                (f"{_CONTROL}.{name}", f"{_CONTROL}.type"),
                "the adaptive controller needs it",
                f"set {_CONTROL}.{name}={example}, or {_CONTROL}.type=fixed",
            )
    if adaptive and not algorithm.use_kl_in_reward:
        yield Finding(
            (f"{_CONTROL}.type", "algorithm.use_kl_in_reward"),
            "there is no KL in the reward to control",
            "set algorithm.use_kl_in_reward=true, or remove it",
        )


def kl_terms_count(config: Config) -> Iterator[Finding]:
    """A term that is on has a weight."""
    actor = config.actor_rollout_ref.actor
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0:
        yield Finding(
            (f"{_CONTROL}.kl_coef", "algorithm.use_kl_in_reward"),
            "the KL in the reward is on with the coefficient 0",
            "set algorithm.use_kl_in_reward=false, or a coefficient such as 0.001",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield Finding(
            (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"),
            "the KL in the loss is on with the coefficient 0",
            f"set {ACTOR}.use_kl_loss=false, or a coefficient such as 0.001",
        )


def clip_ratios(config: Config) -> Iterator[Finding]:
    """The clip leaves the ratio room."""
    actor = config.actor_rollout_ref.actor
    loss = POLICY_LOSSES.get(actor.policy_loss)
    cuts = loss is not None and loss.clips and not loss.divergence
    if cuts and actor.clip_ratio_low is None and actor.clip_ratio > 1:
        yield Finding(
            (f"{ACTOR}.clip_ratio",),
            f"the ratio would be clipped at 1 - {actor.clip_ratio:g} < 0, which it never reaches",
            f"set {ACTOR}.clip_ratio=0.2, or {ACTOR}.clip_ratio_low to 1 or less",
        )


def corrections(config: Config) -> Iterator[Finding]:
    """The band of weights has room, and the correction is not done twice."""
    correction = config.algorithm.rollout_correction
    threshold = correction.rollout_is_threshold
    if correction.rollout_is is None:
        return
    if isinstance(threshold, tuple) and not 0 <= threshold[0] < threshold[1]:
        yield Finding(
            (f"{_CORRECTION}.rollout_is_threshold",),
            f"no weight lies between {threshold[0]:g} and {threshold[1]:g}",
            "set the lower bound to 0 or more and below the upper one, e.g. [0.5, 2.0]",
        )
    own = {"behav_imp_weight_cap", "behav_imp_weight_mode", "rejection_sampling"}
    for name in sorted(own & set(config.actor_rollout_ref.actor.policy_loss_kwargs)):
        yield Finding(
            (f"{_CORRECTION}.rollout_is", f"{ACTOR}.policy_loss_kwargs.{name}"),
            "the correction weighs in place of the decoupled loss, both would weigh twice",
            f"set {_CORRECTION}.rollout_is=null, or take {name} out: rollout_is and rollout_is_threshold say the same",
        )
    if _interpolates(config) and correction.rollout_is_batch_normalize:
        yield Finding(
            (f"{_CORRECTION}.rollout_is_batch_normalize", f"{ACTOR}.prox"),
            "weights of an interpolated policy are made within the loss, one micro-batch after another, and have no "
            "mean over the step beforehand",
            f"set {ACTOR}.prox=recompute, or remove it",
        )


def old_log_probs(config: Config) -> Iterator[Finding]:
    """A ratio to the policy that sampled is corrected by nothing more."""
    correction, key = config.algorithm.rollout_correction, "algorithm.recompute_old_log_probs"
    if config.algorithm.recompute_old_log_probs != "false":
        return
    for name, on in (("rollout_is", correction.rollout_is is not None), ("rollout_rs", bool(correction.rollout_rs))):
        if on:
            yield Finding(
                (key, f"{_CORRECTION}.{name}"),
                "the old log-probs are the rollout's own, so that its policy and the old one differ nowhere",
                f"set {key}=true, or take {_CORRECTION}.{name} out",
            )


def _interpolates(config: Config) -> bool:
    return config.actor_rollout_ref.actor.prox == "interpolate"


def rejection(config: Config) -> Iterator[Finding]:
    """Every statistic has a bound of its kind, and there is a mismatch to measure."""
    correction = config.algorithm.rollout_correction
    names, bounds = correction.rollout_rs, correction.rollout_rs_threshold
    both = (f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs")
    if bool(names) != bool(bounds):
        what = "a rejection needs a bound" if names else "it bounds a rejection that is off"
        yield Finding(both, what, f"set {both[1]}=token_k1 and {both[0]}=[[0.5, 2.0]], or remove both")
        return
    if len(set(names)) < len(names):
        yield Finding(both[1:], "a statistic is named twice", "name it once")
    if len(bounds) not in (1, len(names)) and names:
        yield Finding(both, f"{len(bounds)} bounds for {len(names)} statistics", "give one for each, or one for all")
        return
    for name, (lower, upper) in zip(names, spread(bounds, len(names)), strict=True):
        is_ratio = name.endswith("k1")
        if lower is not None and not is_ratio:
            yield Finding(both, f"{name} is never negative and has no lower bound", f"write {upper:g} alone for it")
        elif upper <= 0 or (lower is not None and not 0 < lower <= upper):
            yield Finding(both, f"the bounds of {name} leave nothing", "write them as e.g. [0.5, 2.0], both above 0")
        elif is_ratio and lower is None and upper < 1:
            yield Finding(
                both, f"nothing lies between 1/{upper:g} and {upper:g}, the bounds of {name}", "set 1 or more"
            )
    if names and _interpolates(config):
        yield Finding(
            (both[1], f"{ACTOR}.prox"),
            "an interpolated policy is known within the loss only, too late to leave tokens out",
            f"set {ACTOR}.prox=recompute, or {ACTOR}.policy_loss_kwargs.rejection_sampling, e.g. "
            "{level: token, metric: kl_k3, upper: 0.1}",
        )


def dynamic_sampling(config: Config) -> Iterator[Finding]:
    """A filter compares the samples of a group by a score that there is."""
    filters = config.algorithm.filter_groups
    if not filters_groups(config) or not is_rl(config):
        return
    if filters.enable and config.actor_rollout_ref.rollout.n == 1:
        yield Finding(
            ("algorithm.filter_groups.enable", f"{ROLLOUT}.n"),
            "the only sample of a group equals itself: every group would be dropped",
            f"set {ROLLOUT}.n=8, or algorithm.filter_groups.enable=false",
        )
    names = {part.name for parts in reward_functions(config).values() for part in parts}
    if filters.metric not in {*FILTER_METRICS, *names}:
        yield Finding(
            ("algorithm.filter_groups.metric", "reward.functions"),
            f"no reward function is called '{filters.metric}'",
            f"set it to {' or '.join(FILTER_METRICS)}, or to one of {', '.join(sorted(names))}",
        )


def oversampling(config: Config) -> Iterator[Finding]:
    """Groups that are ended early are so by an order that one process at staleness 0 has."""
    share = config.algorithm.filter_groups.oversampling
    if not is_rl(config) or share == 0:
        return
    others = {
        "async.max_staleness": (
            config.async_.max_staleness != 0,
            "ahead of training another group starts whenever one is dropped, and a long answer holds up no step before "
            "it is due: there is no end of a step to reach earlier",
        ),
        "trainer.launcher": (
            config.trainer.launcher != "local",
            "which groups come first is decided by the order in which one engine answers, and over Ray there may be "
            "several",
        ),
    }
    for key, (is_other, why) in others.items():
        if is_other:
            yield Finding(
                ("algorithm.filter_groups.oversampling", key),
                why,
                f"set algorithm.filter_groups.oversampling=0, or leave out {key}",
            )


RULES = (
    kl_control,
    kl_terms_count,
    clip_ratios,
    corrections,
    old_log_probs,
    rejection,
    dynamic_sampling,
    oversampling,
)
