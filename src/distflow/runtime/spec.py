"""The spec that is sent to workers: plain data and picklable factories, no live objects. Made from
the config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.config import Config, to_yaml
from distflow.config.derived_settings import agent_sampling
from distflow.data.encoded_prompts import PromptRow
from distflow.graph import BoundPipeline
from distflow.planning.plan import Plan, RankPlan
from distflow.rollout.engine import SamplingParams
from distflow.runtime.callbacks import Callbacks
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
    """Validation prompts, and how their responses are drawn."""

    name: str
    rows: Sequence[PromptRow]
    greedy: SamplingParams | None
    """None for no greedy response."""
    sampled: SamplingParams | None = None
    num_samples: int = 0
    """Of sampled responses to each prompt."""


@dataclass(frozen=True)
class WorkerNeeds:
    """Resources of each worker's process."""

    cpus: int = 1
    memory_mb: int | None = None
    """None for what a worker without a model needs."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    roles: Mapping[str, "WorkerNeeds"] = field(default_factory=dict)
    """Overrides for workers that only generate (`rollout`), for all others (`training`), and for
    workers that train or score with an engine, by its name."""

    def of(self, rank: RankPlan) -> "WorkerNeeds":
        names = ["rollout"]
        if rank.training_nodes:
            names = [*(name for name in rank.engines if name != "rollout"), "training"]

        for name in names:
            if name in self.roles:
                return self.roles[name]

        return self


@dataclass(frozen=True)
class Offloads:
    """The parts of an engine that are in host memory while it is idle."""

    weights: bool
    moments: bool


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Consumed in total."""
    signal: int | None
    """The number of the signal that asked the run to end."""
    stopped: bool
    """Whether it ended early."""
    report: Path
    accuracy_before: float | None
    """On validation problems before the first step, if measured."""
    accuracy_after: float | None
    """The same at the end."""
    judgements: tuple[str, ...] = ()
    """The first ones of the report."""
    saved: Path | None = None
    """The newest checkpoint."""

    def lines(self) -> list[str]:
        """What a person is told at the end."""
        lines = [*self.judgements, f"saved: {self.saved or 'no checkpoint (trainer.save_freq)'}"]
        before = self.accuracy_before
        after = self.accuracy_after
        if before is not None and after is not None:
            lines += [f"accuracy before RL: {before:.2f}", f"accuracy after RL: {after:.2f}"]
        return [*lines, f"report: {self.report}"]


@dataclass(frozen=True)
class Spec:
    """A run, ready to be sent to its workers: its frozen config, and what was found from it, the
    data and the model before the start."""

    config: Config
    run_dir: Path
    pipeline: Callable[[], BoundPipeline]
    """Builds and binds the pipeline."""
    factories: Mapping[str, Factory]
    """Of engines and services, by name; a worker calls those that its part of the plan needs."""
    plan: Plan
    """Which rank runs which nodes with which engines."""
    data: DataPlan
    rows: Sequence[PromptRow]
    """Training rows, encoded in the run's folder and read when used."""
    validation: tuple[ValidationSet, ...]
    sampling: SamplingParams
    """Without the stop tokens, which the worker's model and tokenizer define."""
    weight_dtype: torch.dtype
    """Of the rollout engine's weights."""
    sends_weights: bool
    """False if an engine on the trainer's storage needs no tensors (an adapter is applied
    unmerged)."""
    shares_weights: bool
    """Whether an engine on the trainer's worker may compute on its storage."""
    tolerance: Tolerance
    """How far engine and trainer may differ in log-probs."""
    ratio_limit: float
    """Mean |log ratio| allowed before a step's first update."""
    loss_terms: tuple[str, ...]
    """Metrics of the contribution of each active loss term."""
    facts: Mapping[str, object]
    """What must be the same in a resumed run and its checkpoint."""
    description: Mapping[str, object]
    """The head of the report."""
    needs: WorkerNeeds = WorkerNeeds()
    offloads: Mapping[str, Offloads] = field(default_factory=dict)
    """By role of the engine."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """What a plan says of the run, as in plan.json."""
    sampling_of: Mapping[str, SamplingParams] = field(default_factory=dict)
    """As `sampling`, by domain."""
    checks_steps: bool = True
    """False for a user's own loop, whose steps no pipeline describes."""
    warnings: tuple[str, ...] = ()
    """Found before the start, e.g. about validation rows that are trained on."""

    @property
    def text(self) -> str:
        """The resolved config as YAML."""
        return to_yaml(self.config)

    @property
    def update_frequency(self) -> int:
        """Steps between weight syncs."""
        frequency = self.config.actor_rollout_ref.actor.model_update_frequency
        return frequency if self.plan.generates else 1

    @property
    def check_freq(self) -> int:
        """Of so many steps one is checked whole; 0 for none."""
        if self.checks_steps:
            return self.config.trust.check_freq
        return 0

    @property
    def keep_last(self) -> int | None:
        """The number of recent checkpoints that are kept; None for a run that saves none."""
        if self.data.saves:
            return self.config.trainer.keep_last
        return None

    @property
    def keep_best(self) -> str | None:
        """The metric by which the best checkpoint is also kept."""
        trainer = self.config.trainer
        if trainer.keep_best:
            return trainer.keep_best_metric
        return None

    @property
    def saves_hf_model(self) -> bool:
        trains = any("actor" in rank.engines for rank in self.plan.ranks)
        return self.config.trainer.save_hf_model and bool(self.data.saves) and trains

    @property
    def tests_rewards(self) -> bool:
        """Whether the run has reward functions that are tested before it starts."""
        has_rewards = any("reward_fn" in rank.services for rank in self.plan.ranks)
        return self.config.trust.check_rewards and has_rewards

    @property
    def frees_engine(self) -> bool:
        """Whether the engine frees its memory while its worker trains."""
        settings = self.config.actor_rollout_ref.rollout
        takes_turns = self.config.async_.max_staleness == 0 and not self.plan.generating_only
        return settings.free_cache_engine and takes_turns and self.plan.generates

    def temperature_of_agent(self, agent: str) -> float:
        """In training. agent: its name, empty for the first one."""
        return agent_sampling(self.config, agent).get("temperature", self.sampling.temperature)


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is launched."""

    allow_change: tuple[str, ...] = ()
    """Config keys that may differ from the checkpoint's."""
    say: Callable[[str], None] = lambda line: None
    """Called with one-line progress messages."""
    callbacks: Callbacks = Callbacks()
    embedded: bool = False
    """In a process that continues afterwards, e.g. a notebook's, where a second signal raises
    KeyboardInterrupt instead of ending it."""


LAUNCH_DEFAULTS = LaunchOptions()


class Launch(Protocol):
    def __call__(self, spec: Spec, options: LaunchOptions = LAUNCH_DEFAULTS) -> Outcome | None:
        """Run to the end, or to the first signal; None if a job elsewhere runs it.

        `trainer.resume_mode` says where it starts. Raises UserError for a checkpoint that does not
        fit, or a folder that is unwritable or in use by another run; TrustError if a check fails;
        NoProgress, NodeError.
        """
