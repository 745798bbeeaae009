"""Keys of `data` and of its domains, `data.domains.NAME`: files, their columns, and how a row becomes a prompt."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from distflow.config.compose.values import Mismatch, parse_band, parse_differing, parse_share_band
from distflow.config.keys.algorithm import DIFFERING
from distflow.config.keys.declare import KeyInfo, collect, group, key
from distflow.config.keys.reward import JUDGED_BY_DOMAIN, RewardPart, parse_parts, plain_parts

_FORM = "write e.g. {math: {train_files: math.jsonl, reward: math}, code: {train_files: code.jsonl, reward: custom}}"
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_TAKEN = ("default", "all")
_ALL_OR_SOME = "-1 means all"


def _of_data(name: str) -> str:
    return f"null is data.{name}"


def _of_rollout(name: str) -> str:
    return f"null is actor_rollout_ref.rollout.{name}"


@dataclass(frozen=True)
class DomainConfig:
    """Settings in which a domain differs from the rest of the run."""

    train_files: tuple[str, ...] = key((), "data to train on, in the forms of data.train_files")
    val_files: tuple[str, ...] = key((), "data to validate on")
    weight: float = key(
        1.0, "share of each step's prompts, in proportion to the weights of the others; 0 is never drawn", minimum=0
    )
    reward: tuple[RewardPart, ...] = key(
        (),
        "names or {name, weight}, as in reward.functions; null is its entry in reward.functions",
        parse=lambda value: () if value is None else parse_parts("it", value),
        plain=plain_parts,
    )
    filter_groups: bool | None = key(None, "drop and refill groups without a signal; null is algorithm.filter_groups")
    prompt_key: str | None = key(None, f"column of the prompt; {_of_data('prompt_key')}")
    answer_key: str | None = key(None, f"column of the ground truth; {_of_data('answer_key')}")
    solution_key: str | None = key(None, f"column of reference solutions; {_of_data('solution_key')}")
    response_key: str | None = key(None, f"column of the response to train on (sft); {_of_data('response_key')}")
    messages_key: str | None = key(None, f"column of conversations (sft); {_of_data('messages_key')}")
    tools_key: str | None = key(None, f"column of functions for the chat template; {_of_data('tools_key')}")
    prompt_format: str | None = key(None, _of_data("prompt_format"), choices=("text", "chat"))
    prompt_template: str | None = key(None, f"text around a str prompt; {_of_data('prompt_template')}")
    system_prompt: str | None = key(None, f"system message (chat); {_of_data('system_prompt')}")
    enable_thinking: bool | None = key(None, f"passed to the chat template; {_of_data('enable_thinking')}")
    pass_rate: tuple[float, float] | None = key(
        None, f"measured pass rates of the rows to train on; {_of_data('pass_rate')}", parse=parse_band
    )
    pass_rate_key: str | None = key(None, f"column of that rate; {_of_data('pass_rate_key')}")
    skip_outside: tuple[float, float] | None = key(
        None,
        f"shares of correct responses outside of which a row is skipped; {_of_data('skip_outside')}, [0, 1] is off",
        parse=parse_share_band,
    )
    train_max_samples: int = key(-1, "use only the first rows of train_files; -1 means all", minimum=-1)
    val_max_samples: int = key(-1, "use only the first rows of val_files; -1 means all", minimum=-1)
    max_response_length: int | None = key(
        None, f"longest response in tokens; {_of_data('max_response_length')}, which is also the maximum", minimum=1
    )
    n: int | None = key(None, f"responses a prompt; {_of_rollout('n')}", minimum=1)
    temperature: float | None = key(
        None, f"temperature of sampling and of the trained policy; {_of_rollout('temperature')}", above=0
    )
    top_p: float | None = key(None, _of_rollout("top_p"), above=0, maximum=1)
    top_k: int | None = key(None, _of_rollout("top_k"), minimum=-1)
    min_p: float | None = key(None, _of_rollout("min_p"), minimum=0, below=1)
    repetition_penalty: float | None = key(None, _of_rollout("repetition_penalty"), above=0)
    stop: tuple[str, ...] | None = key(None, f"strings that end a response; {_of_rollout('stop')}")


def domain_keys() -> dict[str, KeyInfo]:
    """The keys of a domain by name."""
    return collect(DomainConfig())


def parse_domains(value: object) -> dict[str, DomainConfig]:
    """Domains by name from plain data. Raises Mismatch."""
    if value is None:
        return {}
    found = parse_differing(value, domain_keys(), _FORM, _elsewhere)
    return {_name(name): DomainConfig(**settings) for name, settings in found.items()}


def plain_domains(domains: Mapping[str, DomainConfig]) -> dict[str, dict[str, object]]:
    """What `parse_domains` would read again, without defaults."""
    keys = domain_keys()
    return {
        name: {
            item.name: spec.plain(value) if (spec := keys[item.name].spec).plain else value
            for item in fields(domain)
            if (value := getattr(domain, item.name)) != keys[item.name].default
        }
        for name, domain in domains.items()
    }


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


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Mismatch(f"has a domain called {name!r}", "name it by letters, digits, '_', '-' and '.': metrics have it")
    if name in _TAKEN:
        raise Mismatch(f"has a domain called '{name}', which is reserved", "choose another name")
    return name


def _elsewhere(domain: str, key: str) -> str:
    """Where a key of a domain is set that is none of `data.domains`."""
    if key.partition(".")[0] in DIFFERING:
        return f"set algorithm.domains.{domain}.{key}"
    return f"set reward.domains.{domain}.{key}" if key in JUDGED_BY_DOMAIN else ""
