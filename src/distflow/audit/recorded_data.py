"""What a check of the auditor is, and what it gets: the data of a step, sample by sample, as plain tensors of one
sample each, never columns of many."""

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.audit.plain_model import PlainScores
from distflow.audit.recorder import GroupRecord, UpdateRecord
from distflow.audit.sharded_forward import KeptWeights, Turns
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.graph import BoundNode, BoundPipeline
from distflow.graph.fields import TOKEN_AXES
from distflow.rewards.score import RewardResult
from distflow.rollout.engine import GenerateRequest, Generation, SamplingParams
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.groups import PromptGroup
from distflow.training.engine import Collective, Scorer, TrainEngine

BUILTIN = "distflow."
Inputs = tuple[Callable[..., object], Sequence[object], Mapping[str, object]]
Sample = Mapping[str, Any]
"""One sample, by column name: a tensor for each per-token column, a value for the others."""


@dataclass(frozen=True)
class Parts:
    """The parts of the run that the auditor uses.

    training_nodes: those of this worker. data: maps groups to rows. sampling_of: sampling parameters of domains that
    have their own. reward_fn: calls a reward function by name, for one sample. scored_in_groups: names of reward
    functions that score all responses to a prompt together. hashes: of the rollout engine's tensors, None if the
    engine is on another worker. weight_dtype: of these tensors. exact: models compute in float32. estimate: returns
    the function that writes the advantages, and its arguments for a batch; None if there is none. turns: runs the
    models. bring: brings all models onto the device. ranks: the dp group. first_step: of this process.
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
    scored_in_groups: Collection[str]
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
    """A step as it was before its first update, and its updates.

    records: by group, of the groups that this worker generated. group_ids: of the whole step. batch: a copy of the
    columns as the nodes wrote them. fresh: the policy was not trained before this step. served: the last synced weight
    version, None if nothing generates. published: hashes of its tensors, as in a receipt. kept: weights of older
    versions. updates: in order. num_updates: optimizer steps by role before this step. metrics: of the step. budget_s:
    time for calling reward functions again. state: JSON values that persist across audits and are in every checkpoint.
    say: warns the user, each message once. partial: only a few groups of the step. plain: scores of samples that the
    policy was run on again. drawn: such scores by the weights that generated each token, and which tokens have one.
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
        """All samples of the step on this rank."""
        if self._samples is None:
            self._samples = samples_of(self.batch)
        return self._samples

    def some_samples(self, most: int) -> list[Sample]:
        """At most `most` samples from as many groups as possible, drawn by the step number."""
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
        """The request and the engine's generation behind this sample; None if this worker did not record them."""
        record = self.records.get(int(sample["group_index"]))
        for request, result in record.generated if record else ():
            if request.params.greedy and not self.parts.sampling.greedy:
                continue  # of a baseline
            for made in result.generations:
                if made.sample == index_of(sample):
                    return request, made
        return None

    def is_ours(self, column: str) -> bool:
        """Whether a built-in node writes the column, so that its expected content is known."""
        writers = [node for node in self.parts.pipeline.nodes if column in node.contract.writes]
        return bool(writers) and all(module_of(node.fn).startswith(BUILTIN) for node in writers)

    def is_written(self, column: str) -> bool:
        """Whether a node of the pipeline writes the column."""
        return any(column in node.contract.writes for node in self.parts.pipeline.nodes)

    def sampling(self, sample: Sample) -> SamplingParams:
        """The sampling parameters of its domain."""
        return self.parts.sampling_of.get(str(sample["domain"]), self.parts.sampling)

    def place_of(self, prompt_group: PromptGroup) -> tuple[int, int]:
        """Epoch and row of a group, by its number, or by its position in its domain: the order of sorted raw Philox
        words, keyed by the seed, the epoch and the domain's name."""
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
    """The sample's position in its group."""
    return int(str(sample["uid"]).split("-")[1])


def module_of(fn: Callable[..., object]) -> str:
    """The module that defines the function, below any wrappers."""
    while hasattr(fn, "func"):
        fn = fn.func
    return str(getattr(fn, "__module__", ""))


def doubles(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)


class Wrong(Exception):
    """The recorded step contradicts the check's statement; the message is for the user."""


@dataclass(frozen=True)
class Check:
    """One statement about a step, and the function that checks it.

    needs: what the check cannot do without. limit: the tolerated difference, in words. run: returns None if the check
    passed, "" if it does not apply to the pipeline, else why it could not be made; raises Wrong if it failed.
    """

    name: str
    statement: str
    needs: str
    limit: str
    run: Callable[[RecordedStep], str | None]
