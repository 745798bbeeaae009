"""Keys of `algorithm`: advantages, KL in the reward, corrections and filters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distflow.builtin_names import (
    ESTIMATORS,
    KL_TYPES,
    NO_FULL_KL,
    PIPELINES,
    PREFERENCE_LOSSES,
    ROLLOUT_RS,
)
from distflow.config.compose.typed_values import (
    Differing,
    Mismatch,
    convert,
    nested,
    parse_band,
    parse_differing,
    parse_share_band,
    show,
)
from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.declare import BY_NAME, collect, group, key

Bounds = tuple[float | None, float]


def parse_statistics(value: object) -> object:
    """A list of names, or names separated by commas as in verl. Raises Mismatch."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return convert(names, tuple[str, ...])


def parse_bounds(value: object) -> tuple[Bounds, ...]:
    """`upper` or `[lower, upper]` for each statistic, or verl's string, e.g. "0.5_2.0,0.1". Raises
    Mismatch."""
    if value is None:
        return ()

    return tuple(_parse_bound(entry) for entry in _parts(value, ","))


def parse_threshold(value: object) -> float | tuple[float, float]:
    """`upper`, or a band as `[lower, upper]` or verl's string "lower_upper". Raises Mismatch."""
    try:
        lower, upper = _parse_bound(value)
    except Mismatch:
        what = f"is {show(value)}, neither a number nor a band"
        raise Mismatch(what, "write an upper bound such as 2.0, or [0.5, 2.0] for a band") from None
    return upper if lower is None else (lower, upper)


def _parts(value: object, separator: str) -> Sequence[Any]:
    """Of a string or a list; of another value itself alone."""
    if isinstance(value, str):
        return value.split(separator)
    if isinstance(value, list | tuple):
        return value
    return [value]


def _parse_bound(entry: object) -> Bounds:
    parts = _parts(entry, "_")
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError, OverflowError):
        numbers = []

    if (
        len(numbers) != len(parts)
        or len(numbers) not in (1, 2)
        or not all(map(math.isfinite, numbers))
    ):
        advice = "write an upper bound such as 0.1, or [0.5, 2.0] for a band"
        raise Mismatch(f"has the entry {show(entry)}, which is no bound", advice)
    if len(numbers) == 2:
        return (numbers[0], numbers[1])

    return (None, numbers[0])


def spread(bounds: tuple[Bounds, ...], count: int) -> tuple[Bounds, ...]:
    """One bound for each statistic; a single one is repeated."""
    return bounds * count if len(bounds) == 1 else bounds


LEVELS = ("batch", "group", "running")


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: str = key("fixed", "fixed, or adapted to target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(
        0.001, "coefficient of the penalty; its initial value if adaptive", minimum=0
    )
    target_kl: float | None = key(
        None,
        "target KL per token of the adaptive controller",
        above=0,
        taken_if=lambda own: own.type == "adaptive",
    )
    horizon: int | None = key(
        None,
        "samples over which the adaptive controller reaches the target",
        minimum=1,
        taken_if=lambda own: own.type == "adaptive",
    )
    mean: str = key(
        "token",
        "KL that is controlled: mean over tokens, or mean of the sequences' means (verl)",
        choices=("token", "sequence"),
        taken_if=lambda own: own.type == "adaptive",
    )


@dataclass(frozen=True)
class NormConfig:
    """Normalisation by the batch, by groups (AReaL), or by the moments of all rewards so far
    (ROLL)."""

    mean_level: str | None = key(
        None, "level of the subtracted mean; null subtracts none", choices=LEVELS
    )
    mean_leave1out: bool = key(
        False,
        "exclude a value from the mean that is subtracted from it",
        taken_if=lambda own: own.mean_level is not None,
    )
    std_level: str | None = key(
        None, "level of the standard deviation; null does not divide", choices=LEVELS
    )
    std_unbiased: bool = key(
        True,
        "use the unbiased standard deviation",
        taken_if=lambda own: own.std_level is not None,
    )
    eps: float = key(
        1e-5,
        "added to the standard deviation",
        above=0,
        taken_if=lambda own: own.std_level is not None,
    )
    group_size: int | None = key(
        None,
        "number of samples normalised together; null is rollout.n",
        minimum=2,
        taken_if=lambda own: "group" in (own.mean_level, own.std_level),
    )


