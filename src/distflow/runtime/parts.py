"""What a worker is made of: plain values, built in `pipelines` from the config, so that the runtime knows no class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.prompts import PromptRow
from distflow.flow.data_plan import DataPlan
from distflow.graph import Program
from distflow.rewards.router import RewardRouter
from distflow.rollout.engine import RolloutEngine, SamplingParams
from distflow.runtime.checks.mismatch import Tolerance
from distflow.runtime.weight_edge import Weights
from distflow.training.engine import TrainEngine


@dataclass(frozen=True)
class ValidationSet:
    """Held-out prompts, how each is answered greedily (None: is not), and how by sampling, `num_samples` times."""

    name: str
    rows: Sequence[PromptRow]
    greedy: SamplingParams | None
    sampled: SamplingParams | None = None
    num_samples: int = 0


class Scorer(Protocol):
    """An engine that is never trained: the reference."""

    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """As a train engine's."""
        ...


@dataclass(frozen=True)
class Engines:
    """The engines that the program uses; those that it does not are None and were never built."""

    actor: TrainEngine
    critic: TrainEngine | None = None
    ref: Scorer | None = None
    rollout: RolloutEngine | None = None

    def by_name(self) -> dict[str, Any]:
        found = {"actor": self.actor, "critic": self.critic, "ref": self.ref, "rollout": self.rollout}
        return {name: engine for name, engine in found.items() if engine is not None}

    def trained(self) -> dict[str, TrainEngine]:
        """Those whose state belongs in a checkpoint."""
        return {"actor": self.actor, **({"critic": self.critic} if self.critic is not None else {})}


@dataclass(frozen=True)
class Parts:
    """A run, ready to be started.

    run_dir: the run's folder. config_yaml: the resolved config as text. facts: what a checkpoint must agree with
    when it is resumed (fingerprints of data and tokenizer, versions, threads). description: the head of its report.
    rewards: None where the program judges nothing. published: the tensors that a publish sends to the rollout engine.
    weight_dtype: of the rollout engine's weights; shares_weights: it computes on the trainer's own.
    ratio_limit: mean |log ratio| allowed before a step's first update. placement: which rank runs which nodes, as JSON.
    loss_terms: metrics that hold what each loss term that is on contributes.
    """

    config: Config
    config_yaml: str
    run_dir: Path
    program: Program
    plan: DataPlan
    engines: Engines
    tokenizer: Any
    train_rows: Sequence[PromptRow]
    sampling: SamplingParams
    validation: Sequence[ValidationSet] = ()
    rewards: RewardRouter | None = None
    published: Weights = tuple
    weight_dtype: torch.dtype = torch.float32
    shares_weights: bool = True
    tolerance: Tolerance = field(default_factory=lambda: Tolerance.of(exact=True))
    ratio_limit: float = 1e-4
    loss_terms: tuple[str, ...] = ()
    placement: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)
