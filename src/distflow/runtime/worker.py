"""One process of a run: what its rank's plan names, with the experience plane on an asyncio thread and the learning
plane on this one."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.flow.edge import Exhausted
from distflow.flow.ticket import Version
from distflow.graph import NodeStatus
from distflow.observe.metrics import Measured
from distflow.observe.timing import PhaseTimer
from distflow.runtime.audit.auditor import Auditor, make_auditor
from distflow.runtime.checkpoint import CheckpointStore
from distflow.runtime.checks.canary import make_canary
from distflow.runtime.checks.live import LiveChecks
from distflow.runtime.context import Contexts, NodeState
from distflow.runtime.engine_watch import STACKS
from distflow.runtime.error_share import ErrorShare, warn_of_errors
from distflow.runtime.experience import ExperiencePlane
from distflow.runtime.ports import Ports
from distflow.runtime.ports.edge import Released, Share
from distflow.runtime.publish import Publisher, receiver
from distflow.runtime.recorder import Recorder
from distflow.runtime.resources import Resources
from distflow.runtime.saved import saved_parts
from distflow.runtime.session import Session
from distflow.runtime.spec import Spec
from distflow.runtime.step import Step, compile_steps
from distflow.runtime.step_metrics import batch_metrics, group_metrics, over_ranks
from distflow.runtime.stop import StopRequest
from distflow.runtime.validation import SampleRows, Validator, held_out_loss
from distflow.training.engine import LossFn, TrainEngine


class Worker:
    """Runs its part of a program. A context manager: entered, its experience plane answers what the edge hands out."""

    def __init__(
        self,
        spec: Spec,
        rank: int,
        resources: Resources,
        ports: Ports,
        recorder: Recorder,
        store: CheckpointStore,
        stop: StopRequest,
        state: NodeState,
        version: Version,
    ) -> None:
        """state: what nodes keep across steps. version: of the weights that the resources hold."""
        plan, program = spec.plan.ranks[rank], spec.program()
        self._session = Session.of(spec, resources, spec.run_dir / STACKS)
        resources = self._session.resources
        self._spec, self._resources, self._ports = spec, resources, ports
        self._rank = ports.collective.rank  # among those that learn
        self._recorder, self._store, self._stop, self._state = recorder, store, stop, state
        self._version, self._served = version, version.step
        warn, show = partial(recorder.note, "warning"), recorder.view.verdict_failed
        self._errors = ErrorShare(spec.options.max_error_share, warn, show)
        self._checks = LiveChecks.of(spec, resources, recorder.note)
        parts = {**resources.by_name(), "reduce": ports.collective}
        self._learning = compile_steps([program.node(name) for name in plan.learning], parts)
        self._auditor = make_auditor(spec, program, self._learning, resources, self._session, recorder, state, version)
        updates = _Updates(self._checks, self._auditor, recorder.phases)
        self._contexts = Contexts(spec.config, resources, state, updates.before, updates.after)
        self._experience = ExperiencePlane.of(
            spec,
            [program.node(name) for name in plan.experience],
            resources,
            self._contexts,
            recorder.group_ended,
            self._auditor.witness,
        )
        stop_token_ids, say = resources.stop_token_ids, partial(recorder.note, "warning")
        self._validator = Validator(
            spec.validation, self._contexts, self._experience, stop_token_ids, spec.options.seed, say
        )
        self._generates = any("rollout" in rank.engines for rank in spec.plan.ranks)  # some worker, if not this
        self._publisher = self._make_publisher()
        self._validated_at = self._saved_at = version.step
        self._released: Released | None = None
        self.status = {step.node.node_id: NodeStatus.PENDING for step in self._learning}

    def __enter__(self) -> "Worker":
        """Start services and engine, publish the first version, validate if asked, let the experience plane run."""
        with ExitStack() as stack:
            stack.enter_context(self._session)
            if self._resources.rollout is not None:
                self._ports.weights.attach(receiver(self._resources.rollout, self._session))
            if self._learning:
                self._recorder.started(self._version.step, self._publish(self._version, at_start=True))
                if self._spec.options.val_before_train and self._version.step == 0:
                    self._validate(0)
            if self._experience.steps:
                experience = self._session.start(self._experience.loop(self._ports.edge))
                experience.add_done_callback(self._experience_ended)
            self._leave = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.__exit__(kind, error, trace)

    def learning_loop(self) -> int:
        """consumes steps · waits until one is complete · unblocked by the experience plane · produces versions

        Returns the steps consumed in all.
        """
        step, edge = self._version.step, self._ports.edge
        while not self._stop.wanted:
            share = self._take(step)
            judged = self._errors.step(self._experience.tally.take(), step + 1)
            if share is None:
                self._end(step)
                return step
            batch, times, measured = share.batch, dict[str, float](), list[Measured]()
            self._checks.taken(batch, self._served if self._generates else None)
            self._auditor.took(step, share.tickets, batch)
            for compiled in self._learning:
                with self._running(compiled, times):
                    ctx = self._contexts.learning(step, share.tickets, compiled.node.node_id)
                    batch, part = compiled(batch, ctx)
                measured.append(part)
                self._auditor.scored(batch)
            metrics = {
                **share.metrics,
                **over_ranks(measured, self._ports.collective),
                **times,
                **self._take_reward_counts(),
                **judged,
            }
            metrics |= self._checks.learned(batch, metrics, step)
            with self._recorder.phases("audit"):
                self._auditor.end(metrics)
            published = (step + 1) % self._spec.options.update_frequency == 0
            if published:
                with self._recorder.phases("update_weights"):
                    metrics |= self._publish(Version(self._version.incarnation, step + 1))
            released = edge.release(step, self._rank, published)
            self._after_step(released, batch, metrics)
            self._released, step = released, released.version.step
        return step

    def _take(self, step: int) -> Share | None:
        """This rank's share of the step, or None where there is none."""
        try:
            with self._recorder.phases("rollout"):
                return self._ports.edge.take(step, self._rank)
        except Exhausted:
            self._errors.step(self._experience.tally.take(), step + 1)  # which may be why
            raise

    @contextmanager
    def _running(self, compiled: Step, times: dict[str, float]) -> Iterator[None]:
        """Its status, and its time in seconds (`perf/NODE`) where `dag.enable_perf` is on."""
        name, started = compiled.node.node_id, time.perf_counter()
        if compiled is self._learning[0]:
            self.status = dict.fromkeys(self.status, NodeStatus.PENDING)
        self.status[name] = NodeStatus.RUNNING
        try:
            with self._recorder.phases(compiled.node.phase):
                yield
        except BaseException:
            self.status[name] = NodeStatus.FAILED
            raise
        self.status[name] = NodeStatus.COMPLETED
        if self._spec.options.enable_perf:
            times[f"perf/{name}"] = time.perf_counter() - started

    def _after_step(self, released: Released, batch: Batch, metrics: dict[str, float]) -> None:
        """Validate, record and save a step; nothing is generated meanwhile, so that a validation has the engine to
        itself. Recorded before it is saved: a run resumed from here has the metrics of all its steps.

        A stop saves, if saving is not off, and validates only where that was due anyhow.
        """
        options, step, finished = self._spec.options, released.version.step, released.finished
        compares = options.keep_best is not None and _is_due(step, options.save_freq, finished)
        validated = self._validate(step) if _is_due(step, options.test_freq, finished) or compares else {}
        metrics |= batch_metrics(batch) | group_metrics(released.account, batch, step - 1)
        metrics |= self._recorder.phases.finish_step() | self._recorder.memory.finish_step()
        metrics["throughput/tokens_per_s"] = float(batch.lengths("sequence").sum()) / metrics["timing_s/step"]
        self._recorder.training_step(step, metrics, batch)
        self._recorder.keep_groups(step, batch)
        if _is_due(step, options.save_freq, finished or self._stop.wanted):
            self._save(released, validated)

    def _end(self, step: int) -> None:
        """No group of the last rows came through, so that the step before, the run's `step`-th, had been the last."""
        options = self._spec.options
        validated = self._validate(step) if options.test_freq > 0 and self._validated_at < step else {}
        if options.save_freq > 0 and self._saved_at < step:
            assert self._released is not None, "a step that is not saved yet was released"
            self._save(self._released, validated)

    def _publish(self, version: Version, at_start: bool = False) -> dict[str, float]:
        self._served = version.step
        return self._publisher.publish(version, at_start) if self._publisher is not None else {}

    def _experience_ended(self, experience: "Future[None]") -> None:
        """Whatever ends that plane must wake the learner, which else waits for groups that nobody makes.

        Called on the asyncio thread, or by whoever ends it: `abort` may be called on any. A loop that was told of a
        failure ends without one; it has nothing to tell.
        """
        error = CancelledError() if experience.cancelled() else experience.exception()
        if error is not None:
            self._ports.abort(error)

    def _validate(self, step: int) -> dict[str, float]:
        """The metrics; none where there is nothing to validate on, or another worker generates."""
        self._validated_at = step
        if not self._spec.validation or (self._generates and self._resources.rollout is None):
            return {}
        rows: SampleRows = []
        with self._recorder.phases("eval"):
            if not self._generates:
                assert self._resources.actor is not None, "who validates has an engine"
                metrics = held_out_loss(self._spec.validation, self._resources.actor)
            else:
                metrics, rows = self._session.call(self._validator.run(step))
                self._take_reward_counts()  # not of the next step: `val/errors` has them
                warn_of_errors(self._experience.tally.take(), partial(self._recorder.note, "warning"))
        if self._spec.options.keep_best is not None:
            _score(self._spec.options.keep_best, metrics)
        self._recorder.validation(step, metrics, rows)
        return metrics

    def _take_reward_counts(self) -> dict[str, float]:
        return self._resources.judge.take_counts() if self._resources.judge is not None else {}

    def _save(self, released: Released, validated: Mapping[str, float]) -> None:
        """validated: the metrics of these very weights, of which `keep_best` compares one."""
        step, best = released.version.step, self._spec.options.keep_best
        self._saved_at = step
        metric = _score(best, validated) if best is not None and validated else None
        with self._recorder.phases("save"):
            writing = self._store.begin(step)
            names = []
            for name, part in saved_parts(self._spec, self._resources, released, self._state):
                writing.write(name, part)
                names.append(name)
            path = writing.commit(names, metric)
        self._recorder.saved(step, path)

    def _make_publisher(self) -> Publisher | None:
        """None where nothing is trained here, or no worker generates."""
        actor = self._resources.actor
        if actor is None or not self._generates:
            return None
        canary = make_canary(self._spec, self._resources) if self._resources.rollout is not None else None
        sends, dtype = self._spec.sends_weights, self._spec.weight_dtype
        return Publisher(actor, self._ports.weights, dtype, sends=sends, canary=canary, session=self._session)


@dataclass(frozen=True)
class _Updates:
    """What is done before and after each optimizer step; it holds no worker, which so goes with its last user."""

    checks: LiveChecks
    auditor: Auditor
    phases: PhaseTimer

    def before(self, role: str, engine: TrainEngine, batch: Batch, loss: LossFn) -> LossFn:
        with self.phases("audit"):
            return self.auditor.before_update(role, engine, batch, loss)

    def after(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int, first: bool
    ) -> None:
        self.checks.updated(role, engine, batch, metrics, step, first)
        with self.phases("audit"):
            self.auditor.after_update(role, metrics)


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
