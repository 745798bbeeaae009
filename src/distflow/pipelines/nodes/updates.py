"""Nodes that train: one optimizer step for each mini-batch."""

from collections import defaultdict

from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node
from distflow.pipelines.objectives import policy_objective, policy_reads, policy_takes, sft_objective, value_objective
from distflow.runtime.context import NodeContext
from distflow.training.engine import LossFn, TrainEngine


@node(
    writes=(),
    role=NodeRole.ACTOR,
    reads=policy_reads,
    takes=policy_takes,
)
def train_actor(batch: Batch, actor: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Update the policy: one optimizer step for each mini-batch of each epoch."""
    if ctx.step < ctx.config.trainer.critic_warmup:
        return NodeOutput(None)
    settings = ctx.config.actor_rollout_ref.actor
    objective = policy_objective(ctx.config)
    metrics = _train(batch, actor, objective, ctx, settings.ppo_epochs, settings.ppo_mini_batch_size)
    return NodeOutput(None, {f"actor/{name}": value for name, value in metrics.items()})


@node(
    writes=(),
    role=NodeRole.CRITIC,
    reads=("prompt_ids", "response_ids", "values", "returns", "loss_mask"),
    takes=tuple(f"critic.{n}" for n in ("ppo_epochs", "ppo_mini_batch_size", "cliprange_value", "loss_agg_mode")),
)
def train_critic(batch: Batch, critic: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Update the critic towards the returns."""
    settings, actor = ctx.config.critic, ctx.config.actor_rollout_ref.actor
    mini_batch = settings.ppo_mini_batch_size or actor.ppo_mini_batch_size
    metrics = _train(batch, critic, value_objective(ctx.config), ctx, settings.ppo_epochs, mini_batch)
    return NodeOutput(None, {f"critic/{name}": value for name, value in metrics.items()})


@node(
    writes=(),
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "loss_mask"),
    takes=("actor_rollout_ref.actor.ppo_mini_batch_size",),
)
def train_sft(batch: Batch, actor: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Update the policy towards the data set's answers."""
    size = ctx.config.actor_rollout_ref.actor.ppo_mini_batch_size
    metrics = _train(batch, actor, sft_objective(ctx.config), ctx, epochs=1, num_prompts=size)
    return NodeOutput(None, {f"sft/{name}": value for name, value in metrics.items()})


def _train(
    batch: Batch, engine: TrainEngine, objective: LossFn, ctx: NodeContext, epochs: int, num_prompts: int
) -> dict[str, float]:
    """Mean of each metric over the optimizer steps; `skipped` is their number."""
    rows: dict[str, list[float]] = defaultdict(list)
    for epoch in range(epochs):
        for mini_batch in ctx.minibatches(batch, num_prompts, epoch):
            metrics = engine.train_step(mini_batch, objective)
            ctx.after_update(engine, mini_batch, metrics, not rows)
            for name, value in metrics.items():
                rows[name].append(value)
    return {name: sum(v) if name == "skipped" else sum(v) / len(v) for name, v in rows.items()}
