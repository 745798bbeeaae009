"""The facts of a run that a resumed one must share: its model, data, rewards and code."""

import hashlib
import json
import os

import torch

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.config import Config
from distflow.config.derived_settings import (
    code_of_workflow,
    config_of_policy,
    frozen_models,
    named_algorithms,
    policies_of_agents,
    reward_functions,
    reward_parts,
    trained_policies,
)
from distflow.launch.devices import choose_device
from distflow.launch.read_config import Data
from distflow.launch.report_head import cpu_name
from distflow.launch.threads import threads_of
from distflow.models.cpu_kernels import build as native
from distflow.models.model_identity import identity
from distflow.observe.run_reader import VALIDATION_ROWS
from distflow.rewards.code.reward import isolation_of
from distflow.rewards.function_loading import fingerprint_target, target_of
from distflow.rewards.pool.domain_pools import RewardSettings

PROMPT_FORMAT = "prompt_format"
"""The fact of a run by which its policy is asked later."""


def facts(config: Config, data: Data) -> dict[str, object]:
    """What a resumed run must share with its checkpoint to be the same run, and to be bit-equal."""
    device = choose_device(config).type
    vocabulary = json.dumps(sorted(data.tokenizer.get_vocab().items()), ensure_ascii=True)
    found: dict[str, object] = {
        "data_fingerprint": data.train.fingerprint(),
        VALIDATION_ROWS: _validation_rows(data),
        "tokenizer_fingerprint": hashlib.sha256(vocabulary.encode()).hexdigest(),
        PROMPT_FORMAT: _prompt_format(config, data),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": device,
        **_users_facts(config),
    }

    # If generation and training run at once, generation has its own threads.
    rollout_threads = threads_of(config)[1]
    if rollout_threads is not None:
        found["rollout_threads"] = rollout_threads
    if device == "cpu":  # the native code replaces torch's operations there
        found["native_code"] = native.name()
    return found


def _prompt_format(config: Config, data: Data) -> str:
    """How the model reads what it is asked: "chat" by its template, else "text"."""
    formats: set[str | None] = {config.data.prompt_format}
    for domain in config.data.domains.values():
        formats.add(domain.prompt_format)
    if "chat" in formats or data.looked_at.has_messages:
        return "chat"

    sends_messages = config.actor_rollout_ref.rollout.workflow in ("agent", "verifiers")
    return "chat" if sends_messages and data.has_template else "text"


def _validation_rows(data: Data) -> str:
    """A short hash of the rows of all validation sets; empty without any."""
    if not data.validation:
        return ""
    sets = {name: found.fingerprint() for name, found in data.validation.items()}
    return hashlib.sha256(json.dumps(sets, sort_keys=True).encode()).hexdigest()[:12]


def _users_facts(config: Config) -> dict[str, object]:
    """The user's code, the isolation of code that a reward function runs here, and models that are
    in no checkpoint. All may change on resume, which is then reported. Raises UserError if a model
    is missing."""
    functions = reward_functions(config)
    parts = reward_parts(config)
    facts: dict[str, object] = {}
    custom = RewardSettings.of(config).custom

    for name in sorted({part.name for part in parts}):
        if name == CUSTOM_REWARD or name not in REWARDS:
            facts[f"code_of_reward_{name}"] = fingerprint_target(target_of(name, custom))

    for name, target in _named_code(config).items():
        facts[f"code_of_{name}"] = fingerprint_target(target)
    isolation = isolation_of(parts)
    if isolation is not None:
        facts["sandbox"] = isolation

    for domain, named in sorted(functions.items()):
        for part in named:
            if part.name in REWARDS and REWARDS[part.name].prepare:
                path = str(part.options.get("path", ""))
                revision = str(part.options.get("revision", "")) or None
                facts[f"reward_model_{domain}"] = identity(path, revision)

    for name, model in frozen_models(config).items():
        facts[f"engine_{name}"] = identity(str(model.path), None)

    if config.actor_rollout_ref.ref.path is not None:
        facts["engine_ref"] = identity(config.actor_rollout_ref.ref.path, None)

    for name in sorted({*policies_of_agents(config).values()} - {*trained_policies(config)}):
        frozen = config_of_policy(config, name).actor_rollout_ref.model
        facts[f"policy_{name}"] = identity(str(frozen.path), frozen.revision)

    return facts


def _named_code(config: Config) -> dict[str, str]:
    """The functions of the user's besides rewards, by the names of their facts."""
    named = {key: name for key, name in named_algorithms(config) if ":" in name}
    for _, target in code_of_workflow(config):
        named[target] = target
    accepts = config.algorithm.filter_groups.should_accept
    if accepts is not None:
        named["should_accept"] = accepts
    if config.data.sampler is not None:
        named["data.sampler"] = config.data.sampler
    pipeline = config.dag.pipeline
    if isinstance(pipeline, str) and ":" in pipeline:
        named["dag.pipeline"] = pipeline
    return named
