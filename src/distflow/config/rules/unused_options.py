"""Options that count only where another key is on: setting one beside a key that is off would do nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, MODEL, Finding
from distflow.config.serialize import changed_from_default, flatten

_CONTROL = "algorithm.kl_ctrl"
_CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Option:
    """An option and the key that makes it count: with the value `on`, or with `any_value` but null, false and 0.
    why: what is the case where it does not count."""

    key: str
    switch: str
    on: str
    why: str
    any_value: bool = False


OPTIONS = (
    Option(f"{_CONTROL}.target_kl", f"{_CONTROL}.type", "adaptive", "a fixed coefficient follows no target"),
    Option(f"{_CONTROL}.horizon", f"{_CONTROL}.type", "adaptive", "a fixed coefficient follows no target"),
    Option(f"{_CONTROL}.mean", f"{_CONTROL}.type", "adaptive", "a fixed coefficient is shown no KL"),
    *(
        Option(
            f"{_CORRECTION}.{name}", f"{_CORRECTION}.rollout_is", "token", "it shapes a correction that is off", True
        )
        for name in ("rollout_is_threshold", "rollout_is_batch_normalize")
    ),
    Option(
        f"{ACTOR}.loss_scale_factor",
        f"{ACTOR}.loss_agg_mode",
        "seq-mean-token-sum-norm",
        "no other mode divides by such a factor",
    ),
    Option("critic.huber_delta", "critic.value_loss", "huber", "a squared error has no such bound"),
    *(
        Option(f"{MODEL}.{name}", f"{MODEL}.lora_rank", "16", "it shapes adapters, and there are none", True)
        for name in ("lora_alpha", "target_modules")
    ),
    Option("reward.overlong.factor", "reward.overlong.buffer_tokens", "1024", "the penalty has no zone", True),
    Option("reward.actor_cpus", "reward.num_actors", "1", "no actor takes CPUs for reward functions", True),
    Option("trainer.keep_best_metric", "trainer.keep_best", "true", "no best checkpoint is kept", True),
    Option("trainer.save_groups_last", "trainer.save_groups", "last_k", "no other value counts steps"),
)


def unused_options(config: Config) -> Iterator[Finding]:
    """Every option that is set counts."""
    values = flatten(config)
    set_keys = {key for key, *_ in changed_from_default(config, (option.key for option in OPTIONS))}
    for option in OPTIONS:
        state = values[option.switch]
        counts = bool(state) if option.any_value else state == option.on
        if option.key in set_keys and not counts:
            yield Finding((option.key, option.switch), option.why, f"set {option.switch}={option.on}, or remove it")


RULES = (unused_options,)
