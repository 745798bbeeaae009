"""Rules of the rewards."""

from collections.abc import Iterator

from distflow.builtin_names import CUSTOM_REWARD
from distflow.config.derived_settings import is_rl
from distflow.config.keys.reward import OverlongConfig, RewardConfig, patience_of
from distflow.config.keys.schema import Config
from distflow.config.per_domain import reward_functions
from distflow.config.rules.finding import Finding


def functions(config: Config) -> Iterator[Finding]:
    """Every domain has a reward that can move."""
    if not config.reward.functions and not config.data.domains:
        yield Finding(("reward.functions",), "there is no reward", "set e.g. reward.functions.default=[math]")
    for domain, parts in config.reward.functions.items():
        if all(part.weight == 0 for part in parts):
            yield Finding(
                (f"reward.functions.{domain}",),
                f"all weights of the domain '{domain}' are 0: its score never moves",
                "give a reward function a weight",
            )


def custom_function(config: Config) -> Iterator[Finding]:
    """The reward `custom` and its function belong together."""
    uses_custom = any(part.name == CUSTOM_REWARD for parts in reward_functions(config).values() for part in parts)
    path = config.custom_reward_function.path
    if uses_custom and path is None:
        yield Finding(
            ("custom_reward_function.path", "reward.functions"),
            "the reward 'custom' has no function",
            "set custom_reward_function.path=my_reward.py (and .name, if it is not compute_score)",
        )
    if path is not None and not uses_custom and is_rl(config):
        yield Finding(
            ("custom_reward_function.path", "reward.functions"),
            "no domain uses the function",
            "set reward.functions.default=[custom], or remove it",
        )


def overlong(config: Config) -> Iterator[Finding]:
    """The penalty has a zone, and the zone a penalty."""
    penalty = config.reward.overlong
    if penalty.buffer_tokens == 0 and penalty.factor != OverlongConfig.factor:
        yield Finding(
            ("reward.overlong.factor", "reward.overlong.buffer_tokens"),
            "the penalty has no zone",
            "set reward.overlong.buffer_tokens, or remove the factor",
        )
    if penalty.buffer_tokens > 0 and penalty.factor == 0:
        yield Finding(
            ("reward.overlong.factor", "reward.overlong.buffer_tokens"),
            "the penalty is on with the factor 0",
            "set reward.overlong.factor=1.0, or reward.overlong.buffer_tokens=0",
        )


def patience(config: Config) -> Iterator[Finding]:
    """A wait is before something, and every domain is judged."""
    each = [("reward", patience_of(config.reward, ""))]
    each += [(f"reward.domains.{name}", patience_of(config.reward, name)) for name in config.reward.domains]
    default = RewardConfig.backoff_s
    if all(settings["retries"] == 0 for _, settings in each):
        for where, settings in each:
            if settings["backoff_s"] != default:
                yield Finding(
                    (f"{where}.backoff_s", "reward.retries"),
                    "no call is retried",
                    "set reward.retries=3, or remove it",
                )
    functions = reward_functions(config)
    for name in config.reward.domains:
        if functions and name not in functions and "default" not in functions:
            yield Finding(
                (f"reward.domains.{name}", "reward.functions"),
                f"no reward function judges the domain '{name}'",
                f"set reward.functions.{name} (data.domains.{name} where data.domains is), or take it out",
            )


RULES = (functions, custom_function, overlong, patience)
