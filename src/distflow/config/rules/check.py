"""The check of a whole config: each value by itself, then what the values mean together. All problems at once."""

from collections.abc import Callable, Iterator, Mapping

from distflow.config.compose.values import check_bounds, show
from distflow.config.derived_settings import RunLimits
from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules import (
    Finding,
    algorithm,
    data,
    domains,
    models,
    normalization,
    pipeline,
    run,
    unused_options,
)
from distflow.config.rules.run import SIZE_RULES
from distflow.config.serialize import flatten
from distflow.errors import ConfigError, Problem

RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    *pipeline.RULES,
    *data.RULES,
    *domains.RULES,
    *models.RULES,
    *normalization.RULES,
    *algorithm.RULES,
    *domains.ALGORITHM_RULES,
    *run.RULES,
    *unused_options.RULES,
)


def check(config: Config) -> None:
    """Raise ConfigError with all that is wrong with a config built in Python."""
    problems = find_problems(config, {}, set())
    if problems:
        raise ConfigError(problems)


def find_problems(config: Config, origins: Mapping[str, str], faulty: set[str], complete: bool = True) -> list[Problem]:
    """Problems of the values. `faulty` keys hold defaults in place of what could not be read; no rule judges them.

    complete: whether what has not been set yet is a problem too.
    """
    problems = []
    values = flatten(config)
    faulty = set(faulty)
    for name, info in schema_keys().items():
        for mismatch in check_bounds(values[name], info):
            problems.append(Problem(((name, where(name, origins)),), mismatch.what, mismatch.advice))
            faulty.add(name)
    for finding in _findings(config):
        if finding.missing and not complete:
            continue
        if not any(_covers(key, name) for key in finding.keys for name in faulty):
            problems.append(_problem(finding, values, origins))
    return problems


def find_size_problems(config: Config, origins: Mapping[str, str], room: RunLimits) -> list[Problem]:
    """Sizes that do not fit into the room that a run turned out to have."""
    values = flatten(config)
    return [_problem(finding, values, origins) for rule in SIZE_RULES for finding in rule(config, room)]


def where(key: str, origins: Mapping[str, str]) -> str:
    """Where a key was set: by itself, by the mapping that holds it, or nowhere."""
    parent = key
    while parent:
        if parent in origins:
            return origins[parent]
        parent = parent.rpartition(".")[0]
    return "default"


def _findings(config: Config) -> Iterator[Finding]:
    for rule in RULES:
        yield from rule(config)
    for size_rule in SIZE_RULES:
        yield from size_rule(config, RunLimits())


def _problem(finding: Finding, values: Mapping[str, object], origins: Mapping[str, str]) -> Problem:
    places = tuple((_with_value(key, values), where(key, origins)) for key in finding.keys)
    return Problem(places, finding.what, finding.advice)


def _covers(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _with_value(key: str, values: Mapping[str, object]) -> str:
    value = values.get(key)
    return f"{key} = {show(value)}" if isinstance(value, bool | int | float | str) else key
