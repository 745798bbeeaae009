"""Nodes that train: one optimizer step for each mini-batch."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.objectives import policy_objective, sft_objective, value_objective
from distflow.runtime.context import NodeContext
from distflow.training.engine import LossFn, TrainEngine

_READS = ("prompt_ids", "response_ids")
_COUNTED = {"skipped", "empty"}


@node_factory
@node(role=NodeRole.ACTOR)
def train_actor(config: Config) -> Callable[..., object]:
    """Update the policy by the config's loss, once the critic has warmed up."""
    actor, objective = config.actor_rollout_ref.actor, policy_objective(config)
    reads = (*_READS, *objective.reads, *(f"?{name}" for name in objective.optional))
    return _update(
        reads, "actor", objective, actor.ppo_epochs, actor.ppo_mini_batch_size, warmup=config.trainer.critic_warmup
    )


@node_factory
@node(role=NodeRole.CRITIC)
def train_critic(config: Config) -> Callable[..., object]:
    """Update the critic towards the returns."""
    critic, objective = config.critic, value_objective(config)
    num_prompts = critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    return _update((*_READS, *objective.reads), "critic", objective, critic.ppo_epochs, num_prompts)


@node_factory
@node(role=NodeRole.ACTOR)
def train_sft(config: Config) -> Callable[..., object]:
    """Update the policy towards the data set's answers."""
    objective, num_prompts = sft_objective(config), config.actor_rollout_ref.actor.ppo_mini_batch_size
    return _update((*_READS, *objective.reads), "sft", objective, 1, num_prompts)


def _update(
    reads: tuple[str, ...], name: str, objective: LossFn, epochs: int, num_prompts: int, warmup: int = 0
) -> Callable[..., object]:
    closed = partial(update, name=name, objective=objective, epochs=epochs, num_prompts=num_prompts, warmup=warmup)
    return node(writes=(), reads=tuple(dict.fromkeys(reads)))(closed)


def update(
    batch: Batch,
    engine: TrainEngine,
    ctx: NodeContext,
    *,
    name: str,
    objective: LossFn,
    epochs: int,
    num_prompts: int,
    warmup: int,
) -> NodeOutput:
    """One optimizer step for each mini-batch of `num_prompts` groups in each epoch, from step `warmup` on.

    Metrics are means over the mini-batches in which a token counts, named `name/...`; `skipped` and `empty` are
    numbers of mini-batches.
    """
    updates = list[dict[str, float]]()
    for epoch in range(epochs if ctx.step >= warmup else 0):
        for mini_batch in ctx.minibatches(batch, num_prompts, epoch):
            metrics = engine.train_step(mini_batch, ctx.before_update(engine, mini_batch, objective))
            ctx.after_update(engine, mini_batch, metrics, all(before.get("empty") for before in updates))
            updates.append(metrics)
    return NodeOutput(None, {f"{name}/{metric}": value for metric, value in _over(updates).items()})


def _over(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step; none where no optimizer step was to be taken."""
    rows: dict[str, list[float]] = defaultdict(list)
    for update in [update for update in updates if not update.get("empty")] or updates:
        for metric, value in update.items():
            rows[metric].append(value)
    totals = {metric: sum(update.get(metric, 0.0) for update in updates) for metric in rows.keys() & _COUNTED}
    return {metric: sum(values) / len(values) for metric, values in rows.items()} | totals
