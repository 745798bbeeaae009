"""Rules of devices: what only one of the launchers can honour."""

import re
from collections.abc import Iterator

from distflow.config.actor import ActorConfig
from distflow.config.dag import DagConfig
from distflow.config.rules.finding import ACTOR, Finding
from distflow.config.schema import Config
from distflow.config.trainer import TrainerConfig
from distflow.config.values import show

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
