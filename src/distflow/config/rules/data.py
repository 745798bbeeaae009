"""Rules of data and rewards: files, columns, prompts, reward functions."""

from collections.abc import Iterator
from string import Formatter

from distflow.builtin_names import CUSTOM_REWARD, TEMPLATE_PARAMETERS
from distflow.config.derived_settings import is_rl
from distflow.config.keys.data import DataConfig, DomainConfig
from distflow.config.keys.reward import RewardConfig, patience_of
from distflow.config.keys.schema import Config
from distflow.config.per_domain import named_rewards, reward_functions
from distflow.config.rules import Finding


def sources(config: Config) -> Iterator[tuple[str, DataConfig | DomainConfig]]:
    """Every group that names data, with its key: `data`, and each of its domains."""
    yield "data", config.data
    for name, domain in config.data.domains.items():
        yield f"data.domains.{name}", domain


def files(config: Config) -> Iterator[Finding]:
    """There is something to train on, and limits on rows leave some."""
    if not config.data.train_files and not config.data.domains:
        yield Finding(
            ("data.train_files", "data.domains"),
            "there is no data to train on",
            "set data.train_files=FILE.jsonl (or .parquet, .csv, a data set's id, builtin:NAME)",
            missing=True,
        )
    for key, source in sources(config):
        for files_key, names, limit in (
            (f"{key}.train_files", source.train_files, source.train_max_samples),
            (f"{key}.val_files", source.val_files, source.val_max_samples),
        ):
            limit_key = files_key.replace("_files", "_max_samples")
            if any(not name.strip() for name in names):
                yield Finding((files_key,), "one of the files has an empty name", "remove it from the list")
            if limit == 0:
                yield Finding((limit_key,), "no row would be left", "set it to -1 for all rows, or to 1 or more")
            if limit > 0 and not names and files_key != "data.train_files":  # which is missing anyway
                yield Finding(
                    (limit_key, files_key),
                    "it limits data, and there are none",
                    f"set {files_key}, or remove the limit",
                )


def columns(config: Config) -> Iterator[Finding]:
    """Two meanings cannot share a column."""
    other = "answer_key" if is_rl(config) else "response_key"
    for key, source in sources(config):
        prompt = source.prompt_key or config.data.prompt_key
        if prompt == (getattr(source, other) or getattr(config.data, other)):
            yield Finding(
                (f"{key}.prompt_key", f"{key}.{other}"),
                f"both are read from the column '{prompt}'",
                f"set {key}.{other} to the other column",
            )


def prompts(config: Config) -> Iterator[Finding]:
    """The settings of how a prompt is built do not contradict one another."""
    data = config.data
    for key, source in sources(config):
        if source.prompt_template is not None and not _takes_prompt(source.prompt_template):
            yield Finding(
                (f"{key}.prompt_template",),
                f"'{source.prompt_template}' must hold {{prompt}} and no other field",
                'write e.g. "Question: {prompt} Answer:", with {{ and }} for plain braces',
            )
        if source.system_prompt is not None and (source.prompt_format or data.prompt_format) != "chat":
            yield Finding(
                (f"{key}.system_prompt", f"{key}.prompt_format"),
                "a system message needs a chat, and prompts are plain text",
                f"set {key}.prompt_format=chat, or put the words into {key}.prompt_template",
            )
    for name in data.apply_chat_template_kwargs:
        if name in TEMPLATE_PARAMETERS:
            yield Finding(
                ("data.apply_chat_template_kwargs",),
                f"the template is called with '{name}' already",
                "take it out" + (", and put tools into the rows (data.tools_key)" if name == "tools" else ""),
            )
    if data.enable_thinking and data.apply_chat_template_kwargs.get("enable_thinking", True) is not True:
        yield Finding(
            ("data.enable_thinking", "data.apply_chat_template_kwargs"),
            "one switches thinking on and the other off",
            "set data.enable_thinking alone",
        )
    if data.truncation != "error" and data.filter_overlong_prompts:
        yield Finding(
            ("data.truncation", "data.filter_overlong_prompts"),
            "prompts that are too long are filtered, so that none is ever truncated",
            "set data.filter_overlong_prompts=false, or leave data.truncation at error",
        )


def functions(config: Config) -> Iterator[Finding]:
    """Every domain has a reward that can move."""
    if not config.reward.functions and not config.data.domains:
        yield Finding(("reward.functions",), "there is no reward", "set e.g. reward.functions.default=[math]")
    for key, domain, parts in named_rewards(config):
        if parts and all(part.weight == 0 for part in parts):
            yield Finding(
                (key,),
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
    """A penalty that is on has a factor."""
    penalty = config.reward.overlong
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


def _takes_prompt(template: str) -> bool:
    """Whether it has a place for the prompt, and no other."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError:
        return False
    return names == ["prompt"]


RULES = (files, columns, prompts, functions, custom_function, overlong, patience)
