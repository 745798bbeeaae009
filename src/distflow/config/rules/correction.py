"""Rules of the rollout correction: the mismatch between rollout engine and trainer is measured
where there is one, and corrected once."""

from distflow.config.derived_settings import config_of, own_losses, trained_policies
from distflow.config.keys.algorithm import spread
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, CORRECTION, ROLLOUT, Finding, Findings
from distflow.config.rules.engines import server_of
from distflow.config.rules.sampling import samplings

_IS = f"{CORRECTION}.rollout_is"
_IS_THRESHOLD = f"{CORRECTION}.rollout_is_threshold"
_IS_NORMALIZE = f"{CORRECTION}.rollout_is_batch_normalize"
_RS = f"{CORRECTION}.rollout_rs"
_RS_THRESHOLD = f"{CORRECTION}.rollout_rs_threshold"
_CENTERING = f"{CORRECTION}.score_centering"
CENTERED = ("vanilla", "decoupled", "gpg", "cispo", "topr", "sapo", "dppo_tv", "dppo_kl", "dro")
"""Losses of which the gradient is the score times the advantage where the ratio is 1."""
CUTS = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What changes the distribution that is drawn from, with the value that does not."""
_OF_LOSS = {"behav_imp_weight_cap", "behav_imp_weight_mode", "rejection_sampling"}


def band(config: Config) -> Findings:
    """The band of importance weights is not empty."""
    correction = config.algorithm.rollout_correction
    threshold = correction.rollout_is_threshold
    if correction.rollout_is is None or not isinstance(threshold, tuple):
        return

    lower, upper = threshold
    if not 0 <= lower < upper:
        yield Finding(
            (_IS_THRESHOLD,),
            f"no weight lies between {lower:g} and {upper:g}",
            "set the lower bound to 0 or more and below the upper one, e.g. [0.5, 2.0]",
        )


def weighted_twice(config: Config) -> Findings:
    """Only one correction weighs."""
    if config.algorithm.rollout_correction.rollout_is is None:
        return

    for name in sorted(_OF_LOSS & set(config.actor_rollout_ref.actor.policy_loss_kwargs)):
        yield Finding(
            (_IS, f"{ACTOR}.policy_loss_kwargs.{name}"),
            "the rollout correction and the decoupled loss would both apply the weights",
            f"set {_IS}=null, or remove {name}: rollout_is and rollout_is_threshold replace it",
        )


def counted_bounds(config: Config) -> Findings:
    """Every rejection statistic has a bound that excludes something, and not everything."""
    names = config.algorithm.rollout_correction.rollout_rs
    bounds = config.algorithm.rollout_correction.rollout_rs_threshold
    keys = (_RS_THRESHOLD, _RS)

    if bool(names) != bool(bounds):
        off = "it is the bound of a rejection that is off"
        what = "a rejection needs a bound" if names else off
        advice = f"set {_RS}=token_k1 and {_RS_THRESHOLD}=[[0.5, 2.0]], or remove both"
        yield Finding(keys, what, advice)
        return

    if names and len(bounds) not in (1, len(names)):
        what = f"{len(bounds)} bounds for {len(names)} statistics"
        yield Finding(keys, what, "set one for each, or one for all")
        return

    for name, (lower, upper) in zip(names, spread(bounds, len(names)), strict=True):
        is_ratio = name.endswith("k1")
        least = lower or (1 / upper if is_ratio and upper > 0 else 0.0)
        if upper <= least or (lower is not None and not (is_ratio and lower > 0)):
            what = f"the bounds of {name} are no band of its values, or exclude everything"
            advice = "write e.g. [0.5, 2.0] for k1, and an upper bound above 0 alone for the others"
            yield Finding(keys, what, advice)


def interpolated_policy(config: Config) -> Findings:
    """An interpolated policy, which the loss computes, has no weights and statistics before it."""
    correction = config.algorithm.rollout_correction
    prox = f"{ACTOR}.prox"
    if config.actor_rollout_ref.actor.prox != "interpolate":
        return

    if correction.rollout_is and correction.rollout_is_batch_normalize:
        yield Finding(
            (_IS_NORMALIZE, prox),
            "the loss computes the weights of an interpolated policy for each micro-batch, so they "
            "have no mean",
            f"set {prox}=recompute, or remove it",
        )

    if correction.rollout_rs and correction.rollout_rs_threshold:
        yield Finding(
            (_RS, prox),
            "the interpolated policy is computed within the loss, too late to exclude tokens",
            f"set {prox}=recompute, or {ACTOR}.policy_loss_kwargs.rejection_sampling, e.g. "
            "{level: token, metric: kl_k3, upper: 0.1}",
        )


def ratios_of_tokens(config: Config) -> Findings:
    """Corrections of tokens need ratios of tokens."""
    correction = config.algorithm.rollout_correction
    mask = config.actor_rollout_ref.actor.off_policy_mask_threshold
    level = "algorithm.logprob_level"
    if config.algorithm.logprob_level == "token":
        return

    for key, value in (
        (_IS, correction.rollout_is),
        (_RS, correction.rollout_rs),
        (_CENTERING, correction.score_centering),
        (f"{ACTOR}.off_policy_mask_threshold", mask),
    ):
        if value:
            what = "it is of tokens, and the ratio is of actions or chunks"
            yield Finding((key, level), what, f"remove it, or set {level}=token")


def samples_of_decisions(config: Config) -> Findings:
    """If samples are decisions, no correction is of whole episodes."""
    correction = config.algorithm.rollout_correction
    level = "algorithm.sample_level"
    if config.algorithm.sample_level != "decision":
        return

    for key, names in ((_IS, (correction.rollout_is or "token",)), (_RS, correction.rollout_rs)):
        wide = [name for name in names if not name.startswith("token")]
        if wide:
            what = f"{wide[0]} is of whole episodes, and samples are decisions"
            yield Finding((key, level), what, f"use a statistic of tokens, or set {level}=episode")


def centered_losses(config: Config) -> Findings:
    """Scores are centered where the gradient of a token's loss is its score, with the advantage and
    the weight of the rollout correction as factors."""
    correction = config.algorithm.rollout_correction
    if not correction.score_centering:
        return

    for domain in (None, *own_losses(config)):
        name = config_of(config, domain).actor_rollout_ref.actor.policy_loss
        if name not in CENTERED:
            key = f"algorithm.domains.{domain}" if domain else ACTOR
            what = f"the gradient of '{name}' is not the score of each token times its advantage"
            advice = f"set {key}.policy_loss to one of {', '.join(CENTERED)}"
            yield Finding((f"{key}.policy_loss", _CENTERING), what, advice)

    if config.actor_rollout_ref.actor.policy_loss == "decoupled" and not correction.rollout_is:
        what = "the loss weighs tokens, and the score that the sampler expects would have no weight"
        yield Finding((_CENTERING, _IS), what, f"set {_IS}=token, which replaces the weights")

    if trained_policies(config):
        what = "the agents have several policies, and it is there for one"
        yield Finding((_CENTERING, f"{ROLLOUT}.agents"), what, f"set {_CENTERING}=false")


def centered_weights(config: Config) -> Findings:
    """The weight of a token is known for all that might have been drawn in its place."""
    correction = config.algorithm.rollout_correction
    mask = config.actor_rollout_ref.actor.off_policy_mask_threshold
    if not correction.score_centering:
        return

    for key, is_of_others in (
        (_IS, correction.rollout_is not in (None, "token")),
        (_IS_NORMALIZE, correction.rollout_is and correction.rollout_is_batch_normalize),
        (_RS, correction.rollout_rs),
        (f"{ACTOR}.off_policy_mask_threshold", mask is not None),
    ):
        if is_of_others:
            what = "a token's weight depends on others, so it is unknown for those not drawn"
            advice = f"remove it; {_IS}=token with {_IS_THRESHOLD}=[lower, upper] can be centered"
            yield Finding((key, _CENTERING), what, advice)

    for group, settings in samplings(config):
        cuts = [name for name in CUTS if getattr(settings, name, None) not in (None, CUTS[name])]
        if correction.rollout_is and cuts and not group.endswith("val_kwargs"):
            what = "weights are of the whole policy, and tokens are drawn from a part of it"
            yield Finding(
                (f"{group}.{cuts[0]}", _IS, _CENTERING), what, f"remove it, or set {_IS}=null"
            )


def recorded_likeliest(config: Config) -> Findings:
    """The engine records the likeliest tokens of each draw."""
    server = server_of(config)
    if config.algorithm.rollout_correction.score_centering and server is not None:
        name = config.actor_rollout_ref.rollout.name
        what = f"the engine '{name}' does not record the likeliest tokens of each draw"
        yield Finding((_CENTERING, f"{ROLLOUT}.name"), what, f"set {ROLLOUT}.name=embedded or hf")


def no_mismatch(config: Config) -> Findings:
    """There is a mismatch to correct."""
    key = "algorithm.recompute_old_log_probs"
    if config.algorithm.recompute_old_log_probs != "false":
        return

    correction = config.algorithm.rollout_correction
    for own, value in (
        (_IS, correction.rollout_is),
        (_RS, correction.rollout_rs),
        (_CENTERING, correction.score_centering),
    ):
        if value:
            what = "the old log-probs are the rollout engine's, so there is no mismatch to correct"
            yield Finding((key, own), what, f"set {key}=true, or remove {own}")


RULES = (
    no_mismatch,
    centered_losses,
    centered_weights,
    recorded_likeliest,
    band,
    weighted_twice,
    counted_bounds,
    interpolated_policy,
    ratios_of_tokens,
    samples_of_decisions,
)
