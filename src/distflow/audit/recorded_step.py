"""What the auditor's checks read: the data of a recorded step, as plain tensors of one sample
each."""

import copy
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.audit.check import NOT_APPLICABLE, Sample, is_builtin, plain_function
from distflow.audit.model_forward import KeptWeights, PlainScores, RunOfTokens, Turns, model_of
from distflow.audit.record_groups_and_updates import GroupRecord, UpdateRecord
from distflow.config import Config
from distflow.config.derived_settings import (
    BY_WORKFLOW,
    agent_sampling,
    algorithms,
    policies_of_agents,
    policy_of_conversation,
)
from distflow.config.keys.algorithm import AlgorithmConfig
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.graph import BoundPipeline
from distflow.graph.fields import TOKEN_AXES
from distflow.observe.metrics import Measured
from distflow.rewards.reward_results import RewardResult
from distflow.rollout.engine import GenerateRequest, SamplingParams
from distflow.runtime.compiled_node import NodeContext, Step
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.spec import Spec
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.data_plan import UNKNOWN_ROWS, WINDOW
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import Collective

MOST_GATHERED = 2**20
"""Most response tokens of a step whose samples are passed to all ranks for checks over the whole
step."""
SCORES_LAST_REPLY = ("single_turn", "multi_turn", "tools")
"""Workflows whose last reply the run's reward functions score."""
Inputs = tuple[Callable[..., object], Sequence[object], Mapping[str, object]]
"""A function with its positional and keyword arguments."""
Limit = TypeVar("Limit")


@dataclass(frozen=True)
class AuditedRun:
    """The run, as seen by one worker's auditor.

    training_steps: of this worker. bring: brings all models onto the device. state: JSON values
    that persist across audits and are in every checkpoint. compare_memory: with the saved run's,
    before the first update of a step; see `Check.run`. doubts: why the next step is to be audited
    in full. positions: the last group's number, and its position in its domain, by stream.
    compared: metrics that were recomputed. marked: trained tokens by their version. validated: the
    metric of trainer.keep_best by step, higher is better; saved: those of these steps that had a
    checkpoint. released: `tokens` of the last step over all ranks, and its `metrics`, which may
    grow. moved: by role, how far a few elements of each weight moved in the last update seen, in
    learning rates.
    """

    inputs: WorkerInputs
    services: RolloutServices
    pipeline: BoundPipeline
    training_steps: Sequence[Step]
    bring: Callable[[], None]
    state: dict[str, Any]
    compare_memory: Callable[[int], str | None] = lambda step: NOT_APPLICABLE
    doubts: list[str] = field(default_factory=list)
    positions: dict[str, list[int]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    marked: Counter[int] = field(default_factory=Counter)
    validated: dict[int, float] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    released: dict[str, Any] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)
    _warnings: set[str] = field(default_factory=set)

    @property
    def spec(self) -> Spec:
        return self.inputs.spec

    @property
    def resources(self) -> Resources:
        return self.services.resources

    @cached_property
    def turns(self) -> Turns:
        """Runs the models."""
        engines = (self.resources.actor, self.resources.critic, self.resources.ref)
        models = map(model_of, (*engines, *self.resources.scoring_models.values()))
        return Turns(self.inputs.ports.collective, [model for model in models if model is not None])

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
        return self.services.call(engine.hashes()) if engine is not None else {}

    def estimator(self, batch: Batch) -> Inputs | None:
        """The function that writes the advantages, with its arguments for the batch and a copy of
        its state; None if there is none."""
        step = next(
            (step for step in self.training_steps if "advantages" in step.node.contract.writes),
            None,
        )
        if step is None:
            return None
        state = copy.deepcopy(self.inputs.state.get(step.node.node_id, {}))
        ctx = NodeContext(
            self.spec.config, self.inputs.version.step, self.resources.tokenizer, state
        )
        return step.fn, *step.inputs(batch, {"batch": batch, "ctx": ctx})


class Conversation(NamedTuple):
    """One of a sample's conversations: its name, empty for the first one, and its tokens. Token i
    is the response's token `first` + i, or one of the prompt if that is negative."""

    name: str
    first: int
    ids: list[int]


class RecordedTurn(NamedTuple):
    """A request for a sample, and the response tokens that the engine drew for it, from `start` to
    before `end`: the whole generation, or its beginning if a node cut it."""

    request: GenerateRequest
    generation: Segment
    start: int
    end: int
    conversation: Conversation


