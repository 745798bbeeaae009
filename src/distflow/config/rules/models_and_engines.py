"""Rules of models and engines: where weights come from, how they are trained and sampled, on which
devices."""

import os
import re
from collections.abc import Iterator
from typing import Any

from distflow.builtin_names import MODELS, ROLLOUT_ENGINES
from distflow.config.derived_settings import action_head, is_rl, may_have_critic
from distflow.config.keys.actor_rollout_ref_and_critic import OptimConfig
from distflow.config.keys.reward import scoring_models
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, MODEL, ROLLOUT, Finding
from distflow.errors import count_of

_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_LOOKS_SECRET = re.compile(
    r"token|secret|password|passwd|credential|api_?key|access_?key", re.IGNORECASE
)


def model_source(config: Config) -> Iterator[Finding]:
    """There is a model, and a GGUF file is one."""
    model = config.actor_rollout_ref.model
    if not model.path:
        ours = " or ".join(f"builtin:{name}" for name in MODELS)
        advice = f"set {MODEL}.path to a folder, a hub id, or {ours} with {MODEL}.init=random"
        yield Finding((f"{MODEL}.path",), "there is no model to train", advice, missing=True)
    if model.gguf_file is not None and not model.gguf_file.endswith(".gguf"):
        yield Finding(
            (f"{MODEL}.gguf_file",), f"'{model.gguf_file}' is not a GGUF file", "name a .gguf file"
        )


def remote_code(config: Config) -> Iterator[Finding]:
    """A model's code runs only if it is pinned."""
    model = config.actor_rollout_ref.model
    # an absolute one is a folder, of this machine or of another
    path = os.path.expanduser(model.path or "")
    if not model.trust_remote_code or not model.path or os.path.isdir(path) or os.path.isabs(path):
        return
    if model.path.startswith("builtin:") or (
        model.revision is not None and _COMMIT.fullmatch(model.revision)
    ):
        return
    yield Finding(
        (f"{MODEL}.trust_remote_code", f"{MODEL}.path", f"{MODEL}.revision"),
        (
            f"code of '{model.path}' would run, but its revision is not pinned, so it could change "
            "later"
        ),
        f"set {MODEL}.revision to a commit hash, or {MODEL}.path to a local folder",
    )


def lora(config: Config) -> Iterator[Finding]:
    """An engine that takes unmerged adapters serves them."""
    model = config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    able = [name for name, entry in ROLLOUT_ENGINES.items() if entry.serves_adapters]
    if not model.lora_merge and (rollout.name not in able or rollout.url):
        what = (
            f"only a server of {' or '.join(able)} that the run starts serves an adapter beside "
            "its weights"
        )
        keys = (f"{MODEL}.lora_merge", f"{ROLLOUT}.{'url' if rollout.name in able else 'name'}")
        yield Finding(keys, what, f"set {MODEL}.lora_merge=true")


def optimizers(config: Config) -> Iterator[Finding]:
    """The options of each optimizer and schedule have an effect."""
    optims = {f"{ACTOR}.optim": config.actor_rollout_ref.actor.optim}
    if may_have_critic(config):
        optims["critic.optim"] = config.critic.optim
    for prefix, optim in optims.items():
        betas = f"{prefix}.betas"
        scheduler = f"{prefix}.scheduler"
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield Finding(
                (betas,), f"{list(optim.betas)} must each be ≥ 0 and < 1", "write e.g. [0.9, 0.999]"
            )
        if optim.optimizer == "sgd" and optim.betas != OptimConfig.betas:
            advice = f"remove them, or set {prefix}.optimizer=adamw"
            yield Finding((betas, f"{prefix}.optimizer"), "sgd has no moments", advice)
        if optim.scheduler == "constant" and optim.lr_warmup_steps > 0:
            advice = f"set {scheduler}=constant_with_warmup, or remove the warm-up"
            what = "the schedule 'constant' does not warm up"
            yield Finding((f"{prefix}.lr_warmup_steps", scheduler), what, advice)
        if optim.scheduler.startswith("constant") and optim.min_lr_ratio > 0:
            advice = f"set {scheduler}=cosine_with_warmup, or remove the ratio"
            what = f"the schedule '{optim.scheduler}' does not fall"
            yield Finding((f"{prefix}.min_lr_ratio", scheduler), what, advice)


def weight_sync(config: Config) -> Iterator[Finding]:
    """Weight syncs are frequent enough for the staleness."""
    every = config.actor_rollout_ref.actor.model_update_frequency
    staleness = config.async_.max_staleness
    if is_rl(config) and every - 1 > staleness:
        yield Finding(
            (f"{ACTOR}.model_update_frequency", "async.max_staleness"),
            f"a weight sync every {every} steps makes samples up to {count_of(every - 1, 'step')} "
            f"old, but {staleness} "
            "is allowed",
            f"set {ACTOR}.model_update_frequency={staleness + 1} or less",
        )


