"""Typed configuration: schema, composition, checks, and derived settings. Does not import
torch."""

from distflow.config.compose.load_config import (
    Loaded,
    config_from_dict,
    config_of_run,
    fit_to,
    load_config,
    preset_config,
    with_changes,
)
from distflow.config.compose.setting_origins import preset_names
from distflow.config.derived_settings import RunLimits, pipeline_name
from distflow.config.describe_config import describe, explain
from distflow.config.keys.declare import key
from distflow.config.keys.schema import (
    Config,
    changed_keys,
    flatten,
    register_config_group,
    to_dict,
    to_yaml,
)
from distflow.config.rules.check_config import check
from distflow.errors import ConfigError, UserError

__all__ = [
    "Config",
    "ConfigError",
    "Loaded",
    "RunLimits",
    "UserError",
    "changed_keys",
    "config_from_dict",
    "config_of_run",
    "describe",
    "explain",
    "fit_to",
    "flatten",
    "key",
    "load_config",
    "preset_config",
    "preset_names",
    "pipeline_name",
    "register_config_group",
    "to_dict",
    "to_yaml",
    "with_changes",
]