def is_on(norm: NormConfig) -> bool:
    """Whether the normalisation subtracts a mean or divides by a standard deviation."""
    return norm.mean_level is not None or norm.std_level is not None


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection for the mismatch between rollout engine and trainer."""

    rollout_is: str | None = key(
        None,
        "level of the importance weights; null is off",
        choices=("token", "sequence", "geometric"),
        taken_by=("train_actor", "correct_mismatch"),
    )
    rollout_is_threshold: float | tuple[float, float] = key(
        2.0,
        (
            "upper bound to which weights are truncated; or [lower, upper], outside of which "
            "weights are 0 (IcePop)"
        ),
        above=0,
        parse=parse_threshold,
        taken_by=("train_actor", "correct_mismatch"),
        taken_if=lambda own: own.rollout_is is not None,
    )
    rollout_is_batch_normalize: bool = key(
        False,
        "divide the weights by their mean over the step, after rollout_is_threshold",
        taken_by="correct_mismatch",
        taken_if=lambda own: own.rollout_is is not None,
    )
    score_centering: bool = key(
        False,
        "subtract the score that the sampler expects from that of each token, with its weight",
        taken_by="train_actor",
    )
    score_centering_top_k: int = key(
        20,
        "likeliest tokens of which the engine records the sampler's log-probs",
        minimum=1,
        taken_by="train_actor",
        taken_if=lambda own: own.score_centering,
    )
    rollout_rs: tuple[str, ...] = key(
        (),
        "mismatch statistics by which tokens or sequences are excluded from the loss; empty is off",
        choices=ROLLOUT_RS,
        parse=parse_statistics,
        taken_by="reject_mismatch",
    )
    rollout_rs_threshold: tuple[Bounds, ...] = key(
        (),
        (
            "bound of each statistic: upper, or for k1 [lower, upper] of rollout / trainer; one "
            "entry applies to all"
        ),
        parse=parse_bounds,
        # A band is a list, since YAML reads the string 1_2 as 12.
        plain=lambda bounds: [
            upper if lower is None else [lower, upper] for lower, upper in bounds
        ],
        taken_by="reject_mismatch",
    )


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling: groups without a learning signal, or that a function rejects, are dropped
    and replaced."""

    enable: bool = key(
        False,
        "drop groups without a gradient signal and refill the batch",
        taken_by="dynamic_sampling",
    )
    metric: str = key(
        "acc",
        (
            "value that must vary in a group: acc (no penalties), score or seq_reward (with them), "
            "or a reward function"
        ),
        taken_by="dynamic_sampling",
    )
    mean_range: tuple[float, float] | None = key(
        None,
        "[low, high]: also drop groups with a mean metric outside; null is off",
        parse=parse_band,
        taken_by="dynamic_sampling",
    )
    should_accept: str | None = key(
        None,
        "module:function or file.py:function of a group's columns; the group is dropped and "
        "replaced if it returns False, or a str, the reason",
        taken_by="filter_groups",
    )
    max_num_gen_batches: int = key(
        10, "maximum number of prompt batches for one step", minimum=1, taken_by="rl"
    )
    when_exhausted: str = key(
        "error",
        "after that many batches: stop, or continue with the groups so far",
        choices=("error", "continue"),
        taken_by="rl",
    )
    oversampling: float = key(
        0.0,
        (
            "extra prompts in flight, as a share of those missing; unfinished ones come first in "
            "the next step"
        ),
        minimum=0,
        taken_by="oversampling",
    )


DIFFERING = (
    "adv_estimator",
    "adv_estimator_kwargs",
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "scale_rewards",
    "adv_epsilon",
    "reward_shift",
    "reward_scale",
    "reward_norm",
    "reward_clip",
    "adv_norm",
    "advantage_clip",
    "bootstrap_truncated",
    "use_kl_in_reward",
    "kl_penalty",
    "kl_ctrl",
    "mask_truncated",
    "mask_max_turns",
    "difficulty_mask",
    "difficulty_weight",
    "length_weight",
    "mask_long_errors",
    "mask_type",
    "whiten_rewards",
)
"""Keys of `algorithm` that a domain may override."""
DIFFERING_LOSS = (
    "policy_loss",
    "policy_loss_kwargs",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
)
"""Keys of `actor_rollout_ref.actor` that a domain may override."""


