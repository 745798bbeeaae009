"""What is known of an audited step, sample by sample: plain tensors of one sample each, never columns of many."""

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.audit.old_weights import KeptWeights
from distflow.audit.plain_model import PlainScores
from distflow.audit.recorder import GroupRecord, UpdateRecord
from distflow.audit.sharded_forward import Turns
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.graph import BoundNode, BoundPipeline
from distflow.graph.fields import TOKEN_AXES
from distflow.rewards.score import RewardResult
from distflow.rollout.engine import GenerateRequest, Generation, SamplingParams
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.groups import PromptGroup
from distflow.training.collective import Collective
from distflow.training.engine import Scorer, TrainEngine

BUILTIN = "distflow."
Inputs = tuple[Callable[..., object], Sequence[object], Mapping[str, object]]
Sample = Mapping[str, Any]
"""One sample by the names of its columns: a tensor for each per-token column, a value for the others."""


@dataclass(frozen=True)
class Parts:
    """What the run has to ask.

    training_nodes: those of this worker. data: which row a group has. sampling_of: that of domains which have their
    own. reward_fn: calls a reward function by its name, one sample at a time. judged_in_groups: names of those that
    score all responses to a prompt at a time. hashes: of the tensors that the rollout engine computes with, None where
    it is not here. weight_dtype: of those. exact: models compute in float32. estimate: the function that writes the
    advantages, and what it is called with for a batch; None where there is none. turns: through which models are run.
    bring: has them all on the device. ranks: those that train the same. first_step: the first of this process.
    """

    config: Config
    pipeline: BoundPipeline
    training_nodes: Sequence[BoundNode]
    rows: Sequence[PromptRow]
    data: DataPlan
    sampling: SamplingParams
    sampling_of: Mapping[str, SamplingParams]
    tokenizer: PreTrainedTokenizerBase
    actor: TrainEngine | None
    critic: TrainEngine | None
    ref: Scorer | None
    reward_fn: Callable[[str, Mapping[str, object]], RewardResult] | None
    judged_in_groups: Collection[str]
    hashes: Callable[[], dict[str, str]] | None
    weight_dtype: torch.dtype
    exact: bool
    num_ranks: int
    estimate: Callable[[Batch], Inputs] | None
    turns: Turns
    bring: Callable[[], None]
    ranks: Collective
    first_step: int
    total_steps: int


