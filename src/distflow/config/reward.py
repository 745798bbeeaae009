"""Keys of `reward`, `custom_reward_function` and `reward_model`: what a response is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distflow.config.keys import group, key
from distflow.config.values import Mismatch, convert

_FORM = "write e.g. {default: [math], code: [{name: format, weight: 0.1}]}"


class RewardPart(NamedTuple):
    """One reward function of a domain; the score of a sample is the weighted sum of its parts."""

    name: str
    weight: float = 1.0


def parse_functions(value: object) -> dict[str, tuple[RewardPart, ...]]:
    """Reward functions by domain from plain data. Raises Mismatch."""
    if not isinstance(value, Mapping):
        raise Mismatch("is not a mapping from domains to reward functions", _FORM)
    return {_domain(domain): parse_parts(f"the domain '{domain}'", parts) for domain, parts in value.items()}


def plain_functions(functions: Mapping[str, tuple[RewardPart, ...]]) -> dict[str, list[object]]:
    """What `parse_functions` would read again, in its shortest form."""
    return {domain: plain_parts(parts) for domain, parts in functions.items()}


def plain_parts(parts: Sequence[RewardPart]) -> list[object]:
    """The same of one domain."""
    return [part.name if part.weight == 1.0 else {"name": part.name, "weight": part.weight} for part in parts]


def _domain(name: object) -> str:
    if not isinstance(name, str):
        raise Mismatch(f"has the domain {name!r}, which is not a text", "put the name of the domain in quotes")
    return name


def parse_parts(whose: str, value: object) -> tuple[RewardPart, ...]:
    """Those of one domain, from a name, {name, weight} or a list of such. whose: for messages. Raises Mismatch."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise Mismatch(f"has no reward function for {whose}", _FORM)
    parts = tuple(_parse_part(whose, entry) for entry in entries)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise Mismatch(f"has '{name}' twice for {whose}", "name it once, with the sum of the weights")
    return parts


def _parse_part(whose: str, value: object) -> RewardPart:
    if isinstance(value, str):
        return RewardPart(value)
    if isinstance(value, Mapping) and set(value) in ({"name"}, {"name", "weight"}) and isinstance(value["name"], str):
        try:
            weight = convert(value.get("weight", 1.0), float)
        except Mismatch as error:
            raise Mismatch(f"has a weight of '{value['name']}' that {error.what}", error.advice) from None
        assert isinstance(weight, float)
        return RewardPart(value["name"], weight)
    raise Mismatch(f"has {value!r} for {whose}, neither a name nor {{name, weight}}", _FORM)


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
        "domain → list of names or {name, weight}; names: math, exact_match, format, custom",
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
