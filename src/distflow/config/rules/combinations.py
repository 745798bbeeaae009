"""The rules of `combinations.toml`: values of keys that contradict each other, and options without
an effect."""

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import filter as matching
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from distflow.builtin_names import ESTIMATORS, POLICY_LOSSES, ROLLOUT_ENGINES, Entry
from distflow.config.derived_settings import (
    action_head,
    filters_groups,
    find_pipeline,
    is_one_process,
    is_rl,
    may_have_critic,
    pipeline_name,
    policies_of,
    policies_of_agents,
    reads_pairs,
    reward_functions,
    uses_custom_reward,
    validates,
)
from distflow.config.keys.declare import is_group, walk
from distflow.config.keys.schema import Config, flatten, schema_keys
from distflow.config.migration.tables import as_override, constant, expand, read_toml
from distflow.config.rules import ACTOR, ROLLOUT, Finding
from distflow.config.rules.algorithm import has_several_rewards
from distflow.config.rules.models_and_engines import allocation_decides

_TABLES = read_toml(Path(__file__).with_suffix(".toml"))
_CONDITION = re.compile(r"([\w{},-]+\.[\w.{},-]+)(?: (is not|is|has|>) (.+))?")
_BUILT_IN: dict[str, Mapping[str, Entry]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    f"{ACTOR}.policy_loss": POLICY_LOSSES,
    f"{ROLLOUT}.name": ROLLOUT_ENGINES,
}


def _has_single_part(config: Config) -> bool:
    """Whether no domain of a built-in pipeline has several parts of the reward."""
    parts = max(map(len, reward_functions(config).values()), default=0) + (
        config.reward.overlong.buffer_tokens > 0
    )
    return parts < 2 and find_pipeline(config) is not None


_FACTS: dict[str, Callable[[Config], object]] = {
    "rl": is_rl,
    "pairs": reads_pairs,
    "critic": may_have_critic,
    "validation": validates,
    "one process": is_one_process,
    "allocation": allocation_decides,
    "custom pipeline": lambda config: find_pipeline(config) is None,
    "pipeline with critic": lambda config: (found := find_pipeline(config)) and found.has_critic,
    "drawn actions": action_head,
    "policies of agents": lambda config: (
        (owners := policies_of_agents(config)) and {*owners.values()} <= {*policies_of(config)}
    ),
    "custom reward": uses_custom_reward,
    "filtered groups": filters_groups,
    "single part": _has_single_part,
    "fsdp allocation": lambda config: re.search(r"\bfsdp\b", config.trainer.allocation or ""),
    "trained agent": lambda config: any(
        each.trainable for each in config.actor_rollout_ref.rollout.agents.values()
    ),
    "rewards of turns": lambda config: (
        has_several_rewards(config.algorithm) or config.algorithm.reward_level != "token"
    ),
}


def _without_effect(switch: str, on: list[str], why: str, options: list[str]) -> dict[str, Any]:
    """The rule of a row of `switches`."""
    is_off = (
        f"{switch} is not "
        f"{' or '.join(on) if isinstance(schema_keys()[switch].default, str) else 'set'}"
    )
    advice = f"set {switch}={on[0]}, or remove it"
    return {"each": options, "when": ["EACH is not default", is_off], "what": why, "advice": advice}


_TABLES["algorithm"] += [_without_effect(*row) for row in _TABLES["switches"]]


def _contradictions(table: str, config: Config) -> Iterator[Finding]:
    """No rule of the table holds."""
    values = flatten(config)
    for key, named in [*values.items()]:
        for name, own in named.items() if isinstance(named, dict) else ():
            values |= (
                {below: value for below, _, value, _ in walk(own, f"{key}.{name}")}
                if is_group(own)
                else {}
            )
    for rule in _rules(table, tuple(values)):
        named = [_fits(condition, config, values) for condition in rule["when"]]
        if all(named) and all(_fits(condition, config, values) for condition in rule.get("if", ())):
            default = schema_keys()[named[0]].default if "{default}" in rule["advice"] else None
            known = {
                **values,
                "key": named[0],
                "default": as_override(default),
                "pipeline": pipeline_name(config),
            }
            known["head"] = action_head(config)
            yield Finding(
                tuple(named),
                _filled(rule["what"], known),
                _filled(rule["advice"], known),
                "missing" in rule,
            )


def _filled(text: str, known: Mapping[str, object]) -> str:
    """The text with values in place of their names in braces."""
    return re.sub(r"\{([\w.]+)\}", lambda place: _shown(known[place[1]]), text)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@lru_cache
def _rules(table: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rules of a table, one for each word of `each`, or key of that pattern, with the text that
    it may have."""
    found = []
    for rule in _TABLES[table]:
        each = rule.get("each", [""])
        for words, text in (each if isinstance(each, dict) else dict.fromkeys(each, "")).items():
            pattern, space, rest = words.partition(" ")
            for first in [
                key
                for one in expand(pattern)
                for key in (matching(keys, one) if "*" in one else [one])
            ]:
                put = {"EACH": first + space + rest, "TEXT": text}
                found.append(
                    {
                        field: _replaced(given, put)
                        for field, given in rule.items()
                        if field != "each"
                    }
                )
    return found


def _replaced(given: Any, put: Mapping[str, str]) -> Any:
    if isinstance(given, list):
        return [_replaced(each, put) for each in given]
    return re.sub("EACH|TEXT", lambda word: put[word[0]], str(given))


def _fits(condition: str, config: Config, values: Mapping[str, object]) -> str:
    """The key of a condition that holds, or its fact; else empty."""
    found = _CONDITION.fullmatch(condition)
    if found is None:
        fact = condition.removeprefix("not ")
        return fact if bool(_FACTS[fact](config)) == (fact == condition) else ""
    keys, verb, wanted = found.groups()
    return next(
        (key for key in expand(keys) if verb is None or _holds(key, verb, wanted, values[key])), ""
    )


def _holds(key: str, verb: str, wanted: str, value: Any) -> bool:
    if verb == ">":
        return isinstance(value, int | float) and value > float(wanted)
    if verb == "has":
        return wanted.strip("'") in (value or ())
    return any(_is(key, value, word) for word in wanted.split(" or ")) == (verb == "is")


def _is(key: str, value: Any, word: str) -> bool:
    if word in ("set", "default"):
        return bool(value) if word == "set" else value == schema_keys()[key].default
    entry = _BUILT_IN[key].get(value) if key in _BUILT_IN else None
    if word == "built-in":
        return entry is not None
    return bool(getattr(entry, word, False)) or value in (word, constant(word))


ALGORITHM_RULES = (partial(_contradictions, "algorithm"),)
RULES = (*ALGORITHM_RULES, partial(_contradictions, "run"))
