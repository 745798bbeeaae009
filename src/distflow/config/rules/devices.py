"""Rules of devices: what only one of the launchers can honour."""

from collections.abc import Iterator

from distflow.config.actor import ActorConfig
from distflow.config.dag import DagConfig
from distflow.config.rules.finding import ACTOR, Finding
from distflow.config.schema import Config
from distflow.config.trainer import TrainerConfig
from distflow.config.values import show

_OF_TRAINER = ("nnodes", "n_gpus_per_node", "allocation", "max_held_mb", "peers_timeout_s")
_OF_DAG = ("backend_threshold", "apportion_strategy", "consider_node_cohesion", "consider_node_load")


def one_device(config: Config) -> Iterator[Finding]:
    """The local launcher has one process on one device."""
    if config.trainer.launcher != "local":
        return
    trainer, dag, actor = TrainerConfig(), DagConfig(), config.actor_rollout_ref.actor
    keys = [(f"trainer.{name}", getattr(config.trainer, name), getattr(trainer, name)) for name in _OF_TRAINER]
    keys += [(f"dag.{name}", getattr(config.dag, name), getattr(dag, name)) for name in _OF_DAG]
    keys.append((f"{ACTOR}.weight_update_mode", actor.weight_update_mode, ActorConfig.weight_update_mode))
    for key, value, default in keys:
        if value != default:
            yield Finding(
                (key, "trainer.launcher"),
                f"{show(value)} is for several devices, and the launcher 'local' has one process on one",
                f"leave it at {show(default)}, or set trainer.launcher=ray",
            )


RULES = (one_device,)
