"""Shrinks defaults to fit: a batch to the data, a mini-batch to the batch, lengths to the model's context. Values that
were set are kept, and the rules check them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from distflow.builtin_names import CUSTOM_REWARD
from distflow.config import derived_settings
from distflow.config.compose.yaml_settings import COMMAND_LINE, IN_PYTHON, is_preset
from distflow.config.derived_settings import reward_functions
from distflow.config.keys.reward import RewardPart
from distflow.config.keys.schema import Config, flatten, schema_keys, show_value, with_values
from distflow.config.rules.check_config import where
from distflow.errors import count_of

_DEFAULT = "default"

IsFree = Callable[..., bool]
"""(key, *limits): whether nobody chose the key's value; see `is_free`."""
Change = tuple[str, object, str]
"""A key, the value that fits, and why."""
NamedKey = tuple[str, object, str]
"""A key, its plain value, and what names it, in words."""


@dataclass(frozen=True)
class Fitted:
    """A default that was changed to fit. before, value: YAML text."""

    key: str
    before: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} instead of {self.before}: {self.why}"


def fit(config: Config, origins: Mapping[str, str], room: derived_settings.RunLimits) -> tuple[Config, list[Fitted]]:
    """The config with defaults reduced to the limits, and the changes. Deterministic."""
    changes = []
    for step in _STEPS:
        if wanted := list(step(config, partial(is_free, origins), room)):
            config, made = apply_changes(config, wanted)
            changes += made
    return config, changes


def apply_changes(config: Config, changes: Iterable[Change]) -> tuple[Config, list[Fitted]]:
    """The config with these values, and the changes with the previous values."""
    made, values, keys = [], flatten(config), schema_keys()
    for key, value, why in changes:
        made.append(Fitted(key, show_value(keys[key], values[key]), show_value(keys[key], value), why))
        values[key] = value
    return with_values(config, {fitted.key: values[fitted.key] for fitted in made}), made


def is_free(origins: Mapping[str, str], key: str, *limits: str) -> bool:
    """Whether a key has its default or the value of a built-in preset; or a file's value, if one of `limits` was set
    above files: on the command line or in Python."""
    origin = where(key, origins)
    is_typed = (COMMAND_LINE, IN_PYTHON)
    on_top = origin not in is_typed and any(where(limit, origins) in is_typed for limit in limits)
    return origin == "default" or is_preset(origin) or on_top


def _domains(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    """Remove run-wide defaults for data and rewards if there are domains, which set their own."""
    if not config.data.domains:
        return
    empty: dict[str, object] = {"data.train_files": (), "data.val_files": (), "reward.functions": {}}
    values = flatten(config)
    for key, nothing in empty.items():
        if values[key] and is_free(key):
            yield key, nothing, "data.domains is given"


def _reward(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    """Let a custom reward function score the domains that name no other."""
    functions = config.reward.functions
    uses_custom = any(part.name == CUSTOM_REWARD for parts in reward_functions(config).values() for part in parts)
    if config.custom_reward_function.path is None or uses_custom or not derived_settings.is_rl(config):
        return
    ours = is_free("reward.functions")
    if ours and config.data.domains and all(domain.reward for domain in config.data.domains.values()):
        return
    if ours or (functions and _DEFAULT not in functions):
        named = {} if ours else functions
        value = {**named, _DEFAULT: (RewardPart(CUSTOM_REWARD),)}
        yield "reward.functions", value, "custom_reward_function.path is given"


def _lengths(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    """Shrink prompt and response in proportion, or one of them to the context that the other leaves."""
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


def _overlong_zone(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    limit, key = config.data.max_response_length, "reward.overlong.buffer_tokens"
    if (
        derived_settings.is_rl(config)
        and config.reward.overlong.buffer_tokens >= limit > 0
        and is_free(key, "data.max_response_length")
    ):
        yield key, max(limit // 4, min(limit - 1, 1)), f"a response has at most {limit} tokens"


def _batch(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    batch, key = config.data.train_batch_size, "data.train_batch_size"
    for rows, why in (
        (config.data.train_max_samples, "data.train_max_samples limits the rows"),
        (room.rows or 0, f"the data has {count_of(room.rows or 0, 'row')} to train on"),
    ):
        if 0 < rows < batch and is_free(key, "data.train_max_samples"):
            batch = rows
            yield key, rows, why


def _mini_batches(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    batch = config.data.train_batch_size
    for key, size in derived_settings.mini_batch_sizes(config):
        if size > batch > 0 and is_free(key, "data.train_batch_size", "data.train_max_samples"):
            yield key, batch, f"a batch has {count_of(batch, 'prompt')}"


def _warm_ups(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    """Shorten warm-ups to a tenth of the run, the default of `warmup_ratio`."""
    steps = derived_settings.run_steps(config, room)
    if steps is None:
        return
    key, lengths = "trainer.critic_warmup", ("trainer.total_training_steps", "trainer.total_epochs")
    if derived_settings.may_have_critic(config) and config.trainer.critic_warmup >= steps and is_free(key, *lengths):
        yield key, steps // 10, f"the run has {count_of(steps, 'step')}"
    for key, warmup, updates in derived_settings.learning_rate_warm_ups(config, steps):
        if warmup >= updates > 0 and is_free(key, *lengths):
            yield key, updates // 10, f"the run has {count_of(updates, 'optimizer step')}"


def _engine(config: Config, is_free: IsFree, room: derived_settings.RunLimits) -> Iterator[Change]:
    """Choose the engine that runs any model if the default cannot run this one."""
    if derived_settings.refuses_model(config, room) and is_free(derived_settings.ENGINE):
        yield derived_settings.ENGINE, "hf", f"the embedded engine cannot run this model: {room.not_embedded}"


_STEPS = (_domains, _reward, _engine, _lengths, _overlong_zone, _batch, _mini_batches, _warm_ups)
