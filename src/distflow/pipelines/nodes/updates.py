"""Nodes that train: one optimizer step for each mini-batch."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from distflow.algorithms.objectives import (
    PairObjective,
    PolicyObjective,
    PreferenceObjective,
    SFTObjective,
)
from distflow.config import Config
from distflow.config.derived_settings import algorithms, takes_values, trained_policies
from distflow.data.batch import Batch
from distflow.data.decisions import by_decision
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.graph.fields import register_field
from distflow.graph.node_spec import Names
from distflow.pipelines.nodes.labelled_responses import MISMATCHED
from distflow.pipelines.nodes.objectives_from_config import (
    interpolates_prox,
    kto_objective,
    policy_objective,
    preference_objective,
    takes_rollouts,
    value_objective,
)
from distflow.pipelines.nodes.own_pairs import pairs_of
from distflow.runtime.node_context import NodeContext
from distflow.training.engine import Counts, LossFn, Sums, TrainEngine
from distflow.training.mismatched_scores import compare_mismatched
from distflow.training.multi_policy_engine import MultiPolicyTrainer

register_field(
    "trainer_log_probs",
    doc=(
        "by the trainer, in the forward pass of this step's first update; NaN in samples that it "
        "did not see"
    ),
)

_READS = ("prompt_ids", "response_ids", "?forks")
COUNTED = {"skipped", "empty"}
"""Metrics of an update of which a step has the sum; of others it has the mean."""
_OWN_GROUPS = ("rewards/", "logps/")
"""Metrics with TRL's names, which have no prefix."""


@node_factory
@node(role=NodeRole.ACTOR)
def train_actor(config: Config) -> Callable[..., object]:
    """Update the policy with the config's loss, once the critic has warmed up."""
    actor = config.actor_rollout_ref.actor
    objective = policy_objective(config)

    if interpolates_prox(config) or takes_rollouts(config):
        records = "trainer_log_probs"
    else:
        records = None

    closed = partial(
        update_policies,
        name="actor",
        objective=objective,
        epochs=actor.ppo_epochs,
        num_prompts=actor.ppo_mini_batch_size,
        warmup=config.trainer.critic_warmup,
    )
    if not trained_policies(config):
        closed = partial(
            update, **closed.keywords, records=records, sample_level=config.algorithm.sample_level
        )

    return _declared(_columns(objective), closed, records or ())


@node_factory
@node(role=NodeRole.ACTOR)
def train_unscored_actor(config: Config) -> Callable[..., object]:
    """`train_actor` if a step has one optimizer step, of the sampling policy, and no node computes
    old log-probs: the ratio is 1 by construction, so the loss's log-probs are also the old ones."""
    objective = policy_objective(config, derives_old=True)
    closed = partial(
        update,
        name="actor",
        objective=objective,
        num_prompts=config.actor_rollout_ref.actor.ppo_mini_batch_size,
        warmup=config.trainer.critic_warmup,
        records="old_log_probs",
        sample_level=config.algorithm.sample_level,
    )

    return _declared(_columns(objective), closed, "old_log_probs")


@node_factory
@node(role=NodeRole.CRITIC)
def train_critic(config: Config) -> Callable[..., object]:
    """Update the critic towards the returns, for domains whose estimator reads values."""
    critic = config.critic
    objective = value_objective(config)

    reads: tuple[str, ...] = objective.reads
    trains = None
    if config.algorithm.domains:
        trains = {domain: takes_values(each) for domain, each in algorithms(config)}
        reads = (*reads, "domain")

    closed = partial(
        update,
        name="critic",
        objective=objective,
        epochs=critic.ppo_epochs,
        num_prompts=critic.ppo_mini_batch_size
        or config.actor_rollout_ref.actor.ppo_mini_batch_size,
        warmup=0,
        trains=trains,
        sample_level=config.algorithm.sample_level,
    )
    return _declared(reads, closed)


