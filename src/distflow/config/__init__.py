"""Typed configuration: schema, composition by Hydra, checks, and what numbers mean together. Imports no torch."""

from distflow.config.check import check
from distflow.config.describe import describe
from distflow.config.errors import ConfigError, Problem, UserError
from distflow.config.explain import explain
from distflow.config.keys import key
from distflow.config.load import (
    config_from_dict,
    config_of_run,
    fit_to,
    load_config,
    preset_config,
    with_changes,
)
from distflow.config.loaded import Loaded
from distflow.config.program import program_name
from distflow.config.schema import Config, register_config_group
from distflow.config.show import RESUMABLE, changed_keys, diff, flatten, to_dict, to_yaml
from distflow.config.sizes import Room
from distflow.config.sources import preset_names

__all__ = [
    "RESUMABLE",
    "Config",
    "ConfigError",
    "Loaded",
    "Problem",
    "Room",
    "UserError",
    "changed_keys",
    "check",
    "config_from_dict",
    "config_of_run",
    "describe",
    "diff",
    "explain",
    "fit_to",
    "flatten",
    "key",
    "load_config",
    "preset_config",
    "preset_names",
    "program_name",
    "register_config_group",
    "to_dict",
    "to_yaml",
    "with_changes",
]
