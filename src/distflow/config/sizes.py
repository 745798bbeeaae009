"""Sizes that must fit one another, and into the room that a run has."""

from dataclasses import dataclass
from typing import Literal

from distflow.config.actor import OptimConfig
from distflow.config.program import may_have_critic, optimizer_steps
from distflow.config.schema import Config

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Room:
    """What a run has to fit into, each None until it is known: rows to train on, the model's context in tokens."""

    rows: int | None = None
    context: int | None = None


def run_steps(config: Config, room: Room) -> int | None:
    """Training steps of the run, where they are known."""
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None or room.rows is None:
        return trainer.total_training_steps
    return -(-trainer.total_epochs * room.rows // batch)


def mini_batch_sizes(config: Config) -> list[tuple[str, int]]:
    """Each key of a mini-batch that the program may take, with its size."""
    asked = [(f"{_ACTOR}.ppo_mini_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if may_have_critic(config) and config.critic.ppo_mini_batch_size is not None:
        asked.append(("critic.ppo_mini_batch_size", config.critic.ppo_mini_batch_size))
    return asked


def learning_rate_warm_ups(config: Config, steps: int) -> list[tuple[str, int, int]]:
    """Each key of a warm-up in optimizer steps, with its value and how many of them the run takes."""
    roles: list[tuple[str, OptimConfig, Literal["actor", "critic"]]] = [
        (_ACTOR, config.actor_rollout_ref.actor.optim, "actor")
    ]
    if may_have_critic(config):
        roles.append(("critic", config.critic.optim, "critic"))
    return [
        (f"{prefix}.optim.lr_warmup_steps", optim.lr_warmup_steps, optimizer_steps(config, role, steps))
        for prefix, optim, role in roles
        if optim.scheduler != "constant"
    ]
