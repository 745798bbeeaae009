"""What is done before and after each optimizer step, whoever takes it."""

from dataclasses import dataclass

from distflow.audit.auditor import Auditor
from distflow.checks.live import LiveChecks
from distflow.data.batch import Batch
from distflow.observe.writing.timing import PhaseTimer
from distflow.runtime import fault_injection
from distflow.training.engine import LossFn, TrainEngine


@dataclass
class Updates:
    """It holds no worker, which so goes with its last user."""

    checks: LiveChecks
    auditor: Auditor
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
        """See `LiveChecks.updated`."""
        self.checks.updated(role, engine, batch, metrics, step, first)
        self._num_unsent += int(role == "actor" and not metrics.get("skipped"))
        with self.phases("audit"):
            self.auditor.after_update(role, metrics)

    def since_sent(self) -> bool:
        """Whether the policy was updated since this was asked last."""
        unsent, self._num_unsent = self._num_unsent, 0
        return unsent > 0
