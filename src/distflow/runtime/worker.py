"""One process of a run: the experience plane on an asyncio thread, the learning plane on this one."""

from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.flow.coordinator import Coordinator
from distflow.flow.ledger import Ledger
from distflow.flow.ticket import Version
from distflow.runtime.checkpoint import CheckpointStore
from distflow.runtime.checks.live import LiveChecks
from distflow.runtime.context import Contexts
from distflow.runtime.experience import ExperiencePlane
from distflow.runtime.learning import LearningPlane
from distflow.runtime.local_edge import LocalEdge
from distflow.runtime.parts import Parts
from distflow.runtime.recorder import Recorder
from distflow.runtime.saved import NodeState, saved_parts
from distflow.runtime.session import Session
from distflow.runtime.step_metrics import batch_metrics, group_metrics, memory_metrics
from distflow.runtime.stop import StopRequest
from distflow.runtime.validation import Validator, held_out_loss
from distflow.training.collective import OneRank

_NO_ROWS: list[dict[str, Any]] = []


class Worker:
    """Runs a program from a coordinator's tickets to its last step."""

    def __init__(
        self,
        parts: Parts,
        coordinator: Coordinator,
        ledger: Ledger,
        recorder: Recorder,
        checks: LiveChecks,
        store: CheckpointStore,
        stop: StopRequest,
        node_state: NodeState,
    ) -> None:
        self._parts, self._config = parts, parts.config
        self._coordinator, self._ledger, self._recorder = coordinator, ledger, recorder
        self._checks, self._store, self._stop, self._node_state = checks, store, stop, node_state
        self._edge = LocalEdge(coordinator, recorder.group_ended)
        engines, program = parts.engines.by_name(), parts.program
        self._contexts = Contexts(parts, checks.updated, node_state)
        self._experience = ExperiencePlane(
            program.experience, engines, self._contexts.training, OneRank(), self._config.reward.timeout_s
        )
        self._learning = LearningPlane(
            program.learning, engines, OneRank(), recorder.phases, self._config.dag.enable_perf
        )
        self._validator = Validator(parts.validation, self._contexts, self._experience)
        self._session = Session(parts)
        self._validated_at = self._saved_at = coordinator.step

    def run(self) -> None:
        """Start the engines, validate if asked, learn until the data ends or a stop is requested."""
        with self._session:
            compared = self._session.publish(self._coordinator.version, at_start=True)
            self._recorder.started(self._coordinator.step, compared)
            if self._config.trainer.val_before_train and self._coordinator.step == 0:
                self._validate(0)
            experience = self._session.start(self._experience.loop(self._edge))
            experience.add_done_callback(self._experience_ended)
            self.learning_loop()
        self._note_early_end()

    def learning_loop(self) -> None:
        """consumes steps · waits until one is complete · unblocked by the experience plane · produces versions"""
        while not self._stop.wanted:
            step = self._coordinator.step
            with self._recorder.phases("rollout"):
                batch = self._edge.take(step)
            if batch is None:
                self._end(step)
                return
            counts = self._take_reward_counts()
            self._checks.taken(batch)
            batch, metrics = self._learning.run(batch, partial(self._contexts.learning, step))
            metrics |= counts | self._checks.learned(batch, metrics, step)
            published = (step + 1) % self._config.actor_rollout_ref.actor.model_update_frequency == 0
            if published:
                with self._recorder.phases("update_weights"):
                    metrics |= self._session.publish(Version(self._coordinator.version.incarnation, step + 1))
            self._edge.release(step, published)
            self._after_step(step + 1, batch, metrics)
            self._edge.go_on()

    def _after_step(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Validate, record and save step number `step`, counted from 1; training groups wait, so that a validation has
        the engine to itself. Recorded before it is saved: a run resumed from here has the metrics of all its steps.

        A stop saves, if saving is not off, and validates only where that was due anyhow.
        """
        trainer, finished = self._config.trainer, self._coordinator.finished
        compares = trainer.keep_best and _is_due(step, trainer.save_freq, finished)
        validated = self._validate(step) if _is_due(step, trainer.test_freq, finished) or compares else {}
        self._record(step, batch, metrics)
        if _is_due(step, trainer.save_freq, finished or self._stop.wanted):
            self._save(step, validated)

    def _end(self, step: int) -> None:
        """No group of the last rows came through, so that the step before, the run's `step`-th, had been the last."""
        trainer = self._config.trainer
        validates = trainer.test_freq > 0 and self._validated_at < step
        validated = self._validate(step) if validates else {}
        if trainer.save_freq > 0 and self._saved_at < step:
            self._save(step, validated)

    def _record(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """The metrics and samples of step number `step`, counted from 1."""
        metrics |= batch_metrics(batch) | group_metrics(self._coordinator.accounting(), batch, step - 1)
        metrics |= memory_metrics() | self._recorder.phases.finish_step()
        metrics["throughput/tokens_per_s"] = float(batch.lengths("sequence").sum()) / metrics["timing_s/step"]
        self._recorder.training_step(step, metrics, batch)
        self._recorder.keep_groups(step, batch)

    def _experience_ended(self, experience: "Future[None]") -> None:
        """Whatever ends that plane must wake the learner."""
        error = CancelledError() if experience.cancelled() else experience.exception()
        if error is not None:
            self._edge.fail(error)

    def _note_early_end(self) -> None:
        """Groups that were dropped leave their steps to others, and so a run may have fewer than were planned."""
        done, planned = self._coordinator.step, self._coordinator.plan.total_steps
        if done < planned and not self._stop.wanted:
            dropped = ", ".join(f"{n} {reason}" for reason, n in self._coordinator.accounting().dropped.items())
            self._recorder.note(
                "info", f"the data ended after {done} of {planned} steps: groups were dropped ({dropped})"
            )

    def _validate(self, step: int) -> dict[str, float]:
        """The metrics; none where there is nothing to validate on."""
        self._validated_at = step
        if not self._parts.validation:
            return {}
        with self._recorder.phases("eval"):
            if self._parts.engines.rollout is None:
                metrics, rows = held_out_loss(self._parts.validation, self._parts.engines.actor), _NO_ROWS
            else:
                metrics, rows = self._session.call(self._validator.run(step))
                self._take_reward_counts()  # not of the next step: `val/errors` has them
        if self._config.trainer.keep_best:
            _score(self._config.trainer.keep_best_metric, metrics)
        self._ledger.append("validated", step=step, metrics=metrics)
        self._recorder.validation(step, metrics, rows)
        return metrics

    def _take_reward_counts(self) -> dict[str, float]:
        return self._parts.rewards.take_counts() if self._parts.rewards is not None else {}

    def _save(self, step: int, validated: dict[str, float]) -> None:
        """validated: the metrics of these very weights, of which `keep_best` compares one."""
        self._saved_at = step
        trainer = self._config.trainer
        metric = _score(trainer.keep_best_metric, validated) if trainer.keep_best and validated else None
        with self._recorder.phases("save"):
            parts = saved_parts(self._parts, self._coordinator, self._node_state)
            writing = self._store.begin(step)
            for name, part in parts.items():
                writing.write(name, part)
            path = writing.commit(parts, metric)
        self._recorder.folder.event("checkpoint", f"saved {path.name}", step=step)


def _score(name: str, validated: Mapping[str, float]) -> float:
    """What `keep_best` compares, higher being better; of a loss its negative. Raises UserError for an unknown name."""
    if name not in validated:
        raise UserError(
            f"trainer.keep_best_metric={name} is nothing that the validation measures; "
            f"choose one of {', '.join(sorted(validated))}"
        )
    return -validated[name] if name.endswith("loss") else validated[name]


def _is_due(step: int, frequency: int, last: bool) -> bool:
    return frequency > 0 and (last or step % frequency == 0)
