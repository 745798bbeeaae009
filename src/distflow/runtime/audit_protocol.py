"""What a run tells its checks and its audit, and when: one protocol each. `launch` builds what stands behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from distflow.data.batch import Batch
from distflow.observe.writing.timing import PhaseTimer
from distflow.rollout.engine import GenerateRequest, GenerateResult
from distflow.runtime import fault_injection
from distflow.scheduling.groups import PromptGroup
from distflow.training.collective import Collective
from distflow.training.engine import LossFn, TrainEngine

AUDIT_STATE = "trust.audit"
"""The place of the audit's state among what nodes keep: no node's id has a dot."""


class GroupRecorder(Protocol):
    """Records what the engine was asked for a prompt group, and what it returned, in the task of that group."""

    def begin(self, prompt_group: PromptGroup) -> None:
        """From here on the running task works for this group."""

    def generated(self, request: GenerateRequest, result: GenerateResult) -> None:
        """The engine has returned a result."""

    def keep(self) -> None:
        """The running task's group goes to the sample queue; records of all others are forgotten with their tasks."""


class StepChecks(Protocol):
    """What is checked in every step. Failures raise TrustError; doubts are noted."""

    def taken(self, batch: Batch, step: int, served: int | None) -> None:
        """A step has left the sample queue. served: the step of the weights that were sent last, None where nothing
        generates."""

    def updated(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int, first: bool
    ) -> None:
        """An optimizer step was taken or skipped; `first` of its training step."""

    def learned(
        self, batch: Batch, metrics: dict[str, float], step: int, reduce: Collective | None = None
    ) -> dict[str, float]:
        """All nodes of a step have run; returns more metrics, over all ranks."""


class StepAuditor(Protocol):
    """Proves some steps again from what was recorded of them. Raises TrustError where one was computed wrongly."""

    def took(self, step: int, group_ids: Sequence[int], batch: Batch, served: int | None) -> None:
        """A step has left the sample queue; see `StepChecks.taken`. group_ids: of all ranks."""

    def scored(self, batch: Batch) -> None:
        """A node of the training loop has run."""

    def before_update(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        """The loss function to call in this optimizer step: `loss`, or one that is watched."""

    def after_update(self, role: str, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken or skipped."""

    def end(self, metrics: Mapping[str, float]) -> None:
        """All nodes of the step have run."""


@dataclass
class Updates:
    """What is done before and after each optimizer step, whoever takes it.

    It holds no worker, which so goes with its last user.
    """

    checks: StepChecks
    auditor: StepAuditor
    phases: PhaseTimer
    _num_unsent: int = 0

    def before(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        """The loss that the step is to compute."""
        fault_injection.reach("train.update")
        with self.phases("audit"):
            return fault_injection.in_backward(self.auditor.before_update(role, engine, batch, loss))

    def after(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int, first: bool
    ) -> None:
        """See `StepChecks.updated`."""
        self.checks.updated(role, engine, batch, metrics, step, first)
        self._num_unsent += int(role == "actor" and not metrics.get("skipped"))
        with self.phases("audit"):
            self.auditor.after_update(role, metrics)

    def since_sent(self) -> bool:
        """Whether the policy was updated since this was asked last."""
        unsent, self._num_unsent = self._num_unsent, 0
        return unsent > 0
