"""Keys of `data` and of its domains, `data.domains.NAME`: files, their columns, and how a row
becomes a prompt."""

import re
from dataclasses import dataclass

from distflow.config.compose.typed_values import (
    Mismatch,
    parse_differing,
)
from distflow.config.keys.algorithm import DIFFERING, DIFFERING_LOSS
from distflow.config.keys.declare import collect, key, plain_settings
from distflow.config.keys.reward import JUDGED_BY_DOMAIN, RewardPart, parse_parts, plain_parts

_FORM = (
    "write e.g. {math: {train_files: math.jsonl, reward: math}, code: {train_files: code.jsonl, "
    "reward: custom}}"
)
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_TAKEN = ("default", "all")
_ROLLOUT = "null is actor_rollout_ref.rollout"


@dataclass(frozen=True)
class DomainConfig:
    """Settings of a domain that override those of the run."""

    train_files: tuple[str, ...] = key((), "training data, in the forms of data.train_files")
    val_files: tuple[str, ...] = key((), "validation data")
    tags: tuple[str, ...] = key(
        (),
        (
            "tags (data.tag_key) of its rows in data.train_files and data.val_files, if it has no "
            "files of its own"
        ),
    )
    weight: float = key(
        1.0, "share of a step's prompts, relative to other weights; 0: not trained on", minimum=0
    )
    reward: tuple[RewardPart, ...] = key(
        (),
        "reward functions: names or {name, weight}; null is its entry in reward.functions",
        parse=lambda value: () if value is None else parse_parts("it", value),
        plain=plain_parts,
    )
    filter_groups: bool | None = key(
        None, "replace groups without a gradient signal; null is algorithm.filter_groups"
    )
    prompt_key: str | None = key(None, "column of the prompt; null is data.prompt_key")
    answer_key: str | None = key(None, "column of the ground truth; null is data.answer_key")
    response_key: str | None = key(
        None, "column of the response to train on (sft); null is data.response_key"
    )
    messages_key: str | None = key(None, "column of conversations (sft); null is data.messages_key")
    tools_key: str | None = key(
        None, "column of functions for the chat template; null is data.tools_key"
    )
    prompt_format: str | None = key(None, "null is data.prompt_format", choices=("text", "chat"))
    prompt_template: str | None = key(
        None, "template of a str prompt; null is data.prompt_template"
    )
    system_prompt: str | None = key(None, "system message (chat); null is data.system_prompt")
    enable_thinking: bool | None = key(
        None, "passed to the chat template; null is data.enable_thinking"
    )
    train_max_samples: int = key(
        -1, "use only the first rows of train_files; -1 is all", minimum=-1
    )
    val_max_samples: int = key(-1, "use only the first rows of val_files; -1 is all", minimum=-1)
    max_response_length: int | None = key(
        None,
        "maximum response length in tokens, at most data.max_response_length, which is the default",
        minimum=1,
    )
    n: int | None = key(None, f"responses per prompt; {_ROLLOUT}.n", minimum=1)
    temperature: float | None = key(
        None, f"temperature of the policy; {_ROLLOUT}.temperature", above=0
    )
    top_p: float | None = key(None, f"{_ROLLOUT}.top_p", above=0, maximum=1)
    top_k: int | None = key(None, f"{_ROLLOUT}.top_k", minimum=-1)
    min_p: float | None = key(None, f"{_ROLLOUT}.min_p", minimum=0, below=1)
    repetition_penalty: float | None = key(None, f"{_ROLLOUT}.repetition_penalty", above=0)
    stop: tuple[str, ...] | None = key(None, f"strings that end a response; {_ROLLOUT}.stop")


def parse_domains(value: object) -> dict[str, DomainConfig]:
    """Domains by name from plain data. Raises Mismatch."""
    if value is None:
        return {}
    found = parse_differing(value, collect(DomainConfig()), _FORM, _elsewhere)
    return {_name(name): DomainConfig(**settings) for name, settings in found.items()}