def parse_domains(value: object) -> Differing:
    """Settings by domain from plain data. Raises Mismatch."""
    form = "write e.g. {code: {adv_estimator: reinforce, reward_norm: {mean_level: running}}}"
    keys = {
        name: info
        for name, info in collect(AlgorithmConfig()).items()
        if name.partition(".")[0] in DIFFERING
    }
    keys |= {name: info for name, info in collect(ActorConfig()).items() if name in DIFFERING_LOSS}

    return parse_differing(value, keys, form)


@dataclass(frozen=True)
class EmbodiedSamplingConfig:
    """Which groups of episodes the pipeline embodied_srpo keeps; others are replaced."""

    filter_accuracy: bool = key(
        False, "drop groups whose share of successes is out of bounds", taken_by="embodied_sampling"
    )
    accuracy_lower_bound: float = key(
        0.1,
        "of that share",
        minimum=0,
        maximum=1,
        taken_by="embodied_sampling",
        taken_if=lambda own: own.filter_accuracy,
    )
    accuracy_upper_bound: float = key(
        0.9,
        "of that share",
        minimum=0,
        maximum=1,
        taken_by="embodied_sampling",
        taken_if=lambda own: own.filter_accuracy,
    )
    filter_truncated: bool = key(
        False,
        "drop groups with an episode that reached the simulator's time limit",
        taken_by="embodied_sampling",
    )
    oversample_factor: float = key(
        1.0,
        (
            "groups in flight, as a multiple of those that a step lacks; unfinished ones come "
            "first in the next step"
        ),
        minimum=1,
        taken_by="embodied_srpo",
    )


