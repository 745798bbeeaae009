"""The context of a node: the run, besides the columns, engines and options that its signature names."""

from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.sample import Sample
from distflow.errors import UserError
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.runtime.prompt_group import Group
from distflow.runtime.resources import Resources
from distflow.runtime.user_calls.async_calls import deadline_paused
from distflow.scheduling.data_order import minibatches
from distflow.training.engine import LossFn, TrainEngine

Updated = Callable[[TrainEngine, Batch, dict[str, float], bool], None]
"""(engine, mini-batch, metrics, whether it was the first of this step): called after each optimizer step."""

Watched = Callable[[TrainEngine, Batch, LossFn], LossFn]
"""(engine, mini-batch, loss function) → the loss function to call: that one, or one that records its arguments."""

NodeState = dict[str, dict[str, Any]]
"""JSON values of each node by its id: they persist across steps and are in every checkpoint."""


@dataclass(frozen=True)
class NodeContext:
    """Passed to nodes that name `ctx`.

    step: the training step, from 0; in the rollout loop the one in which the group was issued.
    state: the node's own JSON values; they persist across steps and are in every checkpoint. A node of the rollout loop
    has none if another worker generates, or trains.
    before_update: returns the loss function to call in an optimizer step, so that the step can be proven again.
    after_update: to be called after each optimizer step of an engine, so that it is checked.
    group_ids: of the whole step, over all ranks, in order; they determine the mini-batches. Empty in the rollout loop.
    group: in the rollout loop only. validating: the group is of a validation set. router: the reward functions of
    `reward_fn`; None in the training loop, and if the pipeline starts none.
    """

    config: Config
    step: int
    tokenizer: PreTrainedTokenizerBase
    state: MutableMapping[str, Any] = field(default_factory=dict)
    before_update: Watched = lambda engine, batch, loss: loss
    after_update: Updated = lambda engine, batch, metrics, first: None
    group_ids: Sequence[int] = ()
    group: Group | None = None
    validating: bool = False
    router: RewardRouter | None = None

    def minibatches(self, batch: Batch, num_prompts: int, epoch: int) -> Iterator[Batch]:
        """This rank's part of each mini-batch of one pass over the step, of `num_prompts` whole groups each.

        Decided over the groups of all ranks, so that the mini-batches are the same for any number of ranks.
        """
        order = minibatches(
            len(self.group_ids), self.group_ids, num_prompts, self.config.trainer.seed, self.step, epoch
        )
        rows: dict[int, list[int]] = {}
        for row, prompt_group in enumerate(batch["group_index"].tolist()):
            rows.setdefault(prompt_group, []).append(row)
        for places in order:
            yield batch.select(sorted(row for place in places for row in rows.get(self.group_ids[place], ())))

    async def reward_fn(self, samples: Sequence[Sample] | Batch) -> list[RewardOutcome]:
        """Scores of the reward functions on samples; a batch of the group stands for all of its samples.

        Raises UserError if the pipeline starts no reward functions.
        """
        if self.router is None or self.group is None:
            raise UserError(
                "ctx.reward_fn has no reward functions: they run beside the rollout loop of pipelines in which a node "
                "has a parameter `reward_fn`. Add it to your function, and call `await reward_fn(samples)`"
            )
        with deadline_paused():  # the reward functions have deadlines of their own
            return await self.router(self.group.samples if isinstance(samples, Batch) else samples)


@dataclass(frozen=True)
class Contexts:
    """Makes the contexts of one worker's nodes.

    watched: (role, engine, mini-batch, loss function) → the loss function to call.
    updated: (role, engine, mini-batch, metrics, step, whether the first of the step), called after each optimizer
    step. keeps: whether nodes of the rollout loop may keep state: only if all groups and checkpoints are of this
    worker.
    """

    config: Config
    resources: Resources
    state: NodeState
    watched: Callable[[str, TrainEngine, Batch, LossFn], LossFn]
    updated: Callable[[str, TrainEngine, Batch, dict[str, float], int, bool], None]
    keeps: bool = True

    def for_training(self, step: int, group_ids: Sequence[int], node_id: str) -> NodeContext:
        """Of a node of the training loop in a step."""

        def before_update(engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
            return self.watched(self._role(engine), engine, batch, loss)

        def after_update(engine: TrainEngine, batch: Batch, metrics: dict[str, float], first: bool) -> None:
            self.updated(self._role(engine), engine, batch, metrics, step, first)

        state = self.state.setdefault(node_id, {})
        tokenizer = self.resources.tokenizer
        return NodeContext(self.config, step, tokenizer, state, before_update, after_update, group_ids)

    def _role(self, engine: TrainEngine) -> str:
        return "critic" if engine is self.resources.critic else "actor"

    def for_rollout(self, group: Group, node_id: str, validating: bool = False) -> NodeContext:
        """Of a node of the rollout loop that works on a group."""
        return NodeContext(
            self.config,
            group.prompt_group.version,
            self.resources.tokenizer,
            self.state.setdefault(node_id, {}) if self.keeps else _NoState(node_id, self.state.get(node_id, {})),
            group=group,
            validating=validating,
            router=self.resources.reward_fn,
        )


class _NoState(UserDict[str, Any]):
    """Raises UserError on writes: each worker would have its own state, and no checkpoint would hold them all."""

    def __init__(self, node_id: str, restored: dict[str, Any]) -> None:
        self._node_id = node_id
        super().__init__(restored)

    def __setitem__(self, name: str, value: object) -> None:
        raise UserError(
            f"node '{self._node_id}' keeps ctx.state['{name}'] on one of several workers: the others do not see it, "
            "and no checkpoint holds it. Keep it in a node of the training loop, or let one worker generate and train"
        )