@dataclass
class RecordedStep:
    """A step as it was before its first update, with its updates.

    records: by group, of the groups that this worker generated. group_ids: of the whole step.
    batch: the columns as the nodes wrote them. synced_version: of the last weight sync; None if
    nothing generates. sent_hashes: of that version's tensors, as in a weight receipt. num_updates:
    optimizer steps by role before this step. budget_s: time for calling reward functions again.
    dropped: the last groups that a node dropped, why, and their columns. updates: in order.
    metrics: of the step. measured: by its nodes on this rank, if it is audited; after: its columns
    then. partial: only a few groups of the step. plain: scores of samples that the policy was run
    on again. drawn: such scores by the weights that generated each token, and which tokens have
    one. fixed_tokens: the reference's log-probs of tokens that are the same in every step, if
    already known.
    """

    run: AuditedRun
    step: int
    records: Mapping[int, GroupRecord]
    group_ids: Sequence[int]
    batch: Batch
    synced_version: int | None
    sent_hashes: Mapping[str, str]
    num_updates: Mapping[str, int]
    budget_s: float = 0.0
    dropped: Sequence[tuple[GroupRecord, str, Batch]] = ()
    updates: list[UpdateRecord] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    partial: bool = False
    passed_over: Sequence[tuple[PromptGroup, PromptGroup]] = ()
    measured: Sequence[Measured] = field(default=(), init=False)
    after: Batch | None = field(default=None, init=False)
    plain: dict[str, PlainScores] = field(default_factory=dict, init=False)
    drawn: dict[str, tuple[PlainScores, Tensor]] = field(default_factory=dict, init=False)
    fixed_tokens: Tensor | None = field(default=None, init=False)

    @property
    def config(self) -> Config:
        return self.run.spec.config

    @cached_property
    def samples(self) -> list[Sample]:
        return samples_of(self.batch)

    @cached_property
    def rows(self) -> dict[str, Sample]:
        """What mini-batches have, by name: the samples, or with `algorithm.sample_level` the
        decisions of each."""
        if self.config.algorithm.sample_level == "episode":
            return {str(sample["uid"]): sample for sample in self.samples}
        own = [(sample, decisions_of(sample)) for sample in self.samples]
        return {
            f"{sample['uid']}/{number}": row
            for sample, rows in own
            for number, row in enumerate(rows)
        }

    def by_algorithm(self) -> list[tuple[str, AlgorithmConfig, list[Sample]]]:
        """(domain, settings, samples) for each domain with its own settings; all other samples are
        under ""."""
        samples: dict[str, list[Sample]] = {
            domain or "": [] for domain, _ in algorithms(self.config)
        }
        for sample in self.samples:
            samples[sample["domain"] if sample["domain"] in samples else ""].append(sample)
        return [
            (domain or "", settings, samples[domain or ""])
            for domain, settings in algorithms(self.config)
        ]

    @property
    def is_whole(self) -> bool:
        """Whether all groups of the step are here, not only a few or one rank's."""
        return len(set(self.batch["group_index"].tolist())) == len(self.group_ids)

    @cached_property
    def everyone(self) -> "RecordedStep":
        """The step with the samples of all ranks, which call this together; itself if there are too
        many or in a look."""
        ranks = self.run.ranks
        every = copy.copy(self)
        if (
            self.partial
            or ranks.size == 1
            or ranks.sum(float(self.batch.lengths("response").sum())) > MOST_GATHERED
        ):
            return self
        for name in ("samples", "rows", "_drawn"):
            every.__dict__.pop(name, None)
        every.batch = Batch.concat(ranks.gather(self.batch))
        return every

    def prompt_group(self, sample: Sample) -> PromptGroup | None:
        """The sample's group. Another worker's is derived from its number; None if this is
        impossible, because of domains or rows that a user's loop offers to its one process."""
        record = self.record_of(sample)
        spec = self.run.spec
        if (
            record
            or spec.data.domains
            or len(spec.plan.ranks) == 1
            or not self.is_ours("responses")
        ):
            return record.prompt_group if record else None
        group = PromptGroup(int(sample["group_index"]), 0, 0, spec.data.group_size, 0)
        epoch, row = self.place_of(group)
        return group.changed(epoch=epoch, row=row)

    def some_samples(self, most: int) -> list[Sample]:
        """At most `most` samples from as many groups as possible, drawn by the step number."""
        return self._drawn[:most]

    @cached_property
    def _drawn(self) -> list[Sample]:
        turn = random.Random(self.step)
        by_group = list(by_group_of(self.samples).values())
        drawn = [turn.sample(group, len(group)) for group in turn.sample(by_group, len(by_group))]
        longest = max((len(group) for group in drawn), default=0)
        return [group[i] for i in range(longest) for group in drawn if i < len(group)]

    def record_of(self, sample: Sample) -> GroupRecord | None:
        """The record of the sample's group; None if this worker did not generate it."""
        return self.records.get(int(sample["group_index"]))

    def requests(self, sample: Sample) -> list[tuple[GenerateRequest, Segment]]:
        """The requests for this sample, each with the engine's generation; empty if this worker did
        not record them."""
        # baselines are greedy
        record = self.record_of(sample)
        baselines = not self.run.spec.sampling.greedy
        found: list[tuple[GenerateRequest, Segment]] = []
        for request, result in record.generated if record else ():
            for generation in result:
                if generation.sample == index_of(sample) and not (
                    baselines and request.params.greedy
                ):
                    found.append((request, generation))
        return found

    def num_used(self, sample: Sample) -> dict[str, int]:
        """How many tokens of the last reply the workflow used, by the conversation, where it said
        so."""
        record = self.record_of(sample)
        events = record.events.get(index_of(sample), ()) if record is not None else ()
        return {event[1]: event[2] for event in events if event[0] == "kept"}

    def turns(self, sample: Sample) -> list["RecordedTurn"]:
        """The requests contained in the sample, in order: those whose prompt begins one of its
        conversations, with as much of their generation as follows there. Drafts that a node
        discards, and requests for a judgement, are not included. A request belongs to one
        conversation, even if another has the same tokens, by its stream."""
        has_streams = self.config.actor_rollout_ref.rollout.workflow is not None
        record = self.record_of(sample)
        requests = self.requests(sample)
        found = dict[int, RecordedTurn]()
        for talk in conversations_of(sample):
            stream = (
                record.prompt_group.stream + f"/fork {talk.name}" * bool(talk.name)
                if record
                else ""
            )
            for request, made in requests:
                if has_streams and request.stream.name != stream:
                    continue
                start = talk.first + (before := len(request.prompt_ids))
                end = start + sum(takewhile(bool, map(eq, talk.ids[before:], made.token_ids)))
                is_longer = end > (found[start].end if start in found else start)
                if (
                    start >= max(talk.first, 0)
                    and is_longer
                    and talk.ids[:before] == list(request.prompt_ids)
                ):
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

    def is_ours(self, column: str, known: Sequence[Callable[..., object]] = ()) -> bool:
        """Whether a built-in node, or one of the `known` functions, writes the column, so that its
        expected content is known. A workflow itself decides what is said and, unless it is in
        `SCORES_LAST_REPLY`, which parts the score has; the score is what it returned."""
        workflow = self.config.actor_rollout_ref.rollout.workflow
        is_scored = column == "scores" or (
            column in ("reward_parts", "acc") and workflow in SCORES_LAST_REPLY
        )
        if column in BY_WORKFLOW and workflow is not None and not is_scored:
            return False
        writers = self._writers.get(column, [])
        return bool(writers) and all(
            is_builtin(fn) or fn in map(plain_function, known) for fn in writers
        )

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
            found.append(
                (len(talk.ids) - start, replace(self.sampling(sample), **own), talk.ids[:start])
            )
        return found

    def temperatures(self, sample: Sample) -> Tensor:
        """The temperature of each response token, float64 `(tokens, 1)`."""
        found = [
            [params.temperature] * number for number, params, _ in self.sampling_of_tokens(sample)
        ]
        return torch.tensor(sum(found, []), dtype=torch.float64)[:, None]

    def limit(self, exact: Limit, rounded: Limit) -> Limit:
        """The limit for models in float32, or for a lower precision."""
        return exact if self.run.is_exact else rounded

    def place_of(self, prompt_group: PromptGroup) -> tuple[int, int]:
        """Epoch and row of a group, from its number or its position in its domain."""
        data = self.run.spec.data
        first = 0
        word = 0
        num_rows = data.num_rows
        position = prompt_group.group_id
        if data.domains:
            position = prompt_group.position
            name = prompt_group.stream.removeprefix("train/")
            word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
            for domain in data.domains:
                num_rows = domain.num_rows
                if domain.name == name:
                    break
                first += num_rows
        if num_rows == UNKNOWN_ROWS:
            window, position = divmod(position, WINDOW)
            if data.shuffle:
                position = int(shuffled(WINDOW, (data.seed, 0), (window, word))[position])
            return 0, first + window * WINDOW + position
        epoch, position = divmod(position, num_rows)
        if not data.shuffle:
            return epoch, first + position
        return epoch, first + int(shuffled(num_rows, (data.seed, 0), (epoch, word))[position])

    def updates_of(self, role: str) -> list[UpdateRecord]:
        return [update for update in self.updates if update.role == role]


