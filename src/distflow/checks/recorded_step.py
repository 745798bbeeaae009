"""What the checks of a step read: the run, and the recorded data of one step."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, takewhile, zip_longest
from operator import eq
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from distflow.checks.check import NOT_APPLICABLE, is_builtin, plain_function
from distflow.checks.group_records import GroupRecord
from distflow.checks.kept_weights import KeptWeights
from distflow.checks.plain_forward import PlainScores, RunOfTokens, model_of
from distflow.checks.samples import (
    Conversation,
    Sample,
    by_group_of,
    conversations_of,
    index_of,
    samples_of,
)
from distflow.checks.sharded_passes import ShardedPasses
from distflow.checks.update_records import UpdateRecord
from distflow.config import Config
from distflow.config.derived_settings import BY_WORKFLOW, agent_sampling
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.graph import BoundPipeline
from distflow.rewards.reward_results import RewardResult
from distflow.rollout.engine import GenerateRequest, SamplingParams
from distflow.runtime.compiled_node import Step
from distflow.runtime.node_context import NodeContext
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.spec import Spec
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.data_plan import place
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import Collective

SCORES_LAST_REPLY = ("single_turn", "multi_turn", "tools")
"""Workflows whose last reply the run's reward functions score."""
Limit = TypeVar("Limit")


@dataclass(frozen=True)
class CheckedRun:
    """The run, as seen by one worker's checks."""

    inputs: WorkerInputs
    services: RolloutServices
    pipeline: BoundPipeline
    training_steps: Sequence[Step]
    """Of this worker."""
    bring: Callable[[], None]
    """Brings all models onto the device."""
    state: dict[str, Any]
    """JSON values that persist across checked steps and are in every checkpoint."""
    compare_memory: Callable[[int], str | None] = lambda step: NOT_APPLICABLE
    """With the saved run's, before the first update of a step; see `Check.run`."""
    rows_used: dict[str, dict[int, dict[int, int]]] = field(default_factory=dict)
    """By stream, epoch and row, the group that was generated from it."""
    _warnings: set[str] = field(default_factory=set)

    @property
    def spec(self) -> Spec:
        return self.inputs.spec

    @property
    def resources(self) -> Resources:
        return self.services.resources

    @cached_property
    def passes(self) -> ShardedPasses:
        """Runs the models."""
        engines = (self.resources.actor, self.resources.critic, self.resources.ref)
        models = map(model_of, (*engines, *self.resources.scoring_models.values()))
        known = [model for model in models if model is not None]
        return ShardedPasses(self.inputs.ports.collective, known)

    @cached_property
    def older_weights(self) -> KeptWeights:
        return KeptWeights(self.spec.data.max_staleness + 1, self.spec.weight_dtype)

    @property
    def is_exact(self) -> bool:
        """Whether the models compute in float32."""
        return self.spec.config.actor_rollout_ref.model.dtype == "float32"

    @property
    def ranks(self) -> Collective:
        """The ranks that share a step, each with its own samples."""
        return self.inputs.ports.data

    def warn(self, message: str) -> None:
        """Warn the user; each message once."""
        if message not in self._warnings:
            self._warnings.add(message)
            self.inputs.recorder.note("warning", message)

    @cached_property
    def row(self) -> Callable[[int], Any]:
        """A training row. The last ones are kept, since several checks read the same."""
        return lru_cache(maxsize=1024)(lambda index: self.spec.rows[index])

    @cached_property
    def text(self) -> Callable[[tuple[int, ...]], str]:
        """The text of tokens without special ones. The last ones are kept."""
        decode = self.resources.tokenizer.decode
        return lru_cache(maxsize=1024)(lambda ids: str(decode(list(ids), skip_special_tokens=True)))

    def call_reward(self, name: str, arguments: Mapping[str, object]) -> RewardResult:
        assert self.resources.reward_fn is not None, "called only if there is one"
        return self.services.call(self.resources.reward_fn.pools.call(name, arguments))

    def engine_hashes(self) -> dict[str, str]:
        """Hashes of the rollout engine's tensors; empty if the engine is on another worker."""
        engine = self.resources.rollout
        if engine is not None:
            return self.services.call(engine.hashes())
        return {}

    def call_estimator(self, batch: Batch) -> object:
        """What the function that writes the advantages returns for a batch; its state is a copy.
        None if this worker has none."""
        for step in self.training_steps:
            if "advantages" not in step.node.contract.writes:
                continue

            state = copy.deepcopy(self.inputs.state.get(step.node.node_id, {}))
            ctx = NodeContext(
                self.spec.config, self.inputs.version.step, self.resources.tokenizer, state
            )
            return step.fn(**step.inputs(batch, {"batch": batch, "ctx": ctx}))

        return None


