"""Rules of models and engines: where weights come from, how they are trained and sampled, on which devices."""

import re
from collections.abc import Iterator
from pathlib import Path

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config.compose.values import show
from distflow.config.derived_settings import is_rl, is_sharded, may_have_critic
from distflow.config.keys.engines import ModelConfig, OptimConfig
from distflow.config.keys.schema import Config, schema_keys
from distflow.config.rules import ACTOR, MODEL, ROLLOUT, Finding
from distflow.config.serialize import changed_from_default

_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_LOOKS_SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key|access_?key", re.IGNORECASE)
_WHOLE = f"{ACTOR}.strategy=torch"
_FOR_SEVERAL_DEVICES = (
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.allocation", "trainer.worker_cpus"),
    *("trainer.worker_memory_mb", "trainer.worker_env", "trainer.max_held_mb", "trainer.peers_timeout_s"),
    *("dag.backend_threshold", "dag.apportion_strategy", "dag.model_sizes", "dag.consider_node_cohesion"),
    *("dag.consider_node_load", "reward.num_actors", f"{ACTOR}.weight_update_mode"),
)


def model_source(config: Config) -> Iterator[Finding]:
    """There is a model, and its weights have one source."""
    model = config.actor_rollout_ref.model
    if not model.path:
        yield Finding(
            (f"{MODEL}.path",),
            "there is no model to train",
            f"set {MODEL}.path to a folder, a hub id or builtin:NAME",
            missing=True,
        )
    if model.gguf_file is not None and model.init == "random":
        yield Finding(
            (f"{MODEL}.init", f"{MODEL}.gguf_file"),
            "fresh weights are asked for, and a file of trained ones is named",
            f"set {MODEL}.init=pretrained, or remove the file",
        )
    if model.gguf_file is not None and not model.gguf_file.endswith(".gguf"):
        yield Finding((f"{MODEL}.gguf_file",), f"'{model.gguf_file}' is no GGUF file", "name a file that ends in .gguf")


def remote_code(config: Config) -> Iterator[Finding]:
    """Code that comes with a model runs only if nobody can change it later."""
    model = config.actor_rollout_ref.model
    if not model.trust_remote_code or not model.path or _is_local(model) or _is_pinned(model):
        return
    yield Finding(
        (f"{MODEL}.trust_remote_code", f"{MODEL}.path", f"{MODEL}.revision"),
        f"code of '{model.path}' would run, and its revision is not pinned: it could change under you",
        f"set {MODEL}.revision to a commit hash, or {MODEL}.path to a local folder",
    )


def lora(config: Config) -> Iterator[Finding]:
    """Adapters need a trained base, and modules."""
    model = config.actor_rollout_ref.model
    if model.lora_rank > 0 and model.init == "random":
        yield Finding(
            (f"{MODEL}.lora_rank", f"{MODEL}.init"),
            "the weights below the adapters would stay random",
            f"set {MODEL}.lora_rank=0, or {MODEL}.init=pretrained",
        )
    if model.target_modules == ():
        yield Finding((f"{MODEL}.target_modules",), "no module would get an adapter", "name modules, or all-linear")


def optimizers(config: Config) -> Iterator[Finding]:
    """Optimizer and schedule of the actor, and of the critic where there is one."""
    yield from _optimizer(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim)
    if may_have_critic(config):
        yield from _optimizer("critic.optim", config.critic.optim)


def sampling(config: Config) -> Iterator[Finding]:
    """There are tokens to choose from, and a response has one."""
    rollout = config.actor_rollout_ref.rollout
    sampled: list[tuple[str, int | None, tuple[str, ...] | None]] = [
        (ROLLOUT, rollout.top_k, rollout.stop),
        (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs.top_k, ()),
        *((f"data.domains.{name}", own.top_k, own.stop) for name, own in config.data.domains.items()),
    ]
    for key, top_k, stop in sampled:
        if top_k == 0:
            yield Finding((f"{key}.top_k",), "no token would be left", "set it to -1 (off), or to 1 or more")
        if "" in (stop or ()):
            yield Finding((f"{key}.stop",), "the empty text would end every response at once", "remove it")


def publishing(config: Config) -> Iterator[Finding]:
    """Weights may not get older between two publishes than staleness allows."""
    every, staleness = config.actor_rollout_ref.actor.model_update_frequency, config.async_.max_staleness
    if is_rl(config) and every - 1 > staleness:
        yield Finding(
            (f"{ACTOR}.model_update_frequency", "async.max_staleness"),
            f"publishing every {every} steps makes samples up to {every - 1} steps old, and {staleness} is allowed",
            f"set {ACTOR}.model_update_frequency={staleness + 1} or less",
        )


def in_flight(config: Config) -> Iterator[Finding]:
    """Where answers run while training goes on, the engine takes weights below them."""
    name, staleness = config.actor_rollout_ref.rollout.name, config.async_.max_staleness
    if is_rl(config) and staleness > 0 and not ROLLOUT_ENGINES[name].in_flight:
        able = " or ".join(name for name, entry in ROLLOUT_ENGINES.items() if entry.in_flight and entry.target)
        yield Finding(
            ("async.max_staleness", f"{ROLLOUT}.name"),
            f"answers would run on while weights change, and the engine '{name}' cannot take weights below them",
            f"set {ROLLOUT}.name={able}, or async.max_staleness=0",
        )


