"""Rules of devices: what only one of the launchers can honour.

Rules of models that are spread over ranks (`actor.strategy=fsdp`), and of what waits in the host's memory.
"""

import re
from collections.abc import Iterator

from distflow.config.compose.values import show
from distflow.config.derived_settings import fsdp_groups, is_sharded
from distflow.config.keys.dag import DagConfig
from distflow.config.keys.declare import walk
from distflow.config.keys.engines import ActorConfig
from distflow.config.keys.run import TrainerConfig
from distflow.config.keys.schema import Config
from distflow.config.rules.finding import ACTOR, Finding

_OF_TRAINER = (
    "nnodes",
    "n_gpus_per_node",
    "allocation",
    "worker_cpus",
    "worker_memory_mb",
    "worker_env",
    "max_held_mb",
    "peers_timeout_s",
)
_OF_DAG = ("backend_threshold", "apportion_strategy", "model_sizes", "consider_node_cohesion", "consider_node_load")


def one_device(config: Config) -> Iterator[Finding]:
    """The local launcher has one process on one device."""
    if config.trainer.launcher != "local":
        return
    trainer, dag, actor = TrainerConfig(), DagConfig(), config.actor_rollout_ref.actor
    keys = [(f"trainer.{name}", getattr(config.trainer, name), getattr(trainer, name)) for name in _OF_TRAINER]
    keys += [(f"dag.{name}", getattr(config.dag, name), getattr(dag, name)) for name in _OF_DAG]
    keys.append(("reward.num_actors", config.reward.num_actors, 0))
    keys.append((f"{ACTOR}.weight_update_mode", actor.weight_update_mode, ActorConfig.weight_update_mode))
    for key, value, default in keys:
        if value != default:
            yield Finding(
                (key, "trainer.launcher"),
                f"{show(value)} is for several devices, and the launcher 'local' has one process on one",
                f"leave it at {show(default)}, or set trainer.launcher=ray",
            )


def judges(config: Config) -> Iterator[Finding]:
    """What actors take, there are actors to take."""
    if config.reward.actor_cpus != 1 and not config.reward.num_actors:
        yield Finding(
            ("reward.actor_cpus", "reward.num_actors"),
            "verifiers run beside each worker, and no actor takes CPUs for them",
            "remove it, or set reward.num_actors with trainer.launcher=ray",
        )


_LOOKS_SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key|access_?key", re.IGNORECASE)


def no_secrets(config: Config) -> Iterator[Finding]:
    """What the config says lies in the run's folder, and in Ray's own tables."""
    for name in config.trainer.worker_env:
        if _LOOKS_SECRET.search(name):
            yield Finding(
                ("trainer.worker_env",),
                f"{name} looks like a secret, which Ray and the run's folder would show",
                "set it in the environment in which the command runs, or Ray starts on each machine",
            )


RULES = (one_device, judges, no_secrets)


_WHOLE = f"{ACTOR}.strategy=torch"


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
    for prefix, own in fsdp_groups(config).items():
        for (name, _, value, _), (_, _, default, _) in zip(walk(own, prefix), walk(type(own)(), prefix), strict=True):
            if value != default:
                yield Finding(
                    (name, f"{ACTOR}.strategy"),
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


SHARDING_RULES = (strategy, whole_weights, placement)
