"""Rules of data and rewards: files, columns, prompts, reward functions."""

from collections.abc import Iterator
from string import Formatter

from distflow.builtin_names import TEMPLATE_PARAMETERS
from distflow.config.derived_settings import is_rl, named_rewards, reads_pairs, reward_functions
from distflow.config.keys.data import DataConfig, DomainConfig
from distflow.config.keys.reward import RewardConfig, on_error_of, patience_of, scoring_models
from distflow.config.keys.schema import Config
from distflow.config.rules import Finding


def sources(config: Config) -> Iterator[tuple[str, DataConfig | DomainConfig]]:
    """Every group that names data: `data` and each of its domains, with its key."""
    yield "data", config.data
    for name, domain in config.data.domains.items():
        yield f"data.domains.{name}", domain


def files(config: Config) -> Iterator[Finding]:
    """Files have names, and the limits leave some rows."""
    for key, source in sources(config):
        for files_key, names, limit in (
            (f"{key}.train_files", source.train_files, source.train_max_samples),
            (f"{key}.val_files", source.val_files, source.val_max_samples),
        ):
            limit_key = files_key.replace("_files", "_max_samples")
            if any(not name.strip() for name in names):
                yield Finding(
                    (files_key,), "one of the files has an empty name", "remove it from the list"
                )
            if limit == 0:
                yield Finding(
                    (limit_key,),
                    "no row would be left",
                    "set it to -1 for all rows, or to 1 or more",
                )
            by_tags = getattr(source, "tags", ()) and getattr(
                config.data, files_key.rpartition(".")[2]
            )
            # a separate finding
            if limit > 0 and not (names or by_tags) and files_key != "data.train_files":
                advice = f"set {files_key}, or remove the limit"
                yield Finding(
                    (limit_key, files_key), "it limits data, but there is no data", advice
                )


def columns(config: Config) -> Iterator[Finding]:
    """The prompt and its companion columns are different columns."""
    other = "answer_key" if is_rl(config) else "response_key"
    for key, source in sources(config):
        prompt = source.prompt_key or config.data.prompt_key
        if not reads_pairs(config) and prompt == (
            getattr(source, other) or getattr(config.data, other)
        ):
            what = f"both are read from the column '{prompt}'"
            yield Finding(
                (f"{key}.prompt_key", f"{key}.{other}"),
                what,
                f"set {key}.{other} to the other column",
            )


def prompts(config: Config) -> Iterator[Finding]:
    """The settings of prompts do not contradict one another."""
    data = config.data
    for key, source in sources(config):
        if source.prompt_template is not None and not _takes_prompt(source.prompt_template):
            yield Finding(
                (f"{key}.prompt_template",),
                f"'{source.prompt_template}' must contain {{prompt}} and no other field",
                'write e.g. "Question: {prompt} Answer:", with {{ and }} for plain braces',
            )
        if (
            source.system_prompt is not None
            and (source.prompt_format or data.prompt_format) != "chat"
        ):
            yield Finding(
                (f"{key}.system_prompt", f"{key}.prompt_format"),
                "a system message needs prompt_format=chat, but prompts are plain text",
                f"set {key}.prompt_format=chat, or put the text into {key}.prompt_template",
            )
    for name in data.apply_chat_template_kwargs:
        if name in TEMPLATE_PARAMETERS:
            advice = "remove it" + (
                ", and put tools into the rows (data.tools_key)" if name == "tools" else ""
            )
            what = f"the template is called with '{name}' already"
            yield Finding(("data.apply_chat_template_kwargs",), what, advice)
    if (
        data.enable_thinking
        and data.apply_chat_template_kwargs.get("enable_thinking", True) is not True
    ):
        keys = ("data.enable_thinking", "data.apply_chat_template_kwargs")
        yield Finding(
            keys, "one switches thinking on and the other off", "set data.enable_thinking alone"
        )


def functions(config: Config) -> Iterator[Finding]:
    """The weights of reward functions are not all 0, unless a reward model scores too."""
    models = scoring_models(config.reward_model)
    key = "reward_model.models" if config.reward_model.models else "reward_model.model.path"
    for name in sorted(
        {part.name for _, _, parts in named_rewards(config) for part in parts} & models.keys()
    ):
        yield Finding(
            (key, "reward.functions"), f"'{name}' is a reward function too", "choose another name"
        )
    drops = "drop" in (on_error_of(config.reward, each) for each in ("", *config.reward.domains))
    if drops and any(model.judge for model in models.values()):
        what = "a judge's errors occur in the training loop, which cannot replace a group"
        yield Finding((key, "reward.on_error"), what, "set reward.on_error to mask or {score: x}")
    for key, domain, parts in named_rewards(config):
        if (
            parts
            and all(part.weight == 0 for part in parts)
            and not scoring_models(config.reward_model, domain)
        ):
            what = f"all weights of the domain '{domain}' are 0, so its score is always 0"
            yield Finding((key,), what, "give a reward function a weight")
        if any(part.name == "judge" and not part.options.get("model") for part in parts):
            advice = (
                "write {name: judge, options: {model: NAME, base_url: URL}}; without a URL it is "
                "one of OpenAI's"
            )
            yield Finding((key,), "the judge has no model", advice)


def retries(config: Config) -> Iterator[Finding]:
    """A backoff needs retries, and domains with their own settings have reward functions."""
    each = {"reward": patience_of(config.reward, "")}
    each |= {
        f"reward.domains.{name}": patience_of(config.reward, name) for name in config.reward.domains
    }
    if all(settings["retries"] == 0 for settings in each.values()):
        for key in (
            key for key, settings in each.items() if settings["backoff_s"] != RewardConfig.backoff_s
        ):
            advice = "set reward.retries=3, or remove it"
            yield Finding((f"{key}.backoff_s", "reward.retries"), "no call is retried", advice)
    functions = reward_functions(config)
    for name in config.reward.domains:
        if functions and name not in functions and "default" not in functions:
            yield Finding(
                (f"reward.domains.{name}", "reward.functions"),
                f"the domain '{name}' has no reward function",
                (
                    f"set reward.functions.{name} (data.domains.{name} if data.domains is set), or "
                    "remove it"
                ),
            )


def _takes_prompt(template: str) -> bool:
    """Whether `{prompt}` is its only field."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError:
        return False
    return names == ["prompt"]


RULES = (files, columns, prompts, functions, retries)