@dataclass(frozen=True)
class DataConfig:
    """Data sets and prompts."""

    train_files: tuple[str, ...] = key(
        (),
        (
            "training data: paths, data set ids, builtin:NAME or other forms of docs/data.md; one "
            "or a list"
        ),
    )
    val_files: tuple[str, ...] = key((), "validation data, in the same forms; null: no validation")
    domains: dict[str, DomainConfig] = key(
        {},
        (
            "name → settings of a domain, with its own files or its tags; each has a share of "
            "every step"
        ),
        parse=parse_domains,
        plain=plain_settings,
    )
    prompt_key: str = key(
        "prompt",
        "column of the prompt: str or a list of chat messages",
    )
    answer_key: str = key(
        "answer",
        "column of the ground truth for the reward function",
    )
    response_key: str = key(
        "response", "column of the response to train on (sft)", taken_by="responses_of_rows"
    )
    messages_key: str = key(
        "messages",
        "column of a conversation whose assistant turns are trained on (sft)",
        taken_by="responses_of_rows",
    )
    chosen_key: str = key(
        "chosen",
        (
            "column of the better response (preference, kto, rm): str or chat messages that end "
            "with it"
        ),
        taken_by="preference_pairs",
    )
    rejected_key: str = key(
        "rejected",
        "column of the worse response (preference, kto, rm), in the same form",
        taken_by="preference_pairs",
    )
    completion_key: str = key(
        "completion",
        "column of a labelled response (kto): str or chat messages",
        taken_by="labelled_responses",
    )
    label_key: str = key(
        "label",
        "column that says whether that response is desirable: true or false",
        taken_by="labelled_responses",
    )
    image_key: str | None = key(
        "images",
        "column of a row's image or list of images, for a model that reads images; null: none",
    )
    tools_key: str = key(
        "tools",
        "column of the functions for the chat template, as JSON schemas",
    )
    domain_key: str = key(
        "data_source",
        "column of a row's domain",
    )
    tag_key: str | None = key(
        None,
        (
            "column of a row's tag, by which domains select rows and accuracy is also reported; "
            "null: no tags"
        ),
    )
    prompt_format: str = key(
        "text",
        "chat: a str prompt becomes one user message of the chat template",
        choices=("text", "chat"),
    )
    prompt_template: str | None = key(
        None,
        "template of a str prompt, with {prompt}; {{ and }} are literal braces",
    )
    system_prompt: str | None = key(
        None,
        "system message before each prompt (chat)",
    )
    enable_thinking: bool = key(
        False,
        "passed to the chat template",
    )
    apply_chat_template_kwargs: dict[str, object] = key(
        {}, "additional arguments of the chat template, by name"
    )
    train_batch_size: int = key(512, "prompts per step", minimum=1)
    max_prompt_length: int = key(2048, "maximum prompt length in tokens", minimum=1)
    max_response_length: int = key(4096, "maximum response length in tokens", minimum=1)
    filter_overlong_prompts: bool = key(True, "exclude rows whose prompt is too long (counted)")
    truncation: str = key(
        "error",
        "how to truncate an overlong prompt that is not filtered",
        choices=("error", "left", "right", "middle"),
        taken_if=lambda own: not own.filter_overlong_prompts,
    )
    lazy: bool = key(
        False, "read each training row when its group starts, on its worker; not with tags"
    )
    bad_rows: str = key("error", "action for an unusable row", choices=("error", "skip"))
    broken_tests: str = key(
        "skip",
        "action for a training row whose tests no response can pass (it is counted)",
        choices=("skip", "error"),
        taken_by="reward_fn",
    )
    train_max_samples: int = key(
        -1,
        "use only the first rows of train_files; -1 is all",
        minimum=-1,
    )
    val_max_samples: int = key(
        -1,
        "use only the first rows of val_files; -1 is all",
        minimum=-1,
    )
    allow_overlap: bool = key(
        False, "do not warn about validation prompts that are trained on", taken_by="validation"
    )
    shuffle: bool = key(
        True, "reshuffle the rows in each epoch", taken_if=lambda own: own.sampler is None
    )
    sampler: str | None = key(
        None,
        "function that chooses the next rows from their scores so far, as file.py:function; null: "
        "each row once per epoch",
    )
    seed: int = key(
        1,
        "seed of the order of the rows",
        minimum=0,
        maximum=10**18,
        taken_if=lambda own: own.shuffle or own.sampler is not None,
    )
    num_loader_workers: int = key(4, "threads that tokenise the prompts; 0 uses none", minimum=0)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Mismatch(
            f"has a domain called {name!r}",
            "name it by letters, digits, '_', '-' and '.': metrics have it",
        )
    if name in _TAKEN:
        raise Mismatch(f"has a domain called '{name}', which is reserved", "choose another name")

    return name


def _elsewhere(domain: str, key: str) -> str:
    """An error hint: the key to set instead of one that belongs to another group's domains."""
    if key.partition(".")[0] in (*DIFFERING, *DIFFERING_LOSS):
        return f"set algorithm.domains.{domain}.{key}"
    if key in JUDGED_BY_DOMAIN:
        return f"set reward.domains.{domain}.{key}"
    return ""
