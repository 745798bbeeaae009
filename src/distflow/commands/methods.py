"""`distflow methods`: the methods of papers, one of them, or what differs between two."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.builtin_names import (
    ESTIMATORS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
    read_algorithms,
)
from distflow.commands.printing import aligned, print_escaped
from distflow.config.compose.setting_origins import display, is_given, method_names
from distflow.config.derived_settings import may_have_critic, pipeline_name
from distflow.config.keys.schema import diff, flatten, schema_keys, show_value
from distflow.errors import UserError
from distflow.method_files import MethodFile

if TYPE_CHECKING:
    from distflow.config import Loaded


def add_methods_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME|FILE.py",
        help="one: its settings and its file; two: what differs; none: all methods",
    )


def run_methods(arguments: argparse.Namespace) -> int:
    found = [read_method(name) for name in arguments.names]
    if not found:
        print_escaped(_all_methods())
    elif len(found) == 1:
        print_escaped(aligned([*_one_method(*found)], right=set()))
    elif len(found) == 2:
        print_escaped(_differences(*found))
    else:
        raise UserError("distflow methods compares two methods, not more")

    return 0


@dataclass(frozen=True)
class Method:
    """A method whose settings are composed."""

    name: str
    path: Path
    file: MethodFile
    loaded: "Loaded"
    estimator: Estimator
    loss: PolicyLoss

    @property
    def needs(self) -> str:
        """What a run has beside the policy."""
        config = self.loaded.config
        has_kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
        needs = {
            "critic": may_have_critic(config),
            "reference": has_kl,
            "groups": self.estimator.needs_group,
            "greedy responses": self.estimator.needs_greedy,
        }
        return ", ".join(name for name, is_needed in needs.items() if is_needed)

    @property
    def keys(self) -> str:
        """The options of its estimator and its loss, with their defaults."""
        options = {**self.estimator.options, **self.loss.options}
        return ", ".join(f"{name}={default}" for name, default in options.items())


def read_method(name: str) -> Method:
    """Raises ConfigError for an unknown one."""
    from distflow.config import load_config
    from distflow.config.compose.composition import find_source

    loaded = load_config(name, complete=False)
    path = find_source(name)
    if path.suffix != ".py":
        raise UserError(f"{name} is no method, but settings alone: distflow config {name}")

    file = MethodFile.of(path)
    estimators, losses = read_algorithms({path.stem: file})
    estimator = loaded.config.algorithm.adv_estimator
    loss = loaded.config.actor_rollout_ref.actor.policy_loss
    return Method(
        name,
        path,
        file,
        loaded,
        (ESTIMATORS | estimators).get(estimator, Estimator(estimator)),
        (POLICY_LOSSES | losses).get(loss, PolicyLoss(loss)),
    )


def _all_methods() -> Iterator[str]:
    rows = [("name", "paper", "needs", "keys that act")]
    for method in map(read_method, method_names()):
        rows.append((method.name, method.file.paper, method.needs, method.keys))
    yield from aligned(rows, right=set())


def _one_method(method: Method) -> Iterator[tuple[str, str]]:
    yield "method", method.file.title
    yield "paper", method.file.paper
    yield "file", str(method.path)
    yield "pipeline", pipeline_name(method.loaded.config)
    yield "needs", method.needs
    yield "advantages", method.estimator.description
    yield "loss", method.loss.description
    yield "keys", method.keys

    infos = schema_keys()
    values = flatten(method.loaded.config)
    own = display(method.path)
    for key, origin in method.loaded.origins.items():
        if key in infos and (origin.startswith(f"{own}:") or not is_given(origin)):
            yield "setting", f"{key}={show_value(infos[key], values[key])}  ({origin})"


def _differences(old: Method, new: Method) -> Iterator[str]:
    """In words: what the other method computes, and each setting with its meaning."""
    yield f"{new.name} differs from {old.name}:"
    pairs = {
        "advantages": (old.estimator.description, new.estimator.description),
        "loss": (old.loss.description, new.loss.description),
        "needs": (old.needs, new.needs),
    }
    for what, (before, after) in pairs.items():
        if before != after:
            yield f"- {what}: {after or 'nothing'}, instead of: {before or 'nothing'}"

    infos = schema_keys()
    for key, was, now in diff(old.loaded.config, new.loaded.config):
        if not key.startswith("trainer."):
            values = f"{show_value(infos[key], now)} instead of {show_value(infos[key], was)}"
            yield f"- {key}: {values} ({infos[key].spec.description})"