def samples_of(batch: Batch) -> list[Sample]:
    """The samples of a batch, each with its own tokens only."""
    columns: dict[str, Sequence[Any]] = {}
    for name in (*batch.names, "loss_mask", "token_level_scores", "token_level_rewards"):
        if name not in batch or name in columns:
            continue
        axis = batch.field(name).axis
        flat = batch.flat(name)
        if axis in TOKEN_AXES:
            columns[name] = flat.split(batch.lengths(axis).tolist())
        else:
            columns[name] = (
                flat.tolist() if isinstance(flat, Tensor) and flat.dim() == 1 else list(flat)
            )
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch))]


def by_group_of(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(int(sample["group_index"]), []).append(sample)
    return groups


def conversations_of(sample: Sample) -> list[Conversation]:
    """The sample's conversations, in the order of its tokens."""
    prompt = sample["prompt_ids"].tolist()
    response = sample["response_ids"].tolist()
    forks = sample.get("forks", ())
    ends = [*(start for _, start in forks), len(response)]
    own = [
        Conversation(name, start, response[start:end])
        for (name, start), end in zip(forks, ends[1:], strict=True)
    ]
    return [Conversation("", -len(prompt), [*prompt, *response[: ends[0]]]), *own]


def decisions_of(sample: Sample) -> list[Sample]:
    """A sample for each decision: the tokens from its first drawn one on, and the prompt before.
    place: of its tokens in the episode's response."""
    rows = list[Sample]()
    turns = sample["turn_index"]
    for number, talk in enumerate(conversations_of(sample)):
        end = talk.first + len(talk.ids)
        start = next((place for place in range(max(talk.first, 0), end) if turns[place] >= 0), end)
        place = slice(start, end)
        own = {
            name: each[place] if isinstance(each, Tensor) else each for name, each in sample.items()
        }
        prompt = torch.tensor(talk.ids[: start - talk.first])
        images = sample.get("images") or []
        own |= {
            "prompt_ids": prompt,
            "forks": (),
            "images": images[number : number + 1],
            "place": place,
        }
        rows.append(own)
    return rows


def policies_of_conversations(config: Config, sample: Sample) -> list[str]:
    """The policy of each of the sample's conversations, by the config; empty names if all have one
    policy."""
    return [policy_of_conversation(config, talk.name) for talk in conversations_of(sample)]


def own_tokens(config: Config, sample: Sample, policy: str) -> Tensor:
    """bool, for each token of the response: whether it is in a conversation of the policy. With one
    policy, all are."""
    own = torch.ones(len(sample["response_ids"]), dtype=torch.bool)
    if not policies_of_agents(config):
        return own
    for talk, owner in zip(
        conversations_of(sample), policies_of_conversations(config, sample), strict=True
    ):
        own[max(talk.first, 0) : talk.first + len(talk.ids)] = owner in ("", policy)
    return own


def index_of(sample: Sample) -> int:
    """The sample's position in its group."""
    return int(str(sample["uid"]).split("-")[1])


@lru_cache(maxsize=16)
def shuffled(num: int, key: tuple[int, int], counter: tuple[int, int]) -> NDArray[np.intp]:
    """The order of `num` sorted raw Philox words."""
    words = np.random.Philox(
        key=np.array(key, np.uint64), counter=np.array([0, 0, *counter], np.uint64)
    )
    return np.argsort(words.random_raw(num), kind="stable")