@node_factory
@node(role=NodeRole.ACTOR)
def train_sft(config: Config) -> Callable[..., object]:
    """Update the policy towards the data set's responses."""
    return _supervised(config, "sft", SFTObjective())


@node_factory
@node(role=NodeRole.ACTOR)
def train_reward_model(config: Config) -> Callable[..., object]:
    """Update a reward model towards higher scores of chosen responses than of rejected ones."""
    return _supervised(config, "rm", PairObjective())


@node_factory
@node(role=NodeRole.ACTOR)
def train_preference(config: Config) -> Callable[..., object]:
    """Update the policy towards chosen responses and away from rejected ones."""
    return _supervised(config, "preference", preference_objective(config))


@node_factory
@node(role=NodeRole.ACTOR)
def train_online_preference(config: Config) -> Callable[..., object]:
    """Update the policy on the pairs of its own responses."""
    actor = config.actor_rollout_ref.actor
    objective = preference_objective(config)
    closed = partial(
        update,
        name="preference",
        objective=objective,
        num_prompts=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        selects=pairs_of,
        records="trainer_log_probs",
    )
    return _declared((*objective.reads, "preferred"), closed, "trainer_log_probs")


@node_factory
@node(role=NodeRole.ACTOR)
def train_kto(config: Config) -> Callable[..., object]:
    """Update the policy towards desirable responses and away from others."""
    objective = kto_objective(config)
    num_prompts = config.actor_rollout_ref.actor.ppo_mini_batch_size
    closed = partial(
        update,
        name="preference",
        objective=objective,
        num_prompts=num_prompts,
        prepares=compare_mismatched,
    )
    return _declared((*objective.reads, "response_mask", *MISMATCHED), closed)


def _supervised(
    config: Config, name: str, objective: SFTObjective | PairObjective | PreferenceObjective
) -> Callable[..., object]:
    num_prompts = config.actor_rollout_ref.actor.ppo_mini_batch_size
    closed = partial(update, name=name, objective=objective, num_prompts=num_prompts)
    return _declared(objective.reads, closed)


def _columns(objective: PolicyObjective) -> tuple[str, ...]:
    """The columns that the policy's loss reads, optional ones marked."""
    return (*objective.reads, *(f"?{name}" for name in objective.optional))


def _declared(
    reads: Sequence[str], closed: "partial[NodeOutput]", writes: Names = ()
) -> Callable[..., object]:
    """The update as a node function that reads and writes these columns."""
    turns = ("turn_index",) if closed.keywords.get("sample_level") == "decision" else ()
    return node(writes=writes, reads=tuple(dict.fromkeys((*_READS, *reads, *turns))))(closed)


def update(
    batch: Batch,
    engine: TrainEngine,
    ctx: NodeContext,
    *,
    name: str,
    objective: LossFn,
    num_prompts: int,
    epochs: int = 1,
    warmup: int = 0,
    records: str | None = None,
    trains: Mapping[str | None, bool] | None = None,
    sample_level: str = "episode",
    selects: Callable[[Batch], Batch] | None = None,
    prepares: Callable[[Batch, TrainEngine], Batch] | None = None,
) -> NodeOutput:
    """One optimizer step for each mini-batch of `num_prompts` groups in each epoch, from step
    `warmup` on.

    Metrics are means over the mini-batches with a token that counts, named `name/...` unless they
    have a group of their own; `skipped` and `empty` are numbers of mini-batches. records: the
    column for the log-probs of the first update, NaN in other samples. trains: by domain, None for
    the others, whether it trains on these samples; None for all. sample_level: episode, or
    decision: mini-batches then have a sample for each decision of an episode. selects: the samples
    that are trained on; None for all. prepares: adds columns that depend on the weights before each
    update."""
    if trains is not None:
        rows = [row for row, each in enumerate(batch["domain"]) if trains.get(each, trains[None])]
        batch = batch.select(rows)

    samples = batch if selects is None else selects(batch)
    places = None
    if sample_level == "decision":
        samples, places = by_decision(batch)
    updates = list[dict[str, float]]()
    unmoved = True
    recorded = dict[str, Tensor]()

    for epoch in range(epochs if ctx.step >= warmup else 0):
        for mini_batch in ctx.minibatches(samples, num_prompts, epoch):
            if prepares is not None:
                mini_batch = prepares(mini_batch, engine)
            loss = ctx.before_update(engine, mini_batch, objective)
            if records and unmoved:
                loss = RecordingLoss(loss, recorded)
            metrics = engine.train_step(mini_batch, loss)
            ctx.after_update(engine, mini_batch, metrics, unmoved)
            updates.append(metrics)
            unmoved = unmoved and bool(metrics.get("empty"))

    measured = dict[str, float]()
    for metric, value in _over(updates).items():
        measured[metric if metric.startswith(_OWN_GROUPS) else f"{name}/{metric}"] = value
    if records is None:
        return NodeOutput(None, measured)

    scored = batch.only(batch.names)
    of = samples if selects is None else batch
    own = _first_log_probs(of, engine, recorded, unmoved)
    if places is not None:  # given tokens between decisions have none
        own = own.new_zeros(int(batch.lengths("response").sum())).index_copy(0, places, own)
    scored[records] = own

    return NodeOutput(scored, measured)