def rollout_server(config: Config) -> Iterator[Finding]:
    """Server options are set only for an engine with a server."""
    rollout = config.actor_rollout_ref.rollout
    given = [
        f"{ROLLOUT}.{name}" for name in ("python", "url", "engine_kwargs") if getattr(rollout, name)
    ]
    given += [f"{ROLLOUT}.data_parallel_size"] if rollout.data_parallel_size > 1 else []
    if allocation_decides(config):
        return
    entry = ROLLOUT_ENGINES.get(rollout.name)
    if entry is None or not entry.in_server:
        able = " or ".join(
            name for name, entry in ROLLOUT_ENGINES.items() if entry.in_server and entry.target
        )
        for key in given:
            why = f"the engine '{rollout.name}' has no server"
            yield Finding((key, f"{ROLLOUT}.name"), why, f"set {ROLLOUT}.name={able}, or remove it")
        return
    if not entry.takes_weights and any(
        agent.temperature not in (None, 1) for agent in rollout.agents.values()
    ):
        why = (
            "the server reports log-probs at temperature 1, by which it is compared with the model"
        )
        yield Finding(
            (f"{ROLLOUT}.agents", f"{ROLLOUT}.name"), why, "remove the agents' temperatures"
        )
    if rollout.url and len(given) > 1:
        yield Finding(
            tuple(given),
            "the server at that address was started with options of its own",
            "remove the others",
        )
    if len({*rollout.url}) < len(rollout.url):
        yield Finding((f"{ROLLOUT}.url",), "the same address is listed twice", "name each once")
    for name, options in rollout.engine_kwargs.items():
        if name not in ROLLOUT_ENGINES or not isinstance(options, dict):
            example = f"{ROLLOUT}.engine_kwargs.{rollout.name}.max_model_len=4096"
            yield Finding(
                (f"{ROLLOUT}.engine_kwargs",),
                "options belong to an engine",
                f"write for example {example}",
            )
    for name, model in scoring_models(config.reward_model).items():
        if model.is_whole_judge:
            why = (
                f"a judge has the engine of the rollout, and '{rollout.name}' is the server of one "
                "model"
            )
            advice = f"set {ROLLOUT}.name=embedded, or sharded: true and {ACTOR}.strategy=fsdp"
            yield Finding((f"reward_model.models.{name}.judge", f"{ROLLOUT}.name"), why, advice)


def allocation_decides(config: Config) -> bool:
    """Whether the allocation names another rollout engine; it replaces a default, and the rules run
    again."""
    allocation = config.trainer.allocation or ""
    return bool(allocation) and not re.search(
        rf"\b{re.escape(config.actor_rollout_ref.rollout.name)}\b", allocation
    )


def tensor_parallel_rollout(config: Config) -> Iterator[Finding]:
    """An engine on several devices supports this, and has the devices."""
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    size = rollout.tensor_model_parallel_size
    entry = ROLLOUT_ENGINES.get(rollout.name)
    if size == 1 or entry is None or allocation_decides(config):
        return
    if "t" not in entry.sizes:
        able = " or ".join(name for name, entry in ROLLOUT_ENGINES.items() if "t" in entry.sizes)
        option = f"{ROLLOUT}.engine_kwargs.{rollout.name}.{entry.size_option}"
        own = f"set {option}={size}" if entry.size_option else "keep the default 1"
        why = f"the engine '{rollout.name}' has one device"
        yield Finding((key, f"{ROLLOUT}.name"), why, f"set {ROLLOUT}.name={able}, or {own}")
    elif rollout.url:
        why = "the server at that address has devices of its own"
        yield Finding((key, f"{ROLLOUT}.url"), why, "remove the size, and start the server with it")
    elif rollout.data_parallel_size > 1:
        why = "a worker that shares a server has no second one"
        yield Finding(
            (key, f"{ROLLOUT}.data_parallel_size"), why, f"remove {ROLLOUT}.data_parallel_size"
        )
    elif not trainer.allocation and trainer.n_gpus_per_node % size:
        why = (
            f"an engine needs {size} devices of one machine, and {trainer.n_gpus_per_node} is not "
            f"a multiple of {size}"
        )
        advice = (
            "set for example "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node + -trainer.n_gpus_per_node % size}"
        )
        yield Finding((key, "trainer.n_gpus_per_node"), why, advice)


def noise_of_flow(config: Config) -> Iterator[Finding]:
    """A flow that draws actions has noise."""
    actions: Any = config.actor_rollout_ref.rollout.workflow_kwargs.get("actions", {})
    noise = actions.get("noise", 0.5) if action_head(config) == "flow_sde" else 0.5
    if not (isinstance(noise, int | float) and noise > 0):
        what = (
            "a flow without noise is deterministic: its actions have no density, and the policy no "
            "gradient"
        )
        yield Finding(
            (f"{ROLLOUT}.workflow_kwargs",),
            what,
            "set actions.noise to a number above 0, such as 0.5",
        )


def no_secrets(config: Config) -> Iterator[Finding]:
    """The config contains no secrets: the run's folder and Ray's tables show it."""
    roles = config.trainer.worker_roles.values()
    of_roles = (("trainer.worker_roles", own.get("worker_env", {})) for own in roles)
    for key, env in (("trainer.worker_env", config.trainer.worker_env), *of_roles):
        for name in filter(_LOOKS_SECRET.search, env):
            yield Finding(
                (key,),
                (
                    f"{name} looks like a secret, which would be visible in Ray and in the run's "
                    "folder"
                ),
                "set it in the environment of the command, or of Ray on each machine",
            )


RULES = (
    *(
        model_source,
        remote_code,
        lora,
        optimizers,
        weight_sync,
        rollout_server,
        tensor_parallel_rollout,
    ),
    *(noise_of_flow, no_secrets),
)
