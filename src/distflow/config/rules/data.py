"""Rules of the data: files, batches, prompts."""

from collections.abc import Iterator
from string import Formatter

from distflow.builtin_names import TEMPLATE_PARAMETERS
from distflow.config.derived_settings import is_rl
from distflow.config.keys.schema import Config
from distflow.config.rules.finding import Finding


def train_files(config: Config) -> Iterator[Finding]:
    """There is something to train on."""
    if not config.data.train_files and not config.data.domains:
        yield Finding(
            ("data.train_files", "data.domains"),
            "there is no data to train on",
            "set data.train_files=FILE.jsonl (or .parquet, .csv, a data set's id, builtin:NAME)",
            missing=True,
        )
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        if any(not file.strip() for file in files):
            yield Finding((key,), "one of the files has an empty name", "remove it from the list")


def row_limits(config: Config) -> Iterator[Finding]:
    """Limits on rows leave some."""
    data = config.data
    for key, limit in (
        ("data.train_max_samples", data.train_max_samples),
        ("data.val_max_samples", data.val_max_samples),
    ):
        if limit == 0:
            yield Finding((key,), "no row would be left", "set it to -1 for all rows, or to 1 or more")
    if data.val_max_samples > 0 and not data.val_files:
        yield Finding(
            ("data.val_max_samples", "data.val_files"),
            "it limits validation data, and there are none",
            "set data.val_files, or remove the limit",
        )


def columns(config: Config) -> Iterator[Finding]:
    """Two meanings cannot share a column."""
    data = config.data
    named = {"data.prompt_key": data.prompt_key}
    named["data.answer_key" if is_rl(config) else "data.response_key"] = (
        data.answer_key if is_rl(config) else data.response_key
    )
    keys = list(named)
    if named[keys[0]] == named[keys[1]]:
        yield Finding(
            tuple(keys), f"both are read from the column '{data.prompt_key}'", f"set {keys[1]} to the other column"
        )


def prompts(config: Config) -> Iterator[Finding]:
    """How a prompt is made is said without contradiction."""
    data = config.data
    if data.prompt_template is not None and not takes_prompt(data.prompt_template):
        yield Finding(
            ("data.prompt_template",),
            f"'{data.prompt_template}' must hold {{prompt}} and no other field",
            'write e.g. "Question: {prompt} Answer:", with {{ and }} for plain braces',
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
    if data.system_prompt is not None and data.prompt_format == "text":
        yield Finding(
            ("data.system_prompt", "data.prompt_format"),
            "a system message needs a chat, and prompts are plain text",
            "set data.prompt_format=chat, or put the words into data.prompt_template",
        )
    if data.truncation != "error" and data.filter_overlong_prompts:
        yield Finding(
            ("data.truncation", "data.filter_overlong_prompts"),
            "prompts that are too long are filtered, so that none is ever truncated",
            "set data.filter_overlong_prompts=false, or leave data.truncation at error",
        )


def takes_prompt(template: str) -> bool:
    """Whether it has a place for the prompt, and no other."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError:
        return False
    return names == ["prompt"]


RULES = (train_files, row_limits, columns, prompts)