def update_policies(
    batch: Batch,
    engine: MultiPolicyTrainer,
    ctx: NodeContext,
    *,
    name: str,
    objective: LossFn,
    num_prompts: int,
    epochs: int,
    warmup: int,
) -> NodeOutput:
    """`update` of each policy of the agents, on its own tokens, with its own means. The first one's
    metrics are named as in a run with one policy, those of the others `policies/POLICY/...`."""
    measured = dict[str, float]()
    first = next(iter(engine.engines))

    for policy, own in engine.engines.items():
        names = name if policy == first else f"policies/{policy}"
        run = partial(update, num_prompts=num_prompts, epochs=epochs, warmup=warmup)
        measured |= run(own.own(batch), own, ctx, name=names, objective=objective).metrics

    return NodeOutput(None, measured)


class RecordingLoss:
    """A loss function that records its log-probs in `recorded` by the samples' names."""

    def __init__(self, loss: LossFn, recorded: dict[str, Tensor]) -> None:
        self.outputs = loss.outputs
        self.counts = loss.counts
        self.finish = loss.finish
        self._loss = loss
        self._recorded = recorded

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        log_probs = outputs["log_probs"].detach()
        lengths = micro.lengths("response").tolist()
        for name, row, length in zip(micro.row_names, log_probs, lengths, strict=True):
            self._recorded[name] = row[:length]
        return self._loss(outputs, micro, counts)


def _first_log_probs(
    batch: Batch, engine: TrainEngine, recorded: Mapping[str, Tensor], unmoved: bool
) -> Tensor:
    """Log-probs under the weights before the update, all samples one after another on the CPU:
    recorded by the update (NaN for samples that it did not see), or computed now if it moved
    nothing."""
    if unmoved:
        return engine.forward(batch, ("log_probs",)).flat("log_probs")
    if not len(batch):  # other ranks have all samples of the step
        return torch.empty(0)

    device = next((row.device for row in recorded.values()), None)
    rows = list[Tensor]()
    for name, length in zip(batch.row_names, batch.lengths("response").tolist(), strict=True):
        if name in recorded:
            rows.append(recorded[name])
        else:
            rows.append(torch.full((length,), torch.nan, device=device))

    return torch.cat(rows).cpu()


def _over(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step; empty if there was no optimizer step."""
    values: dict[str, list[float]] = defaultdict(list)
    for update in [update for update in updates if not update.get("empty")] or updates:
        for metric, value in update.items():
            values[metric].append(value)

    found = {metric: sum(each) / len(each) for metric, each in values.items()}
    for metric in found.keys() & COUNTED:
        found[metric] = sum(update.get(metric, 0.0) for update in updates)
    return found
