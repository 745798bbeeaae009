"""What travels to a worker: plain data and picklable factories, no live object. `pipelines` makes it of the config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from distflow.algorithms.mismatch import Tolerance
from distflow.config import Config
from distflow.data.prompts import PromptRow
from distflow.graph import BoundPipeline
from distflow.planning.plan import Plan
from distflow.rollout.engine import SamplingParams
from distflow.runtime.offload import Offloads
from distflow.runtime.user_calls.sync_calls import Callbacks
from distflow.scheduling.coordinator import DataPlan


class Get(Protocol):
    """Gives a part of the worker that is being built by its name; builds it where it is not there yet."""

    def __call__(self, name: str) -> Any:  # each name stands for a type of its own
        """Raises KeyError where there is no such part, UserError where it cannot be built."""
        ...

    def planned(self, name: str) -> bool:
        """Whether the plan gives this worker that engine."""
        ...


Factory = Callable[[Get, torch.device], object]
"""Builds one part of a worker from the others: a `functools.partial` of a module's function over plain values and
partials of other such functions, so that it pickles."""


@dataclass(frozen=True)
class ValidationSet:
    """Validation prompts, how each is answered greedily (None: is not), and how by sampling, `num_samples` times."""

    name: str
    rows: Sequence[PromptRow]
    greedy: SamplingParams | None
    sampled: SamplingParams | None = None
    num_samples: int = 0


@dataclass(frozen=True)
class WorkerNeeds:
    """What each worker's process takes of its machine, and its environment variables. memory_mb: None is what one takes
    that holds no model yet. num_reward_actors, reward_cpus: actors that hold verifiers, and what each of them takes."""

    cpus: int = 1
    memory_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    num_reward_actors: int = 0
    reward_cpus: int = 1


@dataclass(frozen=True)
class RunOptions:
    """The keys of `trainer`, `trust` and the like that steer a run. A frequency of 0 or less is never.

    test_freq, save_freq, update_frequency: in steps; the last is of weights that are sent to the engine.
    weight_update_mode: "store" or "disk", how they go to workers that only generate. canary_freq: in such sends.
    audit_freq: in steps. on_mismatch: "correct", "stop" or "warn". keep_last: checkpoints, None for all. keep_best: the
    metric of which the best one is kept besides.
    max_held_mb: of groups and columns that wait in Ray's object store, in all; None for half of the smallest store.
    save_groups_last: steps whose groups are kept where `save_groups` is "last_k". timeout_s: of a plain node function
    of the rollout loop, for each sample. engine_timeout_s: how long a rollout engine that was asked for something
    may give no sign of life; None is for ever. certify: verifiers are tried on known answers first. solution_columns:
    by domain, "" for all others: that of reference solutions (None where the rewards know it) and that of answers.
    max_error_rate: of a step's verdicts, above which the run ends. max_skipped: updates that are not finite in a row
    before the run ends. unmoved_after: updates after which a weight must have moved. offloads: by role of the engine.
    """

    seed: int
    update_frequency: int
    weight_update_mode: str
    val_before_train: bool
    test_freq: int
    save_freq: int
    keep_last: int | None
    keep_best: str | None
    save_groups: str
    save_groups_last: int
    logger: tuple[str, ...]
    launcher: str
    resume: str
    run_dir: Path
    project: str
    experiment: str
    enable_perf: bool
    worker: WorkerNeeds
    max_held_mb: int | None
    peers_timeout_s: float
    timeout_s: float
    engine_timeout_s: float | None
    canary_freq: int
    audit_freq: int
    on_mismatch: str
    run_self_check: bool
    solution_columns: Mapping[str, tuple[str | None, str]]
    max_error_rate: float
    max_skipped: int
    unmoved_after: int
    offloads: Mapping[str, Offloads]


@dataclass(frozen=True)
class Outcome:
    """steps: consumed in all. signal: the number of the one that asked the run to end, None where none came. stopped:
    by it, before the end. report: the run's report.

    accuracy_before, accuracy_after: on validation problems, before the first step and at the end, where measured.
    """

    steps: int
    signal: int | None
    stopped: bool
    report: Path
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True)
class Spec:
    """A run, ready to be sent to its workers.

    text: the resolved config as YAML. pipeline: builds and binds the pipeline. factories: of engines and services by
    name; a worker calls those that its part of the plan needs. plan: which rank runs which nodes with which engines.
    rows, validation: encoded in the run's folder, read where they are needed. sampling: without the stop tokens, which
    the worker's model and tokenizer name. sampling_of: the same of domains. weight_dtype: of the rollout engine's
    weights. shares_weights: the engine may compute on the trainer's own storage, where it is on the same worker.
    sends_weights: False where it then needs no tensor (an adapter is applied unmerged). tolerance: how far engine
    and trainer may differ in log-probs. ratio_limit: mean |log ratio| allowed before a step's first update. loss_terms:
    metrics that hold what each loss term that is on contributes. facts: what a resumed run must share with its
    checkpoint. description: the head of the report.
    """

    config: Config
    text: str
    options: RunOptions
    pipeline: Callable[[], BoundPipeline]
    factories: Mapping[str, Factory]
    plan: Plan
    data: DataPlan
    rows: Sequence[PromptRow]
    validation: tuple[ValidationSet, ...]
    sampling: SamplingParams
    weight_dtype: torch.dtype
    sends_weights: bool
    shares_weights: bool
    tolerance: Tolerance
    ratio_limit: float
    loss_terms: tuple[str, ...]
    facts: Mapping[str, object]
    description: Mapping[str, object]
    sampling_of: Mapping[str, SamplingParams] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.options.run_dir


class Launch(Protocol):
    """What a launcher is."""

    def __call__(
        self,
        spec: Spec,
        *,
        allow_change: tuple[str, ...] = (),
        say: Callable[[str], None] = lambda line: None,
        callbacks: Callbacks = Callbacks(),  # noqa: B008  immutable
        embedded: bool = False,
    ) -> Outcome:
        """Run to the end, or to the first signal.

        Where from, `spec.options.resume` says. allow_change: config keys that may differ from the checkpoint's.
        say: told one line at a time what is being loaded. embedded: in a process that goes on afterwards, a notebook's
        say, which a second signal must not end: it raises KeyboardInterrupt.
        Raises UserError for a checkpoint that does not fit, for a folder that another run uses or that cannot be
        written; TrustError where a check fails; NoProgress, NodeError.
        """
        ...
