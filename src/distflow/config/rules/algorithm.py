"""Rules of the algorithm: the KL controller, clips, rollout correction, dynamic sampling, and scaling of rewards and
advantages: one normalisation at a time, each with an effect."""

from collections.abc import Iterator

from distflow.builtin_names import FILTER_METRICS, POLICY_LOSSES
from distflow.config.derived_settings import (
    algorithms,
    filters_groups,
    find_estimator,
    find_pipeline,
    is_rl,
    reward_functions,
    unfiltered_domains,
)
from distflow.config.keys.algorithm import AlgorithmConfig, is_on, spread
from distflow.config.keys.reward import scoring_models
from distflow.config.keys.schema import Config, changed_from_default, flatten
from distflow.config.rules import ACTOR, ROLLOUT, Finding

_CONTROL = "algorithm.kl_ctrl"
_CORRECTION = "algorithm.rollout_correction"


def kl_control(config: Config) -> Iterator[Finding]:
    """The adaptive controller has a target and a horizon."""
    control = config.algorithm.kl_ctrl
    for name, value, example in (("target_kl", control.target_kl, "0.1"), ("horizon", control.horizon, "10000")):
        if control.type == "adaptive" and value is None:
            advice = f"set {_CONTROL}.{name}={example}, or {_CONTROL}.type=fixed"
            yield Finding((f"{_CONTROL}.{name}", f"{_CONTROL}.type"), "the adaptive controller needs it", advice)


def clip_ratios(config: Config) -> Iterator[Finding]:
    """The lower clip of the ratio is not negative."""
    actor = config.actor_rollout_ref.actor
    loss = POLICY_LOSSES.get(actor.policy_loss)
    clips_ratio = loss is not None and loss.clips and not loss.divergence
    if clips_ratio and actor.clip_ratio_low is None and actor.clip_ratio > 1:
        yield Finding(
            (f"{ACTOR}.clip_ratio",),
            f"the ratio would be clipped at 1 - {actor.clip_ratio:g} < 0, which it never reaches",
            f"set {ACTOR}.clip_ratio=0.2, or {ACTOR}.clip_ratio_low to 1 or less",
        )


def corrections(config: Config) -> Iterator[Finding]:
    """The band of importance weights is not empty, and only one correction weighs."""
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
            "the rollout correction and the decoupled loss would both apply the weights",
            f"set {_CORRECTION}.rollout_is=null, or remove {name}: rollout_is and rollout_is_threshold replace it",
        )
    if _interpolates(config) and correction.rollout_is_batch_normalize:
        yield Finding(
            (f"{_CORRECTION}.rollout_is_batch_normalize", f"{ACTOR}.prox"),
            "the loss computes the weights of an interpolated policy for each micro-batch, so they have no mean",
            f"set {ACTOR}.prox=recompute, or remove it",
        )


def old_log_probs(config: Config) -> Iterator[Finding]:
    """Old log-probs of the rollout engine need no correction."""
    correction, key = config.algorithm.rollout_correction, "algorithm.recompute_old_log_probs"
    if config.algorithm.recompute_old_log_probs != "false":
        return
    for name in (name for name in ("rollout_is", "rollout_rs") if getattr(correction, name)):
        yield Finding(
            (key, f"{_CORRECTION}.{name}"),
            "the old log-probs are the rollout engine's, so there is no mismatch to correct",
            f"set {key}=true, or remove {_CORRECTION}.{name}",
        )


def _interpolates(config: Config) -> bool:
    return config.actor_rollout_ref.actor.prox == "interpolate"


