"""Rules of data: files, columns, prompts."""

from collections.abc import Iterator
from string import Formatter

from distflow.builtin_names import TEMPLATE_PARAMETERS
from distflow.config.keys.data import DataConfig, DomainConfig
from distflow.config.keys.schema import Config
from distflow.config.rules import Finding, Findings

_TEMPLATE_OPTIONS = "data.apply_chat_template_kwargs"


def sources(config: Config) -> Iterator[tuple[str, DataConfig | DomainConfig]]:
    """Every group that names data: `data` and each of its domains, with its key."""
    yield "data", config.data
    for name, domain in config.data.domains.items():
        yield f"data.domains.{name}", domain


def has_data(config: Config) -> Findings:
    """There is data to train on."""
    if not config.data.train_files and not config.data.domains:
        yield Finding(
            ("data.train_files", "data.domains"),
            "there is no data to train on",
            "set data.train_files=FILE.jsonl (or .parquet, .csv, a data set's id, builtin:NAME)",
            missing=True,
        )


def named_files(config: Config) -> Findings:
    """Files have names; an empty one would be the current folder."""
    for key, source in sources(config):
        for split, names in (("train", source.train_files), ("val", source.val_files)):
            if any(not name.strip() for name in names):
                what = "one of the files has an empty name"
                yield Finding((f"{key}.{split}_files",), what, "remove it from the list")


def limits(config: Config) -> Findings:
    """The limits leave some rows of data."""
    for key, source in sources(config):
        for split in ("train", "val"):
            limit = getattr(source, f"{split}_max_samples")
            limit_key = f"{key}.{split}_max_samples"
            if limit == 0:
                advice = "set it to -1 for all rows, or to 1 or more"
                yield Finding((limit_key,), "no row would be left", advice)


def templates(config: Config) -> Findings:
    """A template has a place for the prompt."""
    for key, source in sources(config):
        if source.prompt_template is not None and not _takes_prompt(source.prompt_template):
            yield Finding(
                (f"{key}.prompt_template",),
                f"'{source.prompt_template}' must contain {{prompt}} and no other field",
                'write e.g. "Question: {prompt} Answer:", with {{ and }} for plain braces',
            )


def system_prompts(config: Config) -> Findings:
    """A system message is part of a chat."""
    for key, source in sources(config):
        form = source.prompt_format or config.data.prompt_format
        if source.system_prompt is not None and form != "chat":
            yield Finding(
                (f"{key}.system_prompt", f"{key}.prompt_format"),
                "a system message needs prompt_format=chat, but prompts are plain text",
                f"set {key}.prompt_format=chat, or put the text into {key}.prompt_template",
            )


def template_options(config: Config) -> Findings:
    """The options of the chat template do not contradict other keys."""
    data = config.data
    options = data.apply_chat_template_kwargs
    for name in options:
        if name in TEMPLATE_PARAMETERS:
            into_rows = ", and put tools into the rows (data.tools_key)"
            advice = "remove it" + (into_rows if name == "tools" else "")
            what = f"the template is called with '{name}' already"
            yield Finding((_TEMPLATE_OPTIONS,), what, advice)


def _takes_prompt(template: str) -> bool:
    """Whether `{prompt}` is its only field."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError:
        return False
    return names == ["prompt"]


def samplers(config: Config) -> Findings:
    """A sampler chooses among all rows, and domains have exact shares."""
    if config.data.sampler is not None and config.data.domains:
        yield Finding(
            ("data.sampler", "data.domains"),
            "each domain has a fixed share of every step, so that a sampler cannot choose the rows",
            "remove data.domains and name the rows' domains in a column (data.domain_key), or set "
            "data.sampler=null",
        )


RULES = (
    samplers,
    has_data,
    named_files,
    limits,
    templates,
    system_prompts,
    template_options,
)