@dataclass
class RecordedStep:
    """A step, as it was before its first update, and its updates.

    records: by group, of groups that this worker made. groups: of the whole step. batch: columns as the nodes wrote
    them; a copy. fresh: the policy was not trained before this step. served: the version that was published last, None
    where nothing generates. published: hashes of its tensors, as in a receipt. kept: weights of older versions.
    updates: in their order. num_updates: optimizer steps by role before this step. metrics: of the step. budget_s: what
    asking verifiers may take. state: JSON values that live across audits and are in every checkpoint. say: tells the
    user, once a message. partial: only a few groups of the step. plain: of samples that the policy was run on again.
    drawn: the same by the weights that made each token, and which of its tokens were scored.
    """

    parts: Parts
    step: int
    total_steps: int
    records: Mapping[int, GroupRecord]
    group_ids: Sequence[int]
    batch: Batch
    fresh: bool
    budget_s: float
    served: int | None
    published: Mapping[str, str]
    kept: KeptWeights
    num_updates: Mapping[str, int]
    state: dict[str, Any]
    say: Callable[[str], None]
    updates: list[UpdateRecord] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    partial: bool = False
    plain: dict[str, PlainScores] = field(default_factory=dict)
    drawn: dict[str, tuple[PlainScores, Tensor]] = field(default_factory=dict)
    _orders: dict[tuple[int, int], Any] = field(default_factory=dict, repr=False)
    _samples: list[Sample] | None = field(default=None, repr=False)

    @property
    def config(self) -> Config:
        return self.parts.config

    @property
    def samples(self) -> list[Sample]:
        """Every sample of the step on this rank."""
        if self._samples is None:
            self._samples = samples_of(self.batch)
        return self._samples

    def proved(self, most: int) -> list[Sample]:
        """At most so many samples, of as many groups as there are, drawn by the step."""
        by_group: dict[int, list[Sample]] = {}
        for sample in self.samples:
            by_group.setdefault(int(sample["group_index"]), []).append(sample)
        turn = random.Random(self.step)
        groups = turn.sample(list(by_group.values()), len(by_group))
        drawn = [turn.sample(group, len(group)) for group in groups]
        longest = max((len(group) for group in drawn), default=0)
        order = [group[i] for i in range(longest) for group in drawn if i < len(group)]
        return order[:most]

    def generation(self, sample: Sample) -> tuple[GenerateRequest, Generation] | None:
        """The request and the engine's answer that became this sample; None where this worker did not see them."""
        record = self.records.get(int(sample["group_index"]))
        for request, result in record.generated if record else ():
            if request.params.greedy and not self.parts.sampling.greedy:
                continue  # a baseline's
            for made in result.generations:
                if made.sample == index_of(sample):
                    return request, made
        return None

    def is_ours(self, column: str) -> bool:
        """Whether what writes the column is built in, so that what it should hold is known."""
        writers = [node for node in self.parts.pipeline.nodes if column in node.contract.writes]
        return bool(writers) and all(module_of(node.fn).startswith(BUILTIN) for node in writers)

    def is_written(self, column: str) -> bool:
        """Whether a node of the pipeline writes the column."""
        return any(column in node.contract.writes for node in self.parts.pipeline.nodes)

    def sampling(self, sample: Sample) -> SamplingParams:
        """How its tokens are to be drawn."""
        return self.parts.sampling_of.get(str(sample["domain"]), self.parts.sampling)

    def place_of(self, prompt_group: PromptGroup) -> tuple[int, int]:
        """Epoch and row that a group names by its number, of a domain by its position there: sorted raw Philox words,
        keyed by the seed, the epoch and the domain's name."""
        data, first, word = self.parts.data, 0, 0
        num_rows, position = data.num_rows, prompt_group.group_id
        if data.domains:
            position, name = prompt_group.position, prompt_group.stream.removeprefix("train/")
            word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
            for domain in data.domains:
                num_rows = domain.num_rows
                if domain.name == name:
                    break
                first += num_rows
        epoch, position = divmod(position, num_rows)
        if not data.shuffle:
            return epoch, first + position
        if (word, epoch) not in self._orders:
            words = np.random.Philox(
                key=np.array([data.seed, 0], np.uint64), counter=np.array([0, 0, epoch, word], np.uint64)
            )
            self._orders[word, epoch] = np.argsort(words.random_raw(num_rows), kind="stable")
        return epoch, first + int(self._orders[word, epoch][position])

    def updates_of(self, role: str) -> list[UpdateRecord]:
        return [update for update in self.updates if update.role == role]


def samples_of(batch: Batch) -> list[Sample]:
    """The samples of a batch, each with its own tokens only."""
    columns: dict[str, Sequence[Any]] = {}
    for name in (*batch.names, "loss_mask", "token_level_scores", "token_level_rewards"):
        if name not in batch or name in columns:
            continue
        axis, flat = batch.field(name).axis, batch.flat(name)
        columns[name] = flat.split(batch.lengths(axis).tolist()) if axis in TOKEN_AXES else list(flat)
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch))]


def index_of(sample: Sample) -> int:
    """Its place in its group."""
    return int(str(sample["uid"]).split("-")[1])


def module_of(fn: Callable[..., object]) -> str:
    """Where the function is written, below what wraps it."""
    while hasattr(fn, "func"):
        fn = fn.func
    return str(getattr(fn, "__module__", ""))


def doubles(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)
