"""The spec that is sent to workers: plain data and picklable factories, no live objects. Made from
the config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import agent_sampling
from distflow.config.keys.trainer import SlurmConfig
from distflow.data.encoded_prompts import PromptRow
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.observe.writing.trackers import check_trackers
from distflow.planning.plan import Plan, RankPlan
from distflow.rollout.engine import SamplingParams
from distflow.runtime.rollout_loop.user_calls import Callbacks
from distflow.scheduling.coordinator import DataPlan


class Get:
    """Returns a part of the worker being built, by name; builds it on first use."""

    def __init__(
        self, factories: Mapping[str, "Factory"], rank: RankPlan, ready: Mapping[str, object]
    ) -> None:
        self._factories = factories
        self.rank = rank
        self._device = torch.device(rank.device)
        self._built: dict[str, object] = dict(ready)

    def __call__(self, name: str) -> Any:  # each name has its own type
        """Raises KeyError for an unknown part, UserError if it cannot be built."""
        if name not in self._built:
            self._built[name] = self._factories[name](self, self._device)
        return self._built[name]

    def planned(self, name: str) -> bool:
        return name in self.rank.engines


Factory = Callable[[Get, torch.device], object]
"""Builds one part of a worker from others. To be picklable, it is a `functools.partial` of a
module's function over plain values and further partials."""


@dataclass(frozen=True)
class ValidationSet:
    """Validation prompts, and the parameters of greedy responses (None for none) and of
    `num_samples` sampled ones."""

    name: str
    rows: Sequence[PromptRow]
    greedy: SamplingParams | None
    sampled: SamplingParams | None = None
    num_samples: int = 0


@dataclass(frozen=True)
class WorkerNeeds:
    """Resources of each worker's process, and its environment variables. memory_mb: None for what a
    worker without a model needs. num_reward_actors, reward_cpus: actors that run reward functions,
    and the CPUs of each. roles: overrides for workers that only generate (`rollout`), for all
    others (`training`), and for workers with an engine, by its name."""

    cpus: int = 1
    memory_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    num_reward_actors: int = 0
    reward_cpus: int = 1
    roles: Mapping[str, "WorkerNeeds"] = field(default_factory=dict)

    def of(self, rank: RankPlan) -> "WorkerNeeds":
        names = [*rank.engines, "training"] if rank.training_nodes else ["rollout"]
        own = [
            self.roles[name]
            for name in names
            if name in self.roles and (name != "rollout" or len(names) == 1)
        ]
        return own[0] if own else self


@dataclass(frozen=True)
class Offloads:
    """The parts of an engine that are in host memory while it is idle."""

    weights: bool
    moments: bool


@dataclass(frozen=True)
class RunOptions:
    """The keys of `trainer`, `trust` etc. that control a run. A frequency of 0 or less means never.

    update_frequency: of weight syncs, in steps. canary_freq: in weight syncs. audit_freq: in steps.
    keep_last: checkpoints, None for all. keep_best: the metric by which the best one is also kept.
    max_held_mb: in total; None for half of the smallest store. timeout_s: of a sync node function
    of the rollout loop, per sample. engine_timeout_s: None for no limit. solution_columns: by
    domain, "" for all others: the columns of reference solutions (None if the rewards know it) and
    ground truths. offloads: by role of the engine.
    """

    seed: int
    update_frequency: int
    weight_update_mode: str
    val_before_train: bool
    keep_last: int | None
    keep_best: str | None
    save_hf_model: bool
    save_groups: str
    save_groups_last: int
    logger: tuple[str, ...]
    webhook: str | None
    resume: str
    run_dir: Path
    project: str
    experiment: str
    enable_perf: bool
    worker: WorkerNeeds
    max_restarts: int
    slurm: SlurmConfig
    max_held_mb: int | None
    peers_timeout_s: float
    timeout_s: float
    engine_timeout_s: float | None
    canary_freq: int
    audit_freq: int
    profiled_steps: tuple[int, ...]
    on_mismatch: str
    run_startup_checks: bool
    solution_columns: Mapping[str, tuple[str | None, str]]
    max_error_rate: float
    max_skipped: int
    unmoved_after: int
    offloads: Mapping[str, Offloads]
    free_cache_engine: bool


