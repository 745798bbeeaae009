"""The fingerprint that a resumed run must match, the head of the report, and the changes from the
preset."""

import hashlib
import json
import os
import platform
import shlex
import sys
from functools import cache
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from distflow.builtin_names import CURRICULA, CUSTOM_REWARD, REWARDS
from distflow.config import Config, Loaded, describe
from distflow.config.compose.load_config import build
from distflow.config.compose.setting_origins import PRESETS, preset_names
from distflow.config.derived_settings import (
    code_of_workflow,
    config_of_policy,
    is_one_process,
    named_algorithms,
    policies_of_agents,
    reward_functions,
    trained_policies,
)
from distflow.config.keys.reward import scoring_models
from distflow.config.keys.schema import diff, schema_keys, show_value
from distflow.launch.device_and_threads import choose_device, threads_of, worker_cores
from distflow.launch.fit_config_to_files import Data
from distflow.models.cpu_kernels import build as native
from distflow.models.model_identity_and_weight_soundness import identity
from distflow.observe.run_reader import VALIDATION_ROWS
from distflow.rewards.code.reward import isolation_of
from distflow.rewards.load_and_call_reward_functions import fingerprint_target, target_of
from distflow.rewards.pool.domain_pools import RewardSettings

PROMPT_FORMAT = "prompt_format"
"""The fact of a run by which its policy is asked later."""


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
        "machine": f"{platform.node()}: {_cpu_name()}, {os.cpu_count()} cores, {_threads(config)}",
        "preset": preset,
        "changed": changed,
    }


def facts(config: Config, data: Data) -> dict[str, object]:
    """What a resumed run must share with its checkpoint to be the same run, and to be bit-equal."""
    rollout_threads = threads_of(config)[1]
    vocabulary = json.dumps(sorted(data.tokenizer.get_vocab().items()), ensure_ascii=True)
    return {
        "data_fingerprint": data.train.fingerprint(),
        VALIDATION_ROWS: _validation_rows(data),
        "tokenizer_fingerprint": hashlib.sha256(vocabulary.encode()).hexdigest(),
        PROMPT_FORMAT: _prompt_format(config, data),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "device": choose_device(config).type,
        **_users_facts(config),
        # If generation and training run at once, generation has its own threads.
        **({} if rollout_threads is None else {"rollout_threads": rollout_threads}),
        # The native code replaces torch's operations on a CPU.
        **({"native_code": native.name()} if choose_device(config).type == "cpu" else {}),
    }


def _prompt_format(config: Config, data: Data) -> str:
    """How the model reads what it is asked: "chat" by its template, else "text"."""
    formats = {
        config.data.prompt_format,
        *(domain.prompt_format for domain in config.data.domains.values()),
    }
    sends_messages = config.actor_rollout_ref.rollout.workflow in ("agent", "verifiers")
    has_template = bool(getattr(data.tokenizer, "chat_template", None))
    is_chat = "chat" in formats or data.looked_at.has_messages or (sends_messages and has_template)
    return "chat" if is_chat else "text"


def _validation_rows(data: Data) -> str:
    """A short hash of the rows of all validation sets; empty without any."""
    sets = {name: found.fingerprint() for name, found in data.validation.items()}
    return (
        hashlib.sha256(json.dumps(sets, sort_keys=True).encode()).hexdigest()[:12] if sets else ""
    )


def _threads(config: Config) -> str:
    """The threads of a worker, in words."""
    trainer, rollout = threads_of(config)
    is_alone = is_one_process(config)
    of = "threads" if is_alone else "threads of a worker"
    if rollout is not None:
        return f"{of}: {trainer} to train, {rollout} to generate"
    shared = torch.get_num_threads() if is_alone else worker_cores(config)
    return f"{of}: {trainer or shared}"


def _users_facts(config: Config) -> dict[str, object]:
    """The code of the user's reward functions, curriculum and filter, the isolation of code that a
    reward function runs here, the reward models by domain, and the frozen policies of agents. All
    may change on resume, which is then reported. Raises UserError if a model is missing."""
    custom = RewardSettings.of(config).custom
    curriculum = config.data.curriculum.function
    functions = reward_functions(config)
    everything = [part for parts in functions.values() for part in parts]
    own = sorted(
        {part.name for part in everything if part.name == CUSTOM_REWARD or part.name not in REWARDS}
    )
    facts: dict[str, object] = {
        f"code_of_reward_{name}": fingerprint_target(target_of(name, custom)) for name in own
    }
    chosen: dict[str, str | None] = {"should_accept": config.algorithm.filter_groups.should_accept}
    chosen["curriculum"] = None if curriculum in CURRICULA else curriculum
    chosen |= {key: name for key, name in named_algorithms(config) if ":" in name}
    pipeline = config.dag.pipeline
    chosen |= {target: target for _, target in code_of_workflow(config)}
    chosen["dag.pipeline"] = pipeline if isinstance(pipeline, str) and ":" in pipeline else None
    facts |= {
        f"code_of_{name}": fingerprint_target(target)
        for name, target in chosen.items()
        if target is not None
    }
    if (isolation := isolation_of(everything)) is not None:
        facts["sandbox"] = isolation
    for domain, parts in sorted(functions.items()):
        for options in (
            part.options for part in parts if part.name in REWARDS and REWARDS[part.name].prepare
        ):
            model = identity(str(options.get("path", "")), str(options.get("revision", "")) or None)
            facts[f"reward_model_{domain}"] = model
    models = scoring_models(config.reward_model)
    facts |= {f"engine_{name}": identity(model.path, None) for name, model in models.items()}
    # not in any checkpoint
    for name in sorted({*policies_of_agents(config).values()} - {*trained_policies(config)}):
        frozen = config_of_policy(config, name).actor_rollout_ref.model
        facts[f"policy_{name}"] = identity(str(frozen.path), frozen.revision)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
