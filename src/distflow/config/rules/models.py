"""Rules of models and engines: where weights come from, how they are trained and sampled."""

import re
from collections.abc import Iterator
from pathlib import Path

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config.derived_settings import is_rl, may_have_critic
from distflow.config.keys.engines import ModelConfig, OptimConfig
from distflow.config.keys.schema import Config
from distflow.config.rules.finding import ACTOR, MODEL, ROLLOUT, Finding

_COMMIT = re.compile(r"[0-9a-f]{7,40}")


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
    """Options of adapters need adapters, and adapters a trained base."""
    model = config.actor_rollout_ref.model
    set_keys = [
        key
        for key, is_set in (
            ("lora_alpha", model.lora_alpha != ModelConfig.lora_alpha),
            ("target_modules", model.target_modules != ModelConfig.target_modules),
        )
        if is_set
    ]
    if model.lora_rank == 0:
        for key in set_keys:
            yield Finding(
                (f"{MODEL}.{key}", f"{MODEL}.lora_rank"),
                "it shapes adapters, and there are none",
                f"set {MODEL}.lora_rank=16, or remove it",
            )
    elif model.init == "random":
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
    """0 is no number of tokens to choose from."""
    rollout = config.actor_rollout_ref.rollout
    for key, top_k in ((f"{ROLLOUT}.top_k", rollout.top_k), (f"{ROLLOUT}.val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k == 0:
            yield Finding((key,), "no token would be left", "set it to -1 (off), or to 1 or more")
    if "" in rollout.stop:
        yield Finding((f"{ROLLOUT}.stop",), "the empty text would end every response at once", "remove it")


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


RULES = (model_source, remote_code, lora, optimizers, sampling, publishing, in_flight)
