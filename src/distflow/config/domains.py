"""Settings of one domain among several: `data.domains.NAME`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from distflow.config.compose.values import Mismatch, parse_band, parse_share_band, read_value
from distflow.config.keys.algorithm import DIFFERING
from distflow.config.keys.declare import KeyInfo, collect, key
from distflow.config.keys.reward import JUDGED_BY_DOMAIN, RewardPart, parse_parts, plain_parts
from distflow.errors import nearest

_FORM = "write e.g. {math: {train_files: math.jsonl, reward: math}, code: {train_files: code.jsonl, reward: custom}}"
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_TAKEN = ("default", "all")


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
    if not isinstance(value, Mapping):
        raise Mismatch("is not a mapping from domains to their settings", _FORM)
    return {_name(name): _parse_domain(str(name), settings) for name, settings in value.items()}


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


def _name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Mismatch(f"has a domain called {name!r}", "name it by letters, digits, '_', '-' and '.': metrics have it")
    if name in _TAKEN:
        raise Mismatch(f"has a domain called '{name}', which is reserved", "choose another name")
    return name


def _parse_domain(name: str, settings: object) -> DomainConfig:
    if not isinstance(settings, Mapping):
        raise Mismatch(f"has {settings!r} for the domain '{name}', which is no mapping of settings", _FORM)
    keys = domain_keys()
    values: dict[str, Any] = {}
    for setting, value in settings.items():
        if setting not in keys:
            raise Mismatch(f"has '{setting}' for the domain '{name}'", _where(name, str(setting), keys))
        values[setting] = _parse_value(name, value, keys[setting])
    return DomainConfig(**values)


def _where(domain: str, setting: str, keys: Mapping[str, KeyInfo]) -> str:
    if setting.partition(".")[0] in DIFFERING:
        return f"set algorithm.domains.{domain}.{setting}"
    if setting in JUDGED_BY_DOMAIN:
        return f"set reward.domains.{domain}.{setting}"
    near = nearest(setting, keys)
    meant = f"did you mean {near}? " if near else ""
    return f"{meant}a domain has {', '.join(keys)}"


def _parse_value(domain: str, value: object, info: KeyInfo) -> object:
    try:
        return read_value(value, info)
    except Mismatch as error:
        raise Mismatch(f"has '{info.name}' of the domain '{domain}', which {error.what}", error.advice) from None
