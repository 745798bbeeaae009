"""Keys of `reward`, `custom_reward_function` and `reward_model`: what a response is worth."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from distflow.config.keys import group, key
from distflow.config.values import Mismatch, convert

_FORM = "write e.g. {default: [math], code: [{name: format, weight: 0.1}, {name: repetition, options: {n: 4}}]}"
_PART = {"name", "weight", "options"}


Option: TypeAlias = bool | int | float | str


class RewardPart(NamedTuple):
    """One reward function of a domain; the score of a sample is the weighted sum of its parts.

    options: what the function is called with besides, by name: numbers, texts, truth values.
    """

    name: str
    weight: float = 1.0
    options: Mapping[str, Option] = {}

    def plain(self) -> object:
        """As short as it may be written in a config."""
        weight = {} if self.weight == 1.0 else {"weight": self.weight}
        options = {"options": dict(self.options)} if self.options else {}
        return {"name": self.name, **weight, **options} if weight or options else self.name


def parse_functions(value: object) -> dict[str, tuple[RewardPart, ...]]:
    """Reward functions by domain from plain data. Raises Mismatch."""
    if not isinstance(value, Mapping):
        raise Mismatch("is not a mapping from domains to reward functions", _FORM)
    return {_domain(domain): _parse_parts(domain, parts) for domain, parts in value.items()}


def plain_functions(functions: Mapping[str, tuple[RewardPart, ...]]) -> dict[str, list[object]]:
    """What `parse_functions` would read again, in its shortest form."""
    return {domain: [part.plain() for part in parts] for domain, parts in functions.items()}


def _domain(name: object) -> str:
    if not isinstance(name, str):
        raise Mismatch(f"has the domain {name!r}, which is not a text", "put the name of the domain in quotes")
    return name


def _parse_parts(domain: str, value: object) -> tuple[RewardPart, ...]:
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise Mismatch(f"has no reward function for the domain '{domain}'", _FORM)
    parts = tuple(_parse_part(domain, entry) for entry in entries)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise Mismatch(f"has '{name}' twice for the domain '{domain}'", "name it once, with the sum of the weights")
    return parts


def _parse_part(domain: str, value: object) -> RewardPart:
    if isinstance(value, str):
        return RewardPart(value)
    if isinstance(value, Mapping) and set(value) <= _PART and isinstance(value.get("name"), str):
        try:
            weight = convert(value.get("weight", 1.0), float)
        except Mismatch as error:
            raise Mismatch(f"has a weight of '{value['name']}' that {error.what}", error.advice) from None
        assert isinstance(weight, float)
        return RewardPart(value["name"], weight, _parse_options(value["name"], value.get("options", {})))
    raise Mismatch(f"has {value!r} for the domain '{domain}', neither a name nor {{name, weight, options}}", _FORM)


def _parse_options(name: str, value: object) -> dict[str, Option]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Mismatch(f"has options of '{name}' that are no mapping of names", "write e.g. options: {n: 4}")
    wrong = [key for key, option in value.items() if not isinstance(option, bool | int | float | str)]
    if wrong:
        raise Mismatch(f"has an option '{wrong[0]}' of '{name}' that is no number, text or truth value", "")
    return dict(value)


@dataclass(frozen=True)
class OverlongConfig:
    """Linear penalty on responses that end close to the length limit (DAPO)."""

    buffer_tokens: int = key(0, "length of the zone before data.max_response_length; 0 is off", minimum=0)
    factor: float = key(1.0, "penalty at the limit", minimum=0)


@dataclass(frozen=True)
class RewardConfig:
    """Reward functions by domain; `default` serves the domains that are not named."""

    functions: dict[str, tuple[RewardPart, ...]] = key(
        {"default": (RewardPart("math"),)},
        "domain → list of names or {name, weight, options}; names: math, exact_match, format, length, repetition, "
        "judge, custom",
        parse=parse_functions,
        plain=plain_functions,
    )
    timeout_s: float = key(10.0, "seconds that one verdict may take", above=0)
    max_error_share: float = key(
        0.5, "share of a step's verdicts that may fail before the run stops; 1 never stops", minimum=0, maximum=1
    )
    num_workers: int = key(2, "processes that judge", minimum=1)
    overlong: OverlongConfig = group(OverlongConfig)


@dataclass(frozen=True)
class CustomRewardConfig:
    """The function behind the reward named `custom`."""

    path: str | None = key(None, "Python file or module that holds it")
    name: str = key("compute_score", "its name there")


@dataclass(frozen=True)
class RewardModelConfig:
    """A trained model that judges."""

    enable: bool = key(False, "score with a reward model", later=True)
