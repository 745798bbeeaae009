"""The check of a whole config: each value by itself, then the values together. Finds all problems
at once."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import cast

from distflow.builtin_names import WORKFLOWS
from distflow.config.compose.typed_values import check_bounds, show
from distflow.config.compose.unknown_keys import parents
from distflow.config.derived_settings import RunLimits
from distflow.config.keys.schema import Config, flatten, schema_keys, with_values
from distflow.config.rules import (
    Finding,
    Findings,
    agents,
    checkpoints,
    correction,
    data,
    distill,
    domains,
    engines,
    estimator,
    filters,
    kl,
    launchers,
    losses,
    models,
    normalization,
    optimizers,
    pipeline,
    rewards,
    run,
    sampling,
    sharding,
)
from distflow.config.rules.sizes import SIZE_RULES
from distflow.errors import ConfigError, Problem
from distflow.import_target import load

Rule = Callable[[Config], Findings]

SUBJECTS = (
    pipeline,
    data,
    domains,
    rewards,
    models,
    engines,
    sampling,
    agents,
    optimizers,
    sharding,
    estimator,
    normalization,
    kl,
    losses,
    correction,
    filters,
    distill,
    launchers,
    checkpoints,
    run,
)
"""Each has its rules in the tuple RULES. Problems are reported in this order."""


def check(config: Config) -> None:
    """Raises ConfigError with all problems of a config built in Python."""
    if problems := find_problems(config, {}, set()):
        raise ConfigError(problems)


def within_bounds(
    config: Config, origins: Mapping[str, str]
) -> tuple[Config, list[Problem], set[str]]:
    """The config with defaults in place of values out of bounds, on which no rule can compute; the
    problems of these values, and their keys."""
    values = flatten(config)
    keys = schema_keys()

    problems = list[Problem]()
    defaults = dict[str, object]()
    for name, info in keys.items():
        for mismatch in check_bounds(values[name], info):
            problems.append(
                Problem(((name, where(name, origins)),), mismatch.what, mismatch.advice)
            )
            defaults[name] = info.default

    return with_values(config, defaults) if defaults else config, problems, {*defaults}


def find_problems(
    config: Config, origins: Mapping[str, str], faulty: set[str], complete: bool = True
) -> list[Problem]:
    """Problems of the values.

    origins: where keys were set. faulty: keys whose value could not be read; no rule judges their
    defaults.
    complete: whether missing required keys are problems too.
    """
    config, problems, out_of_bounds = within_bounds(config, origins)
    values = flatten(config)
    faulty = faulty | out_of_bounds
    findings = list[Finding]()
    for find in _rules(config):
        findings += find(config)
    for find_misfits in SIZE_RULES:
        findings += [misfit.finding for misfit in find_misfits(config, RunLimits())]

    for finding in findings:
        if finding.missing and not complete:
            continue
        names = chain.from_iterable((key, *parents(key)) for key in finding.keys)
        if faulty.isdisjoint(names):
            problems.append(_problem(finding, values, origins))

    return problems


def _rules(config: Config) -> Iterator[Rule]:
    for subject in SUBJECTS:
        yield from subject.RULES
    if not config.actor_rollout_ref.rollout.workflow_kwargs:
        return

    for workflow in WORKFLOWS.values():
        if workflow.rules:
            yield from cast(tuple[Rule, ...], load(workflow.rules))


def find_size_problems(
    config: Config, origins: Mapping[str, str], room: RunLimits
) -> list[Problem]:
    values = flatten(config)
    found: list[Problem] = []
    for rule in SIZE_RULES:
        for misfit in rule(config, room):
            found.append(_problem(misfit.finding, values, origins))
    return found


def where(key: str, origins: Mapping[str, str]) -> str:
    """Where a key, or the mapping that holds it, was set; else "default"."""
    parent = key
    while parent:
        if parent in origins:
            return origins[parent]
        parent = parent.rpartition(".")[0]
    return "default"


def _problem(finding: Finding, values: Mapping[str, object], origins: Mapping[str, str]) -> Problem:
    places = []
    for key in finding.keys:
        value = values.get(key)
        subject = key
        if isinstance(value, bool | int | float | str):
            subject = f"{key} = {show(value)}"
        places.append((subject, where(key, origins)))

    return Problem(tuple(places), finding.what, finding.advice)
