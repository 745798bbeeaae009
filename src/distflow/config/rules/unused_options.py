"""Options without an effect: those whose switch is off, and enabled terms with weight 0."""

import tomllib
from collections.abc import Iterator
from fnmatch import filter as matching
from pathlib import Path

from distflow.config.keys.schema import Config, changed_from_default, flatten, schema_keys
from distflow.config.rules import Finding

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def unused_options(config: Config) -> Iterator[Finding]:
    """Every option that is set has an effect."""
    values, keys = flatten(config), schema_keys()
    for switch, on, why, patterns in _TABLES["switches"]:
        has_names = isinstance(keys[switch].default, str)
        if not (values[switch] in on if has_names else values[switch]):
            options = [option for pattern in patterns for option in matching(keys, pattern)]
            for option in changed_from_default(values, options):
                yield Finding((option, switch), why, f"set {switch}={on[0]}, or remove it")


def zero_weights(config: Config) -> Iterator[Finding]:
    """An enabled term has a weight."""
    values = flatten(config)
    for switch, off, weight, example in _TABLES["terms"]:
        if values[switch] and values[weight] == 0:
            what, advice = "the term is on but has the weight 0", f"set it to {example}, or {switch}={off}"
            yield Finding((weight, switch), what, advice)


RULES = (unused_options, zero_weights)
