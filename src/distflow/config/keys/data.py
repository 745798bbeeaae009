"""Keys of `data`: files, their columns, and how a row becomes a prompt."""

from dataclasses import dataclass

from distflow.config.compose.values import parse_band, parse_share_band
from distflow.config.domains import DomainConfig, parse_domains, plain_domains
from distflow.config.keys.declare import group, key

_ALL_OR_SOME = "-1 means all"


@dataclass(frozen=True)
class CurriculumConfig:
    """Weights of domains as a function of their share of correct responses."""

    function: str | None = key(
        None, "learnability, or your module:function or file.py:function; null leaves the weights as they are"
    )
    every: int = key(1, "steps between its calls", minimum=1)
    smoothing: float = key(0.9, "factor by which a moving mean decays at each of them", minimum=0, below=1)


@dataclass(frozen=True)
class DataConfig:
    """Data sets and prompts."""

    train_files: tuple[str, ...] = key(
        (), "data to train on: a path, a data set's id, builtin:NAME or another form of docs/data.md, or a list"
    )
    val_files: tuple[str, ...] = key((), "data to validate on, in the same forms; null is no validation")
    domains: dict[str, DomainConfig] = key(
        {},
        "several sources instead of train_files and val_files, each with its share of every step: name → settings",
        parse=parse_domains,
        plain=plain_domains,
    )
    prompt_key: str = key("prompt", "column of the prompt: str or a list of chat messages")
    answer_key: str = key("answer", "column of the ground truth, which the reward function compares with")
    response_key: str = key("response", "column of the response to train on (sft)")
    messages_key: str = key("messages", "column of a conversation whose assistant turns are trained on (sft)")
    tools_key: str = key("tools", "column of the functions that the chat template shows, as JSON schemas")
    solution_key: str | None = key(
        None,
        "column of reference solutions, the first of which are scored before the start; null looks for "
        "those that the reward functions know (code: canonical_solution, code, solution, solutions), '' scores none",
    )
    domain_key: str = key("data_source", "column of a row's domain")
    prompt_format: str = key(
        "text", "chat: a str prompt becomes one user message of the chat template", choices=("text", "chat")
    )
    prompt_template: str | None = key(None, "text around a str prompt, with {prompt} in it; {{ and }} are plain braces")
    system_prompt: str | None = key(None, "system message in front of each prompt (chat)")
    enable_thinking: bool = key(False, "passed to the chat template")
    apply_chat_template_kwargs: dict[str, object] = key({}, "further arguments of the chat template, by name")
    train_batch_size: int = key(512, "prompts a step", minimum=1)
    max_prompt_length: int = key(2048, "longest prompt in tokens", minimum=1)
    max_response_length: int = key(4096, "longest response in tokens", minimum=1)
    filter_overlong_prompts: bool = key(True, "leave out rows whose prompt is too long (counted)")
    truncation: str = key(
        "error",
        "for a prompt that is too long and not filtered: which side is cut off",
        choices=("error", "left", "right", "middle"),
    )
    bad_rows: str = key("error", "for a row that cannot be read", choices=("error", "skip"))
    pass_rate: tuple[float, float] | None = key(
        None, "[low, high]: train only on rows whose measured pass rate lies within; null takes all", parse=parse_band
    )
    pass_rate_key: str = key("pass_rate", "column of that rate, or of another number that says how hard a row is")
    skip_outside: tuple[float, float] | None = key(
        None,
        "[low, high]: skip a row for skip_epochs if the share of correct responses was outside when it was last used",
        parse=parse_share_band,
    )
    skip_epochs: int = key(1, "how many times such a row is skipped before it is used again", minimum=1)
    broken_tests: str = key(
        "skip",
        "for a training row with broken tests, for which no response could be scored (named and counted)",
        choices=("skip", "error"),
    )
    train_max_samples: int = key(-1, f"use only the first rows of train_files; {_ALL_OR_SOME}", minimum=-1)
    val_max_samples: int = key(-1, f"use only the first rows of val_files; {_ALL_OR_SOME}", minimum=-1)
    shuffle: bool = key(True, "shuffle the rows anew in each epoch")
    seed: int = key(1, "seed of the order of the rows", minimum=0)
    curriculum: CurriculumConfig = group(CurriculumConfig)
    num_loader_workers: int = key(4, "threads that tokenise the prompts; 0 uses none", minimum=0)