@dataclass(frozen=True)
class KTOConfig:
    """The loss over labelled responses (arXiv:2402.01306)."""

    beta: float = key(0.1, "factor of log-ratios: higher stays nearer to the reference", above=0)
    desirable_weight: float = key(1.0, "weight of desirable responses", above=0)
    undesirable_weight: float = key(1.0, "weight of undesirable responses", above=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str = key(
        "grpo",
        "advantage estimator",
        choices=tuple(ESTIMATORS),
        open_names=True,
        taken_by=("compute_advantage", "compute_reward", "take_scores", "mask_samples"),
    )
    adv_estimator_kwargs: dict[str, object] = key(
        {}, "options of the chosen estimator by name", taken_by="compute_advantage"
    )
    workflow_type: str = key(
        "DEFAULT",
        "selects the pipeline if dag.pipeline is null; DEFAULT: by adv_estimator",
        choices=("DEFAULT", *filter(None, (each.workflow_type for each in PIPELINES.values()))),
        parse=lambda name: str(name).upper(),
        taken_by="builtin_pipeline",
    )
    gamma: float = key(1.0, "discount from token to token", minimum=0, maximum=1, taken_by=BY_NAME)
    lam: float = key(0.95, "lambda of GAE", minimum=0, maximum=1, taken_by=BY_NAME)
    norm_adv_by_std_in_grpo: bool = key(
        True, "divide by the group's standard deviation; false is Dr. GRPO", taken_by=BY_NAME
    )
    scale_rewards: str | None = key(
        None,
        (
            "standard deviation that GRPO divides by: group, batch or none; null: by "
            "norm_adv_by_std_in_grpo"
        ),
        choices=("group", "batch", "none"),
        taken_by=BY_NAME,
    )
    adv_epsilon: float = key(
        1e-6, "added to the standard deviation that GRPO divides by", above=0, taken_by=BY_NAME
    )
    reward_shift: float = key(
        0.0, "added to the score of each sample, before anything else", taken_by="normalize_rewards"
    )
    reward_scale: float = key(
        1.0, "factor of the shifted score", above=0, taken_by="normalize_rewards"
    )
    reward_norm: NormConfig = group(NormConfig, taken_by="normalize_rewards")
    reward_clip: float | None = key(
        None,
        "bound of a sample's |reward|, applied after reward_norm",
        above=0,
        taken_by="clip_rewards",
    )
    whiten_rewards: bool = key(
        False,
        "whiten token rewards over the batch, after the KL penalty",
        taken_by="whiten_rewards",
    )
    adv_norm: NormConfig = group(NormConfig, taken_by="normalize_advantages")
    advantage_clip: float | None = key(
        None,
        "bound of a token's |advantage|, applied after adv_norm",
        above=0,
        taken_by="clip_advantages",
    )
    mask_truncated: bool = key(
        False,
        "exclude responses that were cut off at the length limit from the loss",
        taken_by="mask_samples",
    )
    mask_max_turns: bool = key(
        False,
        "exclude episodes that reached their limit of turns from the loss",
        taken_by="mask_samples",
    )
    mask_long_errors: int | None = key(
        None,
        "exclude incorrect responses of at least this many tokens from the loss",
        minimum=1,
        taken_by="mask_samples",
    )
    difficulty_mask: tuple[float, float] | None = key(
        None,
        "[low, high]: train on groups with low < share of correct responses < high",
        parse=parse_share_band,
        taken_by="mask_samples",
    )
    mask_type: str = key(
        "loss",
        "exclude masked responses from the loss, or from all: baselines and means too",
        choices=("loss", "all"),
        taken_by="mask_samples",
    )
    difficulty_weight: tuple[float, float] | None = key(
        None,
        (
            "[easiest, hardest]: weight of advantages, linear in the group's share of incorrect "
            "responses"
        ),
        taken_by="weigh_samples",
    )
    length_weight: tuple[float, float] | None = key(
        None,
        (
            "[shortest, longest]: weight of advantages, linear in the response's length within the "
            "batch's range"
        ),
        taken_by="weigh_samples",
    )
    domains: Differing = key(
        {},
        (
            "domain → keys of algorithm and of the policy loss that differ in it; such a domain is "
            "processed separately"
        ),
        parse=parse_domains,
        plain=lambda domains: {name: nested(values) for name, values in domains.items()},
        taken_by=("compute_advantage", "compute_reward", "take_scores", "train_actor"),
    )
    allow_group_of_one: bool = key(
        False,
        "accept rollout.n=1 with an estimator that compares the samples of a group",
        taken_by="compute_advantage",
    )
    agent_rewards: str = key(
        "shared",
        "source of an agent's advantages: the episode's score, the agent's own, or the margin of "
        "its own over the mean of the others'",
        choices=("shared", "own", "margin"),
        taken_by=("compute_advantage", "run_workflow"),
    )
    logprob_level: str = key(
        "token",
        "what has a ratio in the policy loss: each token, or each action or chunk of actions in a "
        "simulator, whose log-prob is the sum over their tokens",
        choices=("token", "action", "chunk"),
        taken_by="train_actor",
    )
    reward_level: str = key(
        "token",
        "where an episode's score in a simulator is: on its last token, or each env step's part on "
        "the last token of its action, or each chunk's on that of the chunk",
        choices=("token", "action", "chunk"),
        taken_by=("place_rewards", "srpo_reward"),
    )
    sample_level: str = key(
        "episode",
        (
            "a training sample in a simulator: a whole episode, or each decision, with the "
            "episode's advantages"
        ),
        choices=("episode", "decision"),
        taken_by=("train_actor", "train_critic"),
    )
    bootstrap_truncated: bool = key(
        False,
        "GAE bootstraps a truncated response with the critic's last value, not 0",
        taken_by=BY_NAME,
    )
    use_kl_in_reward: bool = key(
        False,
        "subtract the KL to the reference from the token rewards",
        taken_by="apply_kl_penalty",
    )
    kl_penalty: str = key(
        "kl",
        "estimator of the KL in the reward",
        choices=KL_TYPES,
        advice=NO_FULL_KL,
        taken_by="apply_kl_penalty",
    )
    kl_ctrl: KLControlConfig = group(KLControlConfig, taken_by="apply_kl_penalty")
    preference_loss: str = key(
        "dpo",
        "loss over preference pairs",
        choices=tuple(PREFERENCE_LOSSES),
        open_names=True,
        taken_by=("train_preference", "train_online_preference"),
    )
    preference_loss_kwargs: dict[str, object] = key(
        {},
        "options of that loss by name",
        taken_by=("train_preference", "train_online_preference"),
    )
    kto: KTOConfig = group(KTOConfig, taken_by="train_kto")
    recompute_old_log_probs: str = key(
        "auto",
        (
            "compute old log-probs with the trainer; auto skips this if the ratio is always 1; "
            "false uses the rollout's"
        ),
        choices=("auto", "true", "false"),
        parse=lambda value: str(value).lower() if isinstance(value, bool) else convert(value, str),
        taken_by="coupled_loss",
    )
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig)