@dataclass(frozen=True)
class Outcome:
    """steps: consumed in total. signal: the number of the signal that asked the run to end, or
    None. stopped: whether it stopped early. report: the run's report. judgements: its first ones.
    saved: the newest checkpoint.

    accuracy_before, accuracy_after: on validation problems, before the first step and at the end,
    if measured.
    """

    steps: int
    signal: int | None
    stopped: bool
    report: Path
    accuracy_before: float | None
    accuracy_after: float | None
    judgements: tuple[str, ...] = ()
    saved: Path | None = None

    def lines(self) -> list[str]:
        lines = [*self.judgements, f"saved: {self.saved or 'no checkpoint (trainer.save_freq)'}"]
        before = self.accuracy_before
        after = self.accuracy_after
        if before is not None and after is not None:
            lines += [f"accuracy before RL: {before:.2f}", f"accuracy after RL: {after:.2f}"]
        return [*lines, f"report: {self.report}"]


@dataclass(frozen=True)
class Spec:
    """A run, ready to be sent to its workers.

    text: the resolved config as YAML. pipeline: builds and binds the pipeline. factories: of
    engines and services, by name; a worker calls those that its part of the plan needs. plan: which
    rank runs which nodes with which engines. rows, validation: encoded in the run's folder, read
    when used. sampling: without the stop tokens, which the worker's model and tokenizer define.
    sampling_of: the same by domain. weight_dtype: of the rollout engine's weights. shares_weights:
    an engine on the trainer's worker may compute on its storage. sends_weights: False if it then
    needs no tensors (an adapter is applied unmerged). tolerance: how far engine and trainer may
    differ in log-probs. ratio_limit: mean |log ratio| allowed before a step's first update.
    loss_terms: metrics of the contribution of each active loss term. facts: must be the same in a
    resumed run and its checkpoint. description: the head of the report. predicted: what a plan says
    of the run, as in plan.json. num_left_out: unused rows of "train" and "val DOMAIN". warnings:
    found before the start, e.g. about validation rows that are trained on.
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
    predicted: Mapping[str, Any] = field(default_factory=dict)
    sampling_of: Mapping[str, SamplingParams] = field(default_factory=dict)
    num_left_out: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def temperature_of_agent(self, agent: str) -> float:
        """In training. agent: its name, empty for the first one."""
        return agent_sampling(self.config, agent).get("temperature", self.sampling.temperature)

    @property
    def run_dir(self) -> Path:
        return self.options.run_dir

    def check_can_train(self) -> None:
        """Raises UserError if the rollout engine cannot load weights, a tracker is not installed,
        or the webhook is no address."""
        check_trackers(self.options.logger, self.options.webhook)
        name = self.config.actor_rollout_ref.rollout.name
        if self.plan.generates and not ROLLOUT_ENGINES[name].takes_weights:
            can_train = [name for name, entry in ROLLOUT_ENGINES.items() if entry.takes_weights]
            raise UserError(
                f"actor_rollout_ref.rollout.name={name} is for `distflow eval`: its server takes "
                "no weights. To train, "
                f"set it to one of {', '.join(can_train)}"
            )


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is launched. allow_change: config keys that may differ from the checkpoint's. say:
    called with one-line progress messages. embedded: in a process that continues afterwards, e.g. a
    notebook's, where a second signal raises KeyboardInterrupt instead of ending it."""

    allow_change: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda line: None
    callbacks: Callbacks = Callbacks()
    embedded: bool = False


LAUNCH_DEFAULTS = LaunchOptions()


class Launch(Protocol):
    def __call__(self, spec: Spec, options: LaunchOptions = LAUNCH_DEFAULTS) -> Outcome | None:
        """Run to the end, or to the first signal; None if a job elsewhere runs it.

        `spec.options.resume` says where it starts. Raises UserError for a checkpoint that does not
        fit, or a folder that is unwritable or in use by another run; TrustError if a check fails;
        NoProgress, NodeError.
        """