class RecordedTurn(NamedTuple):
    """A request for a sample, and the response tokens that the engine drew for it."""

    request: GenerateRequest
    generation: Segment
    start: int
    end: int
    """Before this token: the whole generation, or its beginning if a node cut it."""
    conversation: Conversation


@dataclass
class RecordedStep:
    """A step as it was before its first update, with its updates."""

    run: CheckedRun
    step: int
    records: Mapping[int, GroupRecord]
    """By group, of the groups that this worker generated."""
    group_ids: Sequence[int]
    """Of the whole step, over all ranks."""
    batch: Batch
    """The columns as the nodes wrote them."""
    synced_version: int | None
    """Of the last weight sync; None if nothing generates."""
    sent_hashes: Mapping[str, str]
    """Of that version's tensors, as in a weight receipt."""
    num_updates: Mapping[str, int]
    """Optimizer steps by role before this step."""
    budget_s: float = 0.0
    """Time for calling reward functions again."""
    updates: list[UpdateRecord] = field(default_factory=list)
    """In order."""
    plain: dict[str, PlainScores] = field(default_factory=dict, init=False)
    """Scores of samples that the policy was run on again."""
    drawn: dict[str, tuple[PlainScores, Tensor]] = field(default_factory=dict, init=False)
    """Scores by the weights that generated each token, and which tokens have one."""

    @property
    def config(self) -> Config:
        return self.run.spec.config

    @cached_property
    def samples(self) -> list[Sample]:
        return samples_of(self.batch)

    def prompt_group(self, sample: Sample) -> PromptGroup | None:
        """The sample's group. Another worker's is derived from its number; None if this is
        impossible, because of domains, a sampler, or rows that a user's loop offers to its one
        process."""
        record = self.record_of(sample)
        if record is not None:
            return record.prompt_group

        spec = self.run.spec
        if (
            spec.data.domains
            or spec.data.sampler
            or len(spec.plan.ranks) == 1
            or not self.is_ours("responses")
        ):
            return None

        data = spec.data
        number = int(sample["group_index"])
        epoch, row = place(number, data.num_rows, data.seed, data.shuffle)
        return PromptGroup(number, epoch, row, data.group_size, 0)

    def some_samples(self, most: int) -> list[Sample]:
        """At most `most` samples from as many groups as possible, drawn by the step number."""
        return self._drawn[:most]

    @cached_property
    def _drawn(self) -> list[Sample]:
        turn = random.Random(self.step)
        by_group = list(by_group_of(self.samples).values())
        drawn = [turn.sample(group, len(group)) for group in turn.sample(by_group, len(by_group))]
        in_turns = chain.from_iterable(zip_longest(*drawn))
        return [sample for sample in in_turns if sample is not None]

    def record_of(self, sample: Sample) -> GroupRecord | None:
        """The record of the sample's group; None if this worker did not generate it."""
        return self.records.get(int(sample["group_index"]))

    def requests(self, sample: Sample) -> list[tuple[GenerateRequest, Segment]]:
        """The requests for this sample, each with the engine's generation; empty if this worker did
        not record them."""
        record = self.record_of(sample)
        may_be_baseline = not self.run.spec.sampling.greedy  # baselines are greedy

        found: list[tuple[GenerateRequest, Segment]] = []
        if record:
            for request, result in record.generated:
                if may_be_baseline and request.params.greedy:
                    continue
                for generation in result:
                    if generation.sample == index_of(sample):
                        found.append((request, generation))

        return found

    def num_used(self, sample: Sample) -> dict[str, int]:
        """How many tokens of the last reply the workflow used, by the conversation, where it said
        so."""
        record = self.record_of(sample)
        events = record.events.get(index_of(sample), ()) if record is not None else ()
        return {event[1]: event[2] for event in events if event[0] == "kept"}

    def turns(self, sample: Sample) -> list[RecordedTurn]:
        """The requests contained in the sample, in order: those whose prompt begins one of its
        conversations, with as much of their generation as follows there. Drafts that a node
        discards, and requests for a judgement, are not included. A request belongs to one
        conversation, even if another has the same tokens, by its stream."""
        has_streams = self.config.actor_rollout_ref.rollout.workflow is not None
        record = self.record_of(sample)
        requests = self.requests(sample)

        found = dict[int, RecordedTurn]()
        for talk in conversations_of(sample):
            stream = record.prompt_group.stream if record else ""
            if record and talk.name:
                stream += f"/fork {talk.name}"

            for request, made in requests:
                before = len(request.prompt_ids)
                start = talk.first + before
                if has_streams and request.stream.name != stream:
                    continue
                if start < max(talk.first, 0) or talk.ids[:before] != list(request.prompt_ids):
                    continue

                end = start + sum(takewhile(bool, map(eq, talk.ids[before:], made.token_ids)))
                longest = start
                if start in found:
                    longest = found[start].end
                if end > longest:
                    found[start] = RecordedTurn(request, made, start, end, talk)

        return [found[start] for start in sorted(found)]

    @cached_property
    def _writers(self) -> dict[str, list[Callable[..., object]]]:
        """By column, the functions of the nodes that write it, without their wrappers."""
        found: dict[str, list[Callable[..., object]]] = {}
        for node in self.run.pipeline.nodes:
            for column in node.contract.writes:
                found.setdefault(column, []).append(plain_function(node.fn))
        return found

    def is_ours(self, column: str) -> bool:
        """Whether built-in nodes alone write the column, so that its expected content is known. A
        workflow itself decides what is said and, unless it is in `SCORES_LAST_REPLY`, which parts
        the score has; the score is what it returned."""
        workflow = self.config.actor_rollout_ref.rollout.workflow
        is_scored = column == "scores" or (
            column in ("reward_parts", "acc") and workflow in SCORES_LAST_REPLY
        )
        if column in BY_WORKFLOW and workflow is not None and not is_scored:
            return False

        writers = self._writers.get(column, [])

        return bool(writers) and all(map(is_builtin, writers))

    def is_written(self, column: str) -> bool:
        """Whether a node of the pipeline writes the column."""
        return bool(self._writers.get(column))

    def sampling(self, sample: Sample) -> SamplingParams:
        """The sampling parameters of its domain, without stop tokens."""
        return self.run.spec.sampling_of.get(str(sample["domain"]), self.run.spec.sampling)

    def sampling_of_tokens(self, sample: Sample) -> list[RunOfTokens]:
        """The response tokens of each conversation, with its agent's sampling parameters."""
        found = list[RunOfTokens]()
        for talk in conversations_of(sample):
            own: Any = agent_sampling(self.config, talk.name)
            start = max(-talk.first, 0)
            params = replace(self.sampling(sample), **own)
            found.append((len(talk.ids) - start, params, talk.ids[:start]))

        return found

    def temperatures(self, sample: Sample) -> Tensor:
        """The temperature of each response token, float64 `(tokens, 1)`."""
        found = list[float]()
        for number, params, _ in self.sampling_of_tokens(sample):
            found += [params.temperature] * number
        return torch.tensor(found, dtype=torch.float64)[:, None]

    def limit(self, exact: Limit, rounded: Limit) -> Limit:
        """The limit for models in float32, or for a lower precision."""
        return exact if self.run.is_exact else rounded

    def updates_of(self, role: str) -> list[UpdateRecord]:
        return [update for update in self.updates if update.role == role]