def rejection(config: Config) -> Iterator[Finding]:
    """Every rejection statistic has a valid bound, and its mismatch can be measured."""
    correction = config.algorithm.rollout_correction
    names, bounds = correction.rollout_rs, correction.rollout_rs_threshold
    both = (f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs")
    if bool(names) != bool(bounds):
        what = "a rejection needs a bound" if names else "it is the bound of a rejection that is off"
        yield Finding(both, what, f"set {both[1]}=token_k1 and {both[0]}=[[0.5, 2.0]], or remove both")
        return
    if len(set(names)) < len(names):
        yield Finding(both[1:], "a statistic is named twice", "name it once")
    if len(bounds) not in (1, len(names)) and names:
        yield Finding(both, f"{len(bounds)} bounds for {len(names)} statistics", "set one for each, or one for all")
        return
    for name, (lower, upper) in zip(names, spread(bounds, len(names)), strict=True):
        is_ratio = name.endswith("k1")
        if lower is not None and not is_ratio:
            yield Finding(both, f"{name} is never negative and has no lower bound", f"write {upper:g} alone for it")
        elif upper <= 0 or (lower is not None and not 0 < lower <= upper):
            yield Finding(both, f"the bounds of {name} exclude everything", "write e.g. [0.5, 2.0], both above 0")
        elif is_ratio and lower is None and upper < 1:
            what = f"nothing lies between 1/{upper:g} and {upper:g}, the bounds of {name}"
            yield Finding(both, what, "set 1 or more")
    if names and _interpolates(config):
        yield Finding(
            (both[1], f"{ACTOR}.prox"),
            "the interpolated policy is computed within the loss, too late to exclude tokens",
            f"set {ACTOR}.prox=recompute, or {ACTOR}.policy_loss_kwargs.rejection_sampling, e.g. "
            "{level: token, metric: kl_k3, upper: 0.1}",
        )


def dynamic_sampling(config: Config) -> Iterator[Finding]:
    """A filter compares several samples of a group by an existing score, and advantages are not per turn."""
    filters = config.algorithm.filter_groups
    if not filters_groups(config) or not is_rl(config):
        return
    if filters.enable and config.actor_rollout_ref.rollout.n == 1:
        yield Finding(
            ("algorithm.filter_groups.enable", f"{ROLLOUT}.n"),
            "a group has only one sample, so every group would be dropped",
            f"set {ROLLOUT}.n=8, or algorithm.filter_groups.enable=false",
        )
    for domain, algorithm in algorithms(config) if filters.should_accept is None else ():
        if _has_several_rewards(algorithm) and domain not in unfiltered_domains(config):
            key = f"data.domains.{domain}.filter_groups" if domain else "algorithm.filter_groups.enable"
            what = "a group with equal scores may teach by the rewards of its turns or agents, and would be dropped"
            estimator = f"algorithm.domains.{domain}.adv_estimator" if domain else _ESTIMATOR
            yield Finding((key, estimator), what, f"set {key}=false, or algorithm.filter_groups.should_accept")
    if filters.metric == "acc" and filters.mean_range and (filters.mean_range[0] >= 1 or filters.mean_range[1] <= 0):
        what = "no share of correct responses other than 0 or 1 is between them"
        yield Finding(("algorithm.filter_groups.mean_range", "algorithm.filter_groups.metric"), what, "set [0.1, 0.9]")
    names = {part.name for parts in reward_functions(config).values() for part in parts}
    if filters.metric not in {*FILTER_METRICS, *names}:
        yield Finding(
            ("algorithm.filter_groups.metric", "reward.functions"),
            f"no reward function is called '{filters.metric}'",
            f"set it to {' or '.join(FILTER_METRICS)}, or to one of {', '.join(sorted(names))}",
        )


_ESTIMATOR = "algorithm.adv_estimator"
_REWARD_NORM, _ADV_NORM = "algorithm.reward_norm", "algorithm.adv_norm"
_OF_SUMS = tuple(f"algorithm.{name}" for name in ("reward_shift", "reward_scale", "reward_clip", "whiten_rewards"))


def scaling(config: Config) -> Iterator[Finding]:
    """`scale_rewards` agrees with `norm_adv_by_std_in_grpo`, and batch scaling has differences that are not all 0."""
    algorithm = config.algorithm
    if algorithm.scale_rewards in ("group", "batch") and not algorithm.norm_adv_by_std_in_grpo:
        yield Finding(
            ("algorithm.scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
            f"one divides by the standard deviation of the {algorithm.scale_rewards}, the other does not divide",
            "keep one of them and remove the other",
        )
    if algorithm.scale_rewards == "batch" and config.actor_rollout_ref.rollout.n == 1:
        what = "the only sample of a group is its own mean: every advantage would be 0"
        yield Finding(("algorithm.scale_rewards", f"{ROLLOUT}.n"), what, f"set {ROLLOUT}.n=8, or remove it")


def normalisations(config: Config) -> Iterator[Finding]:
    """The groups of a normalisation are samples of one prompt, and have several of them."""
    size = config.actor_rollout_ref.rollout.n
    for name, norm in ((_REWARD_NORM, config.algorithm.reward_norm), (_ADV_NORM, config.algorithm.adv_norm)):
        key = f"{name}.group_size"
        if norm.group_size is None:
            continue
        if "group" not in (norm.mean_level, norm.std_level):
            advice = f"set {name}.mean_level=group, or remove it"
            yield Finding((key, f"{name}.mean_level"), "nothing is normalised within groups", advice)
        if size % norm.group_size:
            what = f"{size} samples of a prompt do not divide into groups of {norm.group_size}"
            yield Finding((key, f"{ROLLOUT}.n"), what, "remove it: a group is then all samples of a prompt")
    norm = config.algorithm.reward_norm
    if "group" in (norm.mean_level, norm.std_level) and size == 1 and is_rl(config):
        yield Finding(
            (f"{ROLLOUT}.n", f"{_REWARD_NORM}.{'mean' if norm.mean_level == 'group' else 'std'}_level"),
            "rewards are compared within a prompt, but there is only one sample of each",
            f"set {ROLLOUT}.n=8, or the levels of {_REWARD_NORM} to batch",
        )


def running_moments(config: Config) -> Iterator[Finding]:
    """Running moments apply to rewards, not to advantages."""
    for name in ("mean_level", "std_level"):
        if getattr(config.algorithm.adv_norm, name) == "running":
            yield Finding(
                (f"{_ADV_NORM}.{name}",),
                "running moments are only for rewards: advantages of older policies are not comparable",
                f"set {_ADV_NORM}.{name}=batch, or {_REWARD_NORM}.{name}=running",
            )


def one_normalisation(config: Config) -> Iterator[Finding]:
    """Values that an estimator normalises are not normalised twice."""
    estimator, name = find_estimator(config), config.algorithm.adv_estimator
    if estimator is None:
        return
    if is_on(config.algorithm.reward_norm) and (estimator.needs_group or name == "remax"):
        yield Finding(
            (f"{_REWARD_NORM}.{'mean' if config.algorithm.reward_norm.mean_level else 'std'}_level", _ESTIMATOR),
            f"{name} compares raw rewards",
            f"set {_ESTIMATOR}=reinforce (with gamma=1 every token gets the normalised reward), or gae, "
            f"or remove {_REWARD_NORM}",
        )
    if config.algorithm.whiten_rewards and (estimator.needs_group or name == "remax") and not estimator.reads_parts:
        yield Finding(
            ("algorithm.whiten_rewards", _ESTIMATOR),
            f"{name} compares rewards of whole responses, and whitening tokens would shift them by response length",
            f"set {_ESTIMATOR}=reinforce or gae, or remove algorithm.whiten_rewards",
        )
    if is_on(config.algorithm.adv_norm) and estimator.whitens:
        what = f"{name} already whitens its advantages over the batch"
        yield Finding(
            (f"{_ADV_NORM}.{'mean' if config.algorithm.adv_norm.mean_level else 'std'}_level", _ESTIMATOR),
            what,
            f"set {_ESTIMATOR}=reinforce, or remove {_ADV_NORM}",
        )


def _has_several_rewards(algorithm: AlgorithmConfig) -> bool:
    """Whether the turns or agents of an episode have separate advantages."""
    over_turns = algorithm.adv_estimator in ("grpo_turns", "gae_marft") or algorithm.adv_estimator_kwargs.get(
        "over_turns"
    )
    return bool(over_turns) or algorithm.agent_rewards != "shared"


def rewards_of_turns(config: Config) -> Iterator[Finding]:
    """If advantages are per turn or agent, no key reduces an episode to a single reward."""
    algorithm = config.algorithm
    if _has_several_rewards(algorithm) or algorithm.reward_level != "token":
        keys = [*changed_from_default(flatten(config), _OF_SUMS[:3])]
        if is_on(algorithm.reward_norm):
            keys.append(f"{_REWARD_NORM}.{'mean' if algorithm.reward_norm.mean_level else 'std'}_level")
        for key in keys:
            what = "turns or agents have rewards of their own, and this makes one reward of each episode's"
            yield Finding((key, _ESTIMATOR), what, "remove it, and change the rewards in the workflow")


def rewards_of_agents(config: Config) -> Iterator[Finding]:
    """Separate rewards for agents require agents, and no reward of the whole episode."""
    key, agents, estimator = "algorithm.agent_rewards", f"{ROLLOUT}.agents", find_estimator(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.agents and rollout.workflow is None:
        yield Finding((agents,), "only a workflow has agents", f"set {ROLLOUT}.workflow=file.py:function")
    if rollout.agents and not any(agent.trainable for agent in rollout.agents.values()):
        yield Finding((agents,), "none of the agents is trained", "remove trainable: false of one of them")
    if config.algorithm.agent_rewards == "shared":
        return
    if not rollout.agents:
        yield Finding((key, agents), "an episode has no agents", f"declare them, e.g. {agents}={{solver: {{}}}}")
    if scoring_models(config.reward_model):
        yield Finding((key, "reward_model.models"), "a model scores episodes, not agents", f"set {key}=shared")
    if estimator and estimator.reads_parts:
        what = f"{config.algorithm.adv_estimator} reads the parts of the reward, which no agent has"
        yield Finding((key, _ESTIMATOR), what, f"set {_ESTIMATOR}=grpo")


def levels(config: Config) -> Iterator[Finding]:
    """Only episodes in simulators have actions and chunks, and no correction of tokens changes their log-probs."""
    algorithm, workflow = config.algorithm, config.actor_rollout_ref.rollout.workflow
    for name, usual in (("logprob_level", "token"), ("reward_level", "token"), ("sample_level", "episode")):
        key = f"algorithm.{name}"
        if getattr(algorithm, name) != usual and workflow != "simulator":
            what = "actions, chunks and decisions are those of a policy in a simulator"
            yield Finding((key, f"{ROLLOUT}.workflow"), what, f"set {key}={usual}, or {ROLLOUT}.workflow=simulator")
    settings, key = algorithm.rollout_correction, "algorithm.sample_level"
    for name, own in (("rollout_is", (settings.rollout_is or "token",)), ("rollout_rs", settings.rollout_rs)):
        if algorithm.sample_level == "decision" and (wide := [each for each in own if not each.startswith("token")]):
            what = f"{wide[0]} is of whole episodes, and samples are decisions"
            yield Finding((f"{_CORRECTION}.{name}", key), what, f"use a statistic of tokens, or set {key}=episode")
    of_tokens = {
        f"{_CORRECTION}.rollout_is": algorithm.rollout_correction.rollout_is,
        f"{_CORRECTION}.rollout_rs": algorithm.rollout_correction.rollout_rs,
        f"{ACTOR}.off_policy_mask_threshold": config.actor_rollout_ref.actor.off_policy_mask_threshold,
    }
    for key in (key for key, value in of_tokens.items() if value and algorithm.logprob_level != "token"):
        what = "it is of tokens, and the ratio is of actions or chunks"
        yield Finding((key, "algorithm.logprob_level"), what, "remove it, or set algorithm.logprob_level=token")


_LIMITS = ("max_turns", "length", "context")


def limit_penalty(config: Config) -> Iterator[Finding]:
    """Penalties of limits are those of a workflow's episodes, which have one score."""
    keys = [*changed_from_default(flatten(config), [f"reward.limit_penalty.{name}" for name in _LIMITS])]
    if keys and config.actor_rollout_ref.rollout.workflow is None:
        advice = "set reward.overlong.buffer_tokens and factor instead, which apply to single responses"
        yield Finding((*keys, f"{ROLLOUT}.workflow"), "there is no workflow", advice)
    if keys and config.algorithm.agent_rewards != "shared":
        what = "each agent has its own score, and the penalty is of the episode"
        yield Finding((*keys, "algorithm.agent_rewards"), what, "subtract it in the workflow (chat.finish_reason)")


def parts_of_rewards(config: Config) -> Iterator[Finding]:
    """An estimator that reads reward parts has several of them, and no key is set that changes only their sum."""
    estimator, name = find_estimator(config), config.algorithm.adv_estimator
    if estimator is None or not estimator.reads_parts:
        return
    what = f"{name} reads the parts of the reward, not their sum"
    for key in changed_from_default(flatten(config), _OF_SUMS):
        yield Finding((key, _ESTIMATOR), what, f"set {_ESTIMATOR}=grpo, or remove it")
    if isinstance(config.reward.on_error, float):
        yield Finding(
            ("reward.on_error", _ESTIMATOR), f"{what}, but a fixed score has no parts", "set it to mask or drop"
        )
    if config.algorithm.use_kl_in_reward:
        advice = "set actor_rollout_ref.actor.use_kl_loss=true instead"
        yield Finding(("algorithm.use_kl_in_reward", _ESTIMATOR), f"{what}, which has the KL", advice)
    parts = max(map(len, reward_functions(config).values()), default=0) + (config.reward.overlong.buffer_tokens > 0)
    if parts < 2 and find_pipeline(config) is not None:
        yield Finding(
            (_ESTIMATOR, "reward.functions"),
            f"{name} normalises each part of the reward, but there is only one",
            f"set {_ESTIMATOR}=grpo, or a second reward function, "
            "e.g. reward.functions={default: [math, {name: format, weight: 0.2}]}",
        )


NORMALIZATION_RULES = (
    *(scaling, normalisations, running_moments, one_normalisation),
    *(parts_of_rewards, rewards_of_turns, rewards_of_agents),
)
RULES = (
    *NORMALIZATION_RULES,
    *(kl_control, clip_ratios, corrections, old_log_probs, rejection, dynamic_sampling, levels, limit_penalty),
)
