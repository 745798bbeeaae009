"""What a node may ask about the run besides the fields, engines and options that its signature names."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.flow.minibatch import minibatches
from distflow.flow.ticket import Ticket
from distflow.rewards.router import Judgement
from distflow.rollout.engine import SamplingParams, Stream
from distflow.training.engine import TrainEngine

Judge = Callable[[Batch], Awaitable[Sequence[Judgement]]]


@dataclass(frozen=True)
class GroupContext:
    """The prompt group that an experience-plane node works for: which row, which samples of it, drawn how."""

    ticket: Ticket
    row: PromptRow
    params: SamplingParams
    samples: tuple[int, ...]
    stream: Stream


@dataclass(frozen=True)
class NodeContext:
    """Handed to nodes that name `ctx`.

    step: the learning step, from 0; in the experience plane the one that the group's ticket was issued in.
    judge: verdicts of the reward functions on each sample of a batch.
    after_update: to be told of each optimizer step of an engine, so that it is checked: (engine, mini-batch, metrics,
        whether it was the first of this step).
    state: the node's own JSON values; they live across steps and are in every checkpoint.
    group: in the experience plane only.
    validating: a validation set is being answered.
    """

    config: Config
    step: int
    tokenizer: Any
    judge: Judge
    after_update: Callable[[TrainEngine, Batch, dict[str, float], bool], None]
    state: dict[str, Any] = field(default_factory=dict)
    group: GroupContext | None = None
    validating: bool = False

    def minibatches(self, batch: Batch, num_prompts: int, epoch: int) -> Iterator[Batch]:
        """The mini-batches of one pass over `batch`, of `num_prompts` whole groups each."""
        groups = batch["group_index"].tolist()
        for indices in minibatches(len(batch), groups, num_prompts, self.config.trainer.seed, self.step, epoch):
            yield batch.select(indices)

    def greedy(self) -> "NodeContext":
        """The same group, answered once by the most likely tokens."""
        assert self.group is not None
        group = replace(self.group, params=replace(self.group.params, greedy=True), samples=(0,))
        return replace(self, group=group)