def one_device(config: Config) -> Iterator[Finding]:
    """The local launcher has one process on one device."""
    if config.trainer.launcher != "local":
        return
    for key, value, default in changed_from_default(config, _FOR_SEVERAL_DEVICES):
        yield Finding(
            (key, "trainer.launcher"),
            f"{show(value)} is for several devices, and the launcher 'local' has one process on one",
            f"leave it at {show(default)}, or set trainer.launcher=ray",
        )


def no_secrets(config: Config) -> Iterator[Finding]:
    """What the config says lies in the run's folder, and in Ray's own tables."""
    for name in config.trainer.worker_env:
        if _LOOKS_SECRET.search(name):
            yield Finding(
                ("trainer.worker_env",),
                f"{name} looks like a secret, which Ray and the run's folder would show",
                "set it in the environment in which the command runs, or Ray starts on each machine",
            )


def strategy(config: Config) -> Iterator[Finding]:
    """Weights are spread over ranks where there are several, and where all that reads them can do so in parts."""
    if not is_sharded(config):
        return
    if config.trainer.launcher == "local":
        yield Finding(
            (f"{ACTOR}.strategy", "trainer.launcher"),
            "weights would be spread over the ranks that train, and the local launcher has one process",
            f"set trainer.launcher=ray, or {_WHOLE}",
        )
        return
    optims = {ACTOR: config.actor_rollout_ref.actor.optim, "critic": config.critic.optim}
    for prefix in (prefix for prefix, optim in optims.items() if optim.optimizer == "adamw_8bit"):
        yield Finding(
            (f"{ACTOR}.strategy", f"{prefix}.optim.optimizer"),
            "bitsandbytes takes no weights that are spread over ranks",
            f"set {prefix}.optim.optimizer=adamw, or {_WHOLE}",
        )


def whole_weights(config: Config) -> Iterator[Finding]:
    """Where each rank has the weights whole, nothing is said of how they are spread."""
    if is_sharded(config):
        return
    for key, _, _ in changed_from_default(config, (name for name in schema_keys() if ".fsdp_config." in name)):
        yield Finding(
            (key, f"{ACTOR}.strategy"),
            "it is for weights that are spread over the ranks that train, and here each rank has them whole",
            f"leave it out, or set {ACTOR}.strategy=fsdp and trainer.launcher=ray",
        )


def placement(config: Config) -> Iterator[Finding]:
    """Some rank has the weights; what stays in the host's memory is not moved there."""
    if not is_sharded(config):
        return
    if config.actor_rollout_ref.actor.fsdp_config.fsdp_size == 0:
        yield Finding(
            (f"{ACTOR}.fsdp_config.fsdp_size",),
            "no rank would have the weights",
            "set it to -1 for all ranks that train, or to a divisor of their number",
        )
    trained = {ACTOR: config.actor_rollout_ref.actor.fsdp_config, "critic": config.critic.fsdp_config}
    for owner, own in trained.items():
        for name in ("param_offload", "optimizer_offload"):
            if own.offload_policy and getattr(own, name):
                yield Finding(
                    (f"{owner}.fsdp_config.{name}", f"{owner}.fsdp_config.offload_policy"),
                    "with offload_policy weights and moments stay in the host's memory: nothing is left to be moved",
                    "take one of them back",
                )


def _optimizer(prefix: str, optim: OptimConfig) -> Iterator[Finding]:
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Finding((f"{prefix}.betas",), f"{list(optim.betas)} must each be ≥ 0 and < 1", "write e.g. [0.9, 0.999]")
    if optim.optimizer == "sgd" and optim.betas != OptimConfig.betas:
        yield Finding(
            (f"{prefix}.betas", f"{prefix}.optimizer"),
            "sgd has no moments",
            f"remove them, or set {prefix}.optimizer=adamw",
        )
    if optim.scheduler == "constant" and optim.lr_warmup_steps > 0:
        yield Finding(
            (f"{prefix}.lr_warmup_steps", f"{prefix}.scheduler"),
            "the schedule 'constant' does not warm up",
            f"set {prefix}.scheduler=constant_with_warmup, or remove the warm-up",
        )
    if optim.scheduler.startswith("constant") and optim.min_lr_ratio > 0:
        yield Finding(
            (f"{prefix}.min_lr_ratio", f"{prefix}.scheduler"),
            f"the schedule '{optim.scheduler}' does not fall",
            f"set {prefix}.scheduler=cosine_with_warmup, or remove the ratio",
        )


def _is_local(model: ModelConfig) -> bool:
    return model.path is not None and Path(model.path).expanduser().is_dir()


def _is_pinned(model: ModelConfig) -> bool:
    is_builtin = model.path is not None and model.path.startswith("builtin:")
    return not is_builtin and model.revision is not None and bool(_COMMIT.fullmatch(model.revision))


RULES = (
    model_source,
    remote_code,
    lora,
    optimizers,
    sampling,
    publishing,
    in_flight,
    strategy,
    whole_weights,
    placement,
    one_device,
    no_secrets,
)
