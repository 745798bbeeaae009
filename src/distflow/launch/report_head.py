"""The head of the report: what a run is, and how it differs from its preset."""

import os
import platform
import shlex
import sys
from pathlib import Path

from distflow.config import Config, Loaded, describe, preset_config
from distflow.config.compose.setting_origins import (
    display,
    names_in_defaults,
    preset_files,
    read_node,
)
from distflow.config.keys.schema import diff, schema_keys, show_value
from distflow.launch.read_config import Data


def changes(loaded: Loaded) -> tuple[str, list[dict[str, str]]]:
    """The preset built on ("" if none), and each key that now has another value.

    A change is `{"key", "before", "now", "where"}`, with values as written in YAML and `where` as
    in `Loaded.origin`. Without a preset, `before` is the schema's default.
    """
    files = {origin.partition(":")[0] for origin in loaded.origins.values()}
    named = [name for name, path in preset_files().items() if display(path) in files]
    preset = max(named, key=_num_bases, default="")  # it builds on all others
    before = preset_config(preset) if preset else Config()
    keys = schema_keys()

    changed = []
    for key, old, new in diff(before, loaded.config):
        changed.append(
            {
                "key": key,
                "before": show_value(keys[key], old),
                "now": show_value(keys[key], new),
                "where": loaded.origin(key),
            }
        )

    return preset, changed


def _num_bases(preset: str) -> int:
    """The presets that a preset builds on, directly or by others."""
    bases = names_in_defaults(read_node(preset_files()[preset]))
    return sum(1 + _num_bases(base) for base in bases if base != "_self_")


def description(loaded: Loaded, data: Data) -> dict[str, object]:
    """The head of the report, with the changes from the preset."""
    config = loaded.config
    preset, changed = changes(loaded)
    counts = {
        "for validation": sum(map(len, data.validation.values())),
        "left out, with broken tests": len(data.broken),
    }

    return {
        "experiment": f"{config.trainer.project_name} / {config.trainer.experiment_name}",
        "model": str(config.actor_rollout_ref.model.path),
        "data": ", ".join([data.how_many, *(f"{n:,} {what}" for what, n in counts.items() if n)]),
        "batch": describe(config)[0],
        "command": shlex.join(sys.argv),
        "machine": f"{platform.node()}: {cpu_name()}, {os.cpu_count()} cores",
        "preset": preset,
        "changed": changed,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()

    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
