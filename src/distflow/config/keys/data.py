"""Keys of `data`: files, what their columns are called, and how a row becomes a prompt."""

from dataclasses import dataclass

from distflow.config.compose.values import parse_band, parse_share_band
from distflow.config.domains import DomainConfig, parse_domains, plain_domains
from distflow.config.keys.declare import group, key

_ALL_OR_SOME = "-1 means all"


@dataclass(frozen=True)
class CurriculumConfig:
    """Weights of domains as a function of how many answers are right."""

    function: str | None = key(
        None, "learnability, or module:function or file.py:function of yours; null leaves the weights as they are"
    )
    every: int = key(1, "steps between its calls", minimum=1)
    smoothing: float = key(0.9, "what of a moving mean stays at each of them", minimum=0, below=1)


@dataclass(frozen=True)
class DataConfig:
    """Data sets and prompts."""

    train_files: tuple[str, ...] = key(
        (), "data to train on: a path, a data set's id, builtin:NAME or another form of docs/data.md, or a list"
    )
    val_files: tuple[str, ...] = key((), "data to validate on, in the same forms; null is no validation")
    domains: dict[str, DomainConfig] = key(
        {},
        "several sources in place of train_files and val_files, each with its share of every step: name → settings",
        parse=parse_domains,
        plain=plain_domains,
    )
    prompt_key: str = key("prompt", "column of the prompt: a text or a list of chat messages")
    answer_key: str = key("answer", "column of what the reward compares with")
    response_key: str = key("response", "column of the response to learn (sft)")
    messages_key: str = key("messages", "column of a conversation whose assistant turns are learnt (sft)")
    tools_key: str = key("tools", "column of the functions that the chat template shows, as JSON schemas")
    solution_key: str | None = key(
        None,
        "column of reference solutions, of which the first are judged before the start; null looks for those that the "
        "domain's rewards know (code: canonical_solution, code, solution, solutions), '' tries none",
    )
    domain_key: str = key("data_source", "column that says which kind of task a row is")
    prompt_format: str = key(
        "text", "chat: a text prompt becomes one user message of the chat template", choices=("text", "chat")
    )
    prompt_template: str | None = key(
        None, "text around a text prompt, with {prompt} in it; {{ and }} are plain braces"
    )
    system_prompt: str | None = key(None, "system message in front of each prompt (chat)")
    enable_thinking: bool = key(False, "handed to the chat template")
    apply_chat_template_kwargs: dict[str, object] = key({}, "what else is handed to it, by name")
    train_batch_size: int = key(512, "prompts a step", minimum=1)
    max_prompt_length: int = key(2048, "longest prompt in tokens", minimum=1)
    max_response_length: int = key(4096, "longest response in tokens", minimum=1)
    filter_overlong_prompts: bool = key(True, "leave out rows whose prompt is too long (counted)")
    truncation: str = key(
        "error",
        "what happens to a prompt that is too long and not filtered: which side is cut off",
        choices=("error", "left", "right", "middle"),
    )
    bad_rows: str = key("error", "what happens at a row that cannot be read", choices=("error", "skip"))
    pass_rate: tuple[float, float] | None = key(
        None, "[low, high]: train only on rows whose measured pass rate lies within; null takes all", parse=parse_band
    )
    pass_rate_key: str = key("pass_rate", "column of that rate, or of whatever number says how hard a row is")
    skip_outside: tuple[float, float] | None = key(
        None,
        "[low, high]: pass over a row for a while if the share of right answers was outside when it was last answered",
        parse=parse_share_band,
    )
    skip_epochs: int = key(1, "how many times it is passed over before it is tried again", minimum=1)
    broken_tests: str = key(
        "skip",
        "what happens at a training row whose tests are broken, so that no answer could be judged (named and counted)",
        choices=("skip", "error"),
    )
    train_max_samples: int = key(-1, f"use only the first rows of train_files; {_ALL_OR_SOME}", minimum=-1)
    val_max_samples: int = key(-1, f"use only the first rows of val_files; {_ALL_OR_SOME}", minimum=-1)
    shuffle: bool = key(True, "shuffle the rows anew in each epoch")
    seed: int = key(1, "seed of the order of the rows", minimum=0)
    curriculum: CurriculumConfig = group(CurriculumConfig)
    num_loader_workers: int = key(4, "threads that tokenise the prompts; 0 does it without", minimum=0)
