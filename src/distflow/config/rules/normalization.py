"""Rules of scaled rewards and advantages: one normalisation at a time, each with an effect."""

from distflow.config.derived_settings import ADV_ESTIMATOR, is_rl
from distflow.config.keys.algorithm import NormConfig
from distflow.config.keys.schema import Config
from distflow.config.rules import ROLLOUT, Finding, Findings
from distflow.config.rules.estimator import compares_rewards, estimator_of

_REWARD_NORM = "algorithm.reward_norm"
_ADV_NORM = "algorithm.adv_norm"
_SCALE = "algorithm.scale_rewards"


def norms(config: Config) -> dict[str, NormConfig]:
    """Both normalisations by their keys."""
    return {_REWARD_NORM: config.algorithm.reward_norm, _ADV_NORM: config.algorithm.adv_norm}


def level_key(key: str, norm: NormConfig, *levels: str) -> str | None:
    """The first key of a level that has one of these values, or any if none are named."""
    for name, level in (("mean_level", norm.mean_level), ("std_level", norm.std_level)):
        if level is not None and (not levels or level in levels):
            return f"{key}.{name}"
    return None


def group_sizes(config: Config) -> Findings:
    """The samples of a prompt divide into the groups."""
    samples = config.actor_rollout_ref.rollout.n
    for key, norm in norms(config).items():
        size = norm.group_size
        if size is not None and samples % size:
            what = f"{samples} samples of a prompt do not divide into groups of {size}"
            advice = "remove it: a group is then all samples of a prompt"
            yield Finding((f"{key}.group_size", f"{ROLLOUT}.n"), what, advice)


def reward_groups_of_one(config: Config) -> Findings:
    """Rewards that are compared within a prompt are of several samples."""
    key = level_key(_REWARD_NORM, config.algorithm.reward_norm, "group")
    if key and is_rl(config) and config.actor_rollout_ref.rollout.n == 1:
        yield Finding(
            (f"{ROLLOUT}.n", key),
            "rewards are compared within a prompt, but there is only one sample of each",
            f"set {ROLLOUT}.n=8, or the levels of algorithm.reward_norm to batch",
        )


def running_advantages(config: Config) -> Findings:
    """Only rewards have running moments."""
    for name in ("mean_level", "std_level"):
        if getattr(config.algorithm.adv_norm, name) == "running":
            yield Finding(
                (f"algorithm.adv_norm.{name}",),
                "running moments are only for rewards: advantages of older policies are not "
                "comparable",
                f"set algorithm.adv_norm.{name}=batch, or algorithm.reward_norm.{name}=running",
            )


def raw_rewards(config: Config) -> Findings:
    """An estimator that compares raw rewards gets them."""
    algorithm = config.algorithm
    key = level_key(_REWARD_NORM, algorithm.reward_norm)
    if key and compares_rewards(config):
        yield Finding(
            (key, ADV_ESTIMATOR),
            f"{algorithm.adv_estimator} compares raw rewards",
            "set algorithm.adv_estimator=reinforce (with gamma=1 every token gets the normalised "
            "reward), or gae, or remove algorithm.reward_norm",
        )


def whitened_tokens(config: Config) -> Findings:
    """Whitening is for estimators that read the rewards of tokens."""
    algorithm = config.algorithm
    if not algorithm.whiten_rewards or estimator_of(config).reads_parts:
        return

    if compares_rewards(config):
        yield Finding(
            ("algorithm.whiten_rewards", ADV_ESTIMATOR),
            f"{algorithm.adv_estimator} compares rewards of whole responses, and whitening tokens "
            "would shift them by response length",
            "set algorithm.adv_estimator=reinforce or gae, or remove algorithm.whiten_rewards",
        )


RULES = (
    group_sizes,
    reward_groups_of_one,
    running_advantages,
    raw_rewards,
    whitened_tokens,
)
