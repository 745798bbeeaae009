"""What a node may ask about the run besides the fields, engines and options that its signature names."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.data.sample import Sample, Segment
from distflow.flow.minibatch import minibatches
from distflow.flow.ticket import Ticket
from distflow.rewards.router import Judgement
from distflow.rollout.engine import SamplingParams, Stream
from distflow.runtime.parts import Parts
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


@dataclass(frozen=True)
class Contexts:
    """Contexts of one worker.

    after_update: (role, engine, mini-batch, metrics, step, whether the first of the step), told of each update.
    node_state: by node id; each context of a node has the same object.
    """

    parts: Parts
    after_update: Callable[[str, TrainEngine, Batch, dict[str, float], int, bool], None]
    node_state: dict[str, dict[str, Any]]

    def learning(self, step: int, node_id: str) -> NodeContext:
        """Of a learning-plane node in a step."""

        def after_update(engine: TrainEngine, batch: Batch, metrics: dict[str, float], first: bool) -> None:
            role = "critic" if engine is self.parts.engines.critic else "actor"
            self.after_update(role, engine, batch, metrics, step, first)

        state = self.node_state.setdefault(node_id, {})
        return NodeContext(self.parts.config, step, self.parts.tokenizer, self._judge, after_update, state)

    def training(self, ticket: Ticket, node_id: str) -> NodeContext:
        """Of an experience-plane node that works for a ticket."""
        group = self._group(ticket, self.parts.train_rows[ticket.row], self.parts.sampling)
        return replace(self.learning(ticket.version, node_id), group=group)

    def validating(
        self, ticket: Ticket, node_id: str, rows: Sequence[PromptRow], params: SamplingParams
    ) -> NodeContext:
        """Of a rollout or reward node that answers a held-out row."""
        group = self._group(ticket, rows[ticket.row], params)
        return replace(self.learning(ticket.version, node_id), group=group, validating=True)

    def _group(self, ticket: Ticket, row: PromptRow, params: SamplingParams) -> GroupContext:
        stream = Stream(self.parts.config.trainer.seed, ticket.stream, ticket.epoch, ticket.row)
        return GroupContext(ticket, row, params, tuple(range(ticket.group_size)), stream)

    async def _judge(self, batch: Batch) -> list[Judgement]:
        rewards = self.parts.rewards
        assert rewards is not None, "a program with a reward node was given a router"
        longest = self.parts.config.data.max_response_length
        return list(await asyncio.gather(*(rewards.score(sample, longest) for sample in _answers(batch))))


def prompts_of(group: GroupContext) -> Batch:
    """The group's prompts, one row a sample wanted: what entry nodes read."""
    row = group.row
    return Batch.from_samples(
        [
            Sample(
                uid=f"{group.ticket.number}-{i}",
                group_index=group.ticket.number,
                segments=[Segment("prompt", tuple(row.prompt_ids))],
                prompt=row.prompt_text,
                domain=row.domain,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info or {},
            )
            for i in group.samples
        ]
    )


def _answers(batch: Batch) -> Iterator[Sample]:
    """What a verifier is told of each sample."""
    for i, length in enumerate(batch.lengths("response").tolist()):
        yield Sample(
            uid=batch["uid"][i],
            group_index=int(batch["group_index"][i]),
            segments=[Segment("prompt", ()), Segment("environment", tuple(batch["response_ids"][i, :length].tolist()))],
            response=batch["responses"][i],
            domain=batch["domain"][i],
            ground_truth=batch["ground_truth"][i],
            extra_info=batch["extra_info"][i],
        )
