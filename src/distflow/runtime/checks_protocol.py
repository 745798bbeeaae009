"""The protocols of a run's checks: their calls, and when these are made. `launch` builds the
implementation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.observe.writing.timing import PhaseTimer
from distflow.rollout.engine import GenerateRequest
from distflow.runtime import fault_injection
from distflow.runtime.sample_queue.protocol import LoadedGroups, ResumePoint
from distflow.runtime.sample_rows import SampleRows
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import LossFn, TrainEngine

CHECK_STATE = "trust.checks"
"""Key of the checks' state in the node state; node ids have no dots."""


class GroupRecorder(Protocol):
    """Records a prompt group's engine requests and their results, in the task of that group."""

    def begin(self, prompt_group: PromptGroup) -> None:
        """From here on the running task works for this group."""

    def generated(self, request: GenerateRequest, result: tuple[Segment, ...]) -> None:
        """The engine has returned a result."""

    def keep(self, batch: Batch | None = None) -> None:
        """The running task's group goes to the sample queue. Records of other groups are discarded
        with their tasks. batch: its columns; None in validation."""

    def keep_loaded(self, loaded: LoadedGroups[Batch]) -> None:
        """Groups that were loaded together, without tasks, go to the sample queue."""


class RunChecks(Protocol):
    """The checks of every step, and of steps that are checked whole. A failed check raises
    TrustError; a suspicion is noted."""

    def loop_begins(self) -> None:
        """The training loop begins; nothing has been generated, drawn or trained since the
        start."""

    def state_saved(
        self, nodes: Mapping[str, Any], point: ResumePoint[Batch] | None
    ) -> dict[str, Any]:
        """Describes this worker's memory as JSON, for the checkpoint being written. nodes: their
        state. point: of the sample queue, on the first rank."""

    def step_taken(
        self,
        step: int,
        group_ids: Sequence[int],
        batch: Batch,
        synced_version: int | None,
    ) -> None:
        """A step has left the sample queue. group_ids: of all ranks. synced_version: of the last
        weight sync; None if nothing generates."""

    def node_finished(self, batch: Batch) -> None:
        """A node of the training loop has run."""

    def before_update(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        """The loss function to call in this optimizer step: `loss`, or a wrapper that records its
        calls."""

    def after_update(
        self,
        role: str,
        engine: TrainEngine,
        batch: Batch,
        metrics: dict[str, float],
        step: int,
        first: bool,
    ) -> None:
        """An optimizer step was taken or skipped. first: whether it is the first of its training
        step."""

    def step_trained(self, batch: Batch, metrics: dict[str, float], step: int) -> dict[str, float]:
        """All nodes of the step have run. Returns additional metrics, reduced over all ranks."""

    def part_validated(self, rows: SampleRows) -> SampleRows:
        """This worker has validated its part. Returns what `validated` needs of each sample.
        Callable on any thread."""

    def validated(self, step: int, rows: SampleRows, metrics: Mapping[str, float]) -> None:
        """A validation after `step` steps. rows: of all workers. Called on the ranks that have the
        metrics."""


@dataclass
class Updates:
    """Runs the checks before and after each optimizer step, from wherever it is taken.

    It does not reference the worker, so that the worker can be freed. critic: None if the worker
    trains none.
    """

    checks: RunChecks
    phases: PhaseTimer
    critic: TrainEngine | None
    _num_unsent: int = 0

    def before(self, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        """The loss function that the optimizer step is to call."""
        fault_injection.reach("train.update")
        with self.phases("check"):
            return self.checks.before_update(self._role(engine), engine, batch, loss)

    def after(
        self, engine: TrainEngine, batch: Batch, metrics: dict[str, float], first: bool, step: int
    ) -> None:
        """first: whether it was the engine's first optimizer step of the training step."""
        role = self._role(engine)
        self._num_unsent += int(role != "critic" and not metrics.get("skipped"))
        with self.phases("check"):
            self.checks.after_update(role, engine, batch, metrics, step, first)

    def _role(self, engine: TrainEngine) -> str:
        """The role of an engine; with several policies, the policy's name."""
        if engine is self.critic:
            return "critic"
        return getattr(engine, "policy", "actor")

    def since_sent(self) -> bool:
        """Whether the policy was updated since the last call."""
        unsent = self._num_unsent
        self._num_unsent = 0
        return unsent > 0
