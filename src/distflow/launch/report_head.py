"""The head of the report: what a run is, and how it differs from its preset."""

import os
import platform
import shlex
import sys
from functools import cache
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from distflow.config import Config, Loaded, describe
from distflow.config.compose.load_config import build
from distflow.config.compose.setting_origins import PRESETS, preset_names
from distflow.config.derived_settings import (
    is_one_process,
)
from distflow.config.keys.schema import diff, schema_keys, show_value
from distflow.launch.read_config import Data
from distflow.launch.threads import threads_of, worker_cores


def changes(loaded: Loaded) -> tuple[str, list[dict[str, str]]]:
    """The preset built on ("" if none), and each key that now has another value.

    A change is `{"key", "before", "now", "where"}`, with values as written in YAML and `where` as
    in `Loaded.origin`. Without a preset, `before` is the schema's default.
    """
    named = [
        each
        for each in preset_names()
        if any(o.startswith(f"presets/{each}.yaml:") for o in loaded.origins.values())
    ]
    preset = max(named, key=lambda name: len(_chain(name)), default="")  # it builds on all others
    before = Config()
    keys = schema_keys()
    if preset:  # read without Hydra, which would cost every start a tenth of a second
        values = OmegaConf.to_container(OmegaConf.merge(*map(_read, _chain(preset))), resolve=True)
        assert isinstance(values, dict)
        before = build({str(key): value for key, value in values.items() if key != "defaults"}, {})[
            0
        ]
    return preset, [
        {
            "key": key,
            "before": show_value(keys[key], old),
            "now": show_value(keys[key], new),
            "where": loaded.origin(key),
        }
        for key, old, new in diff(before, loaded.config)
    ]


def _chain(name: str) -> list[str]:
    """The presets that a preset builds on, followed by its own name."""
    return [
        *(
            part
            for base in _read(name).get("defaults", [])
            if base != "_self_"
            for part in _chain(base)
        ),
        name,
    ]


@cache
def _read(name: str) -> DictConfig:
    preset = OmegaConf.load(PRESETS / f"{name}.yaml")
    assert isinstance(preset, DictConfig), "a preset is a mapping"
    return preset


def description(loaded: Loaded, data: Data) -> dict[str, object]:
    """The head of the report, with the changes from the preset."""
    config, (preset, changed) = loaded.config, changes(loaded)
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
        "machine": f"{platform.node()}: {cpu_name()}, {os.cpu_count()} cores, {_threads(config)}",
        "preset": preset,
        "changed": changed,
    }


def _threads(config: Config) -> str:
    """The threads of a worker, in words."""
    trainer, rollout = threads_of(config)
    is_alone = is_one_process(config)
    of = "threads" if is_alone else "threads of a worker"
    if rollout is not None:
        return f"{of}: {trainer} to train, {rollout} to generate"
    shared = torch.get_num_threads() if is_alone else worker_cores(config)
    return f"{of}: {trainer or shared}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
