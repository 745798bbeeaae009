"""What nodes are called with besides their columns: `ctx`."""

from collections import UserDict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.runtime.checks_protocol import Updates
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.group import Group, rows_by_group
from distflow.scheduling.data_plan import minibatches
from distflow.training.engine import LossFn, TrainEngine

Updated = Callable[[TrainEngine, Batch, dict[str, float], bool], None]
"""(engine, mini-batch, metrics, whether it was the first of the step): called after each optimizer
step."""

Watched = Callable[[TrainEngine, Batch, LossFn], LossFn]
"""(engine, mini-batch, loss function) → the loss function to call: that one, or one that records
its arguments."""

NodeState = dict[str, dict[str, Any]]
"""JSON values of each node, by its id; they persist across steps and are in every checkpoint."""


async def _no_user_calls(function: Callable[[], Awaitable[Any]], *identity: object) -> Any:
    raise AssertionError("only the rollout loop calls async functions of the user's")


@dataclass(frozen=True)
class NodeContext:
    """Passed to nodes that name `ctx`."""

    config: Config
    step: int
    """The training step, from 0; in the rollout loop, the one in which the group was issued."""
    tokenizer: PreTrainedTokenizerBase
    state: MutableMapping[str, Any] = field(default_factory=dict)
    """The node's own JSON values; they persist across steps and are in every checkpoint. A node of
    the rollout loop has none if another worker generates, or trains."""
    before_update: Watched = lambda engine, batch, loss: loss
    """Returns the loss function to call in an optimizer step, so that a step can be checked."""
    after_update: Updated = lambda engine, batch, metrics, first: None
    """Must be called after each optimizer step of an engine, which it checks."""
    group_ids: Sequence[int] = ()
    """Of the whole step, over all ranks, in order; they determine the mini-batches. Empty in the
    rollout loop."""
    group: Group | None = None
    """Only in the rollout loop."""
    validating: bool = False
    """The group is of a validation set."""
    call_user: Callable[..., Awaitable[Any]] = _no_user_calls
    """Awaits a user's async function with a deadline in seconds and separate random generators
    (`run_async`); further arguments identify the call."""

    def minibatches(self, batch: Batch, num_prompts: int, epoch: int) -> Iterator[Batch]:
        """This rank's part of each mini-batch of one pass over the step, of `num_prompts` whole
        groups each.

        The division is over the groups of all ranks, so that mini-batches are the same for any
        number of ranks.
        """
        order = minibatches(
            len(self.group_ids),
            self.group_ids,
            num_prompts,
            self.config.trainer.seed,
            self.step,
            epoch,
        )
        rows = rows_by_group(batch)

        for places in order:
            own = list[int]()
            for place in places:
                own += rows.get(self.group_ids[place], ())
            yield batch.select(sorted(own))


@dataclass(frozen=True)
class Contexts:
    """Makes the contexts of one worker's nodes."""

    config: Config
    resources: Resources
    state: NodeState
    updates: Updates | None
    """None for a worker that updates nothing."""
    keeps: bool = True
    """Whether nodes of the rollout loop may keep state, i.e. whether this worker has all groups and
    checkpoints."""

    def for_training(self, step: int, group_ids: Sequence[int], node_id: str) -> NodeContext:
        assert self.updates is not None, "a worker that trains updates its engines"
        return NodeContext(
            self.config,
            step,
            self.resources.tokenizer,
            self.state.setdefault(node_id, {}),
            self.updates.before,
            partial(self.updates.after, step=step),
            group_ids,
        )

    def for_rollout(self, group: Group, node_id: str, validating: bool = False) -> NodeContext:
        state: MutableMapping[str, Any]
        if self.keeps:
            state = self.state.setdefault(node_id, {})
        else:
            state = _NoState(node_id, self.state.get(node_id, {}))

        return NodeContext(
            self.config,
            group.prompt_group.version,
            self.resources.tokenizer,
            state,
            group=group,
            validating=validating,
        )


class _NoState(UserDict[str, Any]):
    """Raises UserError on writes: each worker would have separate state, which no checkpoint would
    hold in full."""

    def __init__(self, node_id: str, restored: dict[str, Any]) -> None:
        self._node_id = node_id
        super().__init__(restored)

    def __setitem__(self, name: str, value: object) -> None:
        raise UserError(
            f"node '{self._node_id}' keeps ctx.state['{name}'] on one of several workers: the "
            "others do not have it, and no checkpoint contains it. Use a node of the training "
            "loop, or a single worker"
        )
