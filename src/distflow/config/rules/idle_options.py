"""Options that are set, but have no effect while another key is off."""

from operator import attrgetter

from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules import Finding, Findings


def find_idle(config: Config, switch: str, on: str, why: str, *options: str) -> Findings:
    """The options that are not at their defaults, for a rule to call while the switch is off.

    on: a value of the switch with which they have an effect.
    """
    for option in options:
        if attrgetter(option)(config) != schema_keys()[option].default:
            yield Finding((option, switch), why, f"set {switch}={on}, or remove it")
