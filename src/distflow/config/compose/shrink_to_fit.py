"""What nobody chose shrinks to what fits: a batch to the data, a mini-batch to the batch, lengths to the model's
context. What somebody chose stays, for the rules to judge."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distflow.builtin_names import CUSTOM_REWARD
from distflow.config.compose.origins import is_preset
from distflow.config.compose.values import show
from distflow.config.derived_settings import (
    RunLimits,
    is_rl,
    learning_rate_warm_ups,
    may_have_critic,
    mini_batch_sizes,
    run_steps,
)
from distflow.config.keys.reward import RewardPart, plain_functions
from distflow.config.keys.schema import Config, with_values
from distflow.config.per_domain import reward_functions
from distflow.config.rules.check import where
from distflow.config.serialize import flatten

_DEFAULT = "default"

IsFree = Callable[[str], bool]
"""Whether nobody but a preset of ours set that key."""
Change = tuple[str, object, str]
"""A key, the value that fits, and why."""


@dataclass(frozen=True)
class Fitted:
    """A value that was changed because nobody had chosen it. before, value: as YAML shows them."""

    key: str
    before: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} instead of {self.before}: {self.why}"


def fit(config: Config, origins: Mapping[str, str], room: RunLimits) -> tuple[Config, list[Fitted]]:
    """The config with every default that cannot work in that room made smaller, and what was changed.

    The same config in the same room always becomes the same one.
    """
    changes = []
    for step in _STEPS:
        config, made = apply_changes(config, list(step(config, lambda key: is_free(key, origins), room)))
        changes += made
    return config, changes


def apply_changes(config: Config, changes: Iterable[Change]) -> tuple[Config, list[Fitted]]:
    """The config with these values, and what was there."""
    made, values = [], flatten(config)
    for key, value, why in changes:
        made.append(Fitted(key, _shown(values[key]), _shown(value), why))
        values[key] = value
    return with_values(config, {fitted.key: values[fitted.key] for fitted in made}), made


def is_free(key: str, origins: Mapping[str, str]) -> bool:
    """Whether nobody but a preset of ours set that key."""
    origin = where(key, origins)
    return origin == "default" or is_preset(origin)


def _domains(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    """What names data and rewards for all gives way to domains, which name their own."""
    if not config.data.domains:
        return
    given: Sequence[tuple[str, object]] = ("data.train_files", ()), ("data.val_files", ()), ("reward.functions", {})
    values = flatten(config)
    for key, nothing in given:
        if values[key] and is_free(key):
            yield key, nothing, "data.domains is given"


def _reward(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    """A function that is given judges the domains that name no other."""
    functions = config.reward.functions
    if config.custom_reward_function.path is None or _uses_custom(reward_functions(config)) or not is_rl(config):
        return
    ours = is_free("reward.functions")
    if ours and config.data.domains and all(domain.reward for domain in config.data.domains.values()):
        return
    if ours or (functions and _DEFAULT not in functions):
        named = {} if ours else functions
        value = {**named, _DEFAULT: (RewardPart(CUSTOM_REWARD),)}
        yield "reward.functions", value, "custom_reward_function.path is given"


def _lengths(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    """Prompt and response share the context as they share their sum, or one has what the other leaves."""
    prompt, response, context = config.data.max_prompt_length, config.data.max_response_length, room.context
    if context is None or prompt + response <= context or context < 2:
        return
    why = f"the model has a context of {context} tokens"
    free_prompt, free_response = is_free("data.max_prompt_length"), is_free("data.max_response_length")
    if free_prompt and free_response:
        prompt = max(1, context * prompt // (prompt + response))
        yield "data.max_prompt_length", prompt, why
        yield "data.max_response_length", context - prompt, why
    elif free_response and prompt < context:
        yield "data.max_response_length", context - prompt, f"{why}, and prompts have up to {prompt}"
    elif free_prompt and response < context:
        yield "data.max_prompt_length", context - response, f"{why}, and responses have up to {response}"


def _overlong_zone(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    limit, key = config.data.max_response_length, "reward.overlong.buffer_tokens"
    if is_rl(config) and config.reward.overlong.buffer_tokens >= limit > 1 and is_free(key):
        yield key, max(limit // 4, 1), f"a response has at most {limit} tokens"


def _batch(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    batch, key = config.data.train_batch_size, "data.train_batch_size"
    for rows, why in (
        (config.data.train_max_samples, "data.train_max_samples allows no more rows"),
        (room.rows or 0, f"there are {room.rows} rows to train on"),
    ):
        if 0 < rows < batch and is_free(key):
            batch = rows
            yield key, rows, why


def _mini_batches(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    batch = config.data.train_batch_size
    for key, size in mini_batch_sizes(config):
        if size > batch > 0 and is_free(key):
            yield key, batch, f"a batch has {batch} prompts"


def _warm_ups(config: Config, is_free: IsFree, room: RunLimits) -> Iterator[Change]:
    """A tenth of what there is, as `warmup_ratio` has it."""
    steps = run_steps(config, room)
    if steps is None:
        return
    key = "trainer.critic_warmup"
    if may_have_critic(config) and config.trainer.critic_warmup >= steps and is_free(key):
        yield key, steps // 10, f"the run has {count(steps, 'step')}"
    for key, warmup, updates in learning_rate_warm_ups(config, steps):
        if warmup >= updates > 0 and is_free(key):
            yield key, updates // 10, f"the run has {count(updates, 'optimizer step')}"


_STEPS = (_domains, _reward, _lengths, _overlong_zone, _batch, _mini_batches, _warm_ups)


def _uses_custom(functions: Mapping[str, Sequence[RewardPart]]) -> bool:
    return any(part.name == CUSTOM_REWARD for parts in functions.values() for part in parts)


def _shown(value: object) -> str:
    return show(plain_functions(value) if isinstance(value, dict) else value)


def count(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
