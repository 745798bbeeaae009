"""Reports of a run: to its folder, to the terminal and to trackers. Nothing here can end a run."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distflow.algorithms.group_filter import TOO_FEW_SCORES
from distflow.config import to_dict
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.observe.findings.step_rules import StepRules
from distflow.observe.report.activity import TRAINING
from distflow.observe.report.build import write_report
from distflow.observe.sample_files import DROPPED
from distflow.observe.writing.run_folder import RunFolder, Span
from distflow.observe.writing.terminal_lines import TerminalLines
from distflow.observe.writing.timing import COLLECTIVE, DATA, PhaseTimer, Wait, Waits
from distflow.observe.writing.trackers import TrackedRun, open_trackers
from distflow.rollout.engine import take_activity
from distflow.runtime.callbacks import Callbacks, Caller
from distflow.runtime.memory_peaks import MemoryPeaks
from distflow.runtime.sample_rows import sample_rows
from distflow.runtime.saved_groups import forget_groups, keep_groups, keep_token_texts
from distflow.runtime.spec import Spec
from distflow.runtime.step_metrics import DECODED, DECODED_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TRACEBACK = 10_000
SAVE_WAITS_S = 10.0

_SHORT_S = 1e-3


@dataclass(frozen=True)
class ReportingProcess:
    """The reporting role of one of the run's processes."""

    part: int = 0
    """Its number; 0 leads, and reports for all."""
    speaks: bool = True
    """False if another process notes the same events."""
    share: tuple[int, int] | None = (0, 1)
    """Which share of a step's samples is here, and of how many; None if another process has the
    same samples and writes them."""

    @property
    def leads(self) -> bool:
        return self.part == 0


class Recorder(AbstractContextManager["Recorder"]):
    """Owns the run's folder during the run. A context manager.

    status: "finished" or "stopped", set by the caller; "failed" until then. why: the reason, if a
    metric ended the run. decoded: tokens that the engine decoded for training, see `throughput`;
    whoever forwards it resets it.
    """

    def __init__(
        self,
        spec: Spec,
        total_steps: int,
        restart: int,
        resumed_at: int | None,
        callbacks: Callbacks = Callbacks(),  # noqa: B008  immutable
        process: ReportingProcess = ReportingProcess(),  # noqa: B008  immutable
        view: TerminalLines | None = None,
    ):
        """view: None makes one here."""
        self._spec = spec
        trainer = spec.config.trainer
        self._process = process
        self.folder = RunFolder(spec.run_dir, restart, resumed_at, process.part)
        self.view = view or make_view(spec, total_steps)
        config = to_dict(spec.config)
        self._total_steps = total_steps
        self._rules = StepRules(config)  # type: ignore[arg-type]  # plain values, as in config.yaml
        self._trackers = open_trackers(
            trainer.logger if self._process.leads else (),
            TrackedRun(
                spec.run_dir,
                trainer.project_name,
                trainer.experiment_name,
                config,
                partial(self.note, "info"),
            ),
            local={"console": self.view},
            on_failure=self.note,
        )
        self.memory = MemoryPeaks()
        self.phases = PhaseTimer(
            lambda started, ended, name: self._span(
                "training", Span(started, ended, "phase", name)
            ),
            self.view.phase,
            on_charge=self.memory.charge,
        )
        self._callbacks = Caller(
            callbacks, partial(self.note, "warning"), partial(self.phases, "callbacks")
        )
        self.waits = Waits(self._waited)
        self._step = max(resumed_at or 0, 0)
        self._any_ended = False
        self._filled = self._step
        self.decoded = Counter[str]()
        self.status = "failed"
        self.why = dict[str, str]()

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Record the operators of this thread and the kernels of its device if the step is one of
        `profiler.steps`."""
        profiler = self._spec.config.profiler
        if not profiler.enable or step not in profiler.steps:
            yield
            return

        folder = self._spec.run_dir / "profiles"
        folder.mkdir(exist_ok=True)
        worker = "" if self._process.leads else f"-{self._process.part}"
        file = folder / f"step-{step:06d}{worker}.json.gz"
        profile = torch.profiler.profile()
        with self.phases("profile"):
            profile.start()

        try:
            yield
        finally:
            with self.phases("profile"):
                profile.stop()
                profile.export_chrome_trace(str(file))

        self.note("info", f"the kernels of step {step} are in {file}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        self.view.close()
        self._trackers.close()

        try:
            if error is not None:
                self.folder.event(
                    "error", f"{type(error).__name__}: {error}", step=self._step, **_raised(error)
                )

            if self._process.leads:
                self.folder.event(
                    "end", f"the run {self.status}", step=self._step, status=self.status, **self.why
                )

            self.folder.close()
        except OSError:
            if error is None:
                raise  # the disk failed, or this is a second error: report the first one

    def note(self, kind: str, message: str, **fields: object) -> None:
        """Show an event, and write it to events.jsonl."""
        if not self._process.speaks:
            return
        self.folder.event(kind, message, step=self._step, **fields)
        self.view.note(kind, message)

    def checked(
        self, message: str, passed: Sequence[str], not_checked: Mapping[str, str], of: str = "step"
    ) -> None:
        """The current step, or a validation, was checked whole. not_checked: what could not be
        checked, and why."""
        if not self._process.speaks:
            return
        step = self._step + (of == "step")
        self.folder.event(
            "checks", message, step=step, passed=passed, not_checked=not_checked, of=of
        )

    def group_ended(
        self, group_id: int, version: int, outcome: str, started: float, ended: float
    ) -> None:
        """Write a span for a prompt group, with the reason if it was dropped."""
        self._span(
            "rollout", Span(started, ended, "group", outcome, group_id=group_id, version=version)
        )

        if not self._any_ended and outcome.startswith(TOO_FEW_SCORES):
            why = f"{outcome.partition(': ')[2]}; two steps of such groups end the run"
            self.note("warning", f"the first prompt group has too few scores: {why}")

        self._any_ended = True

    def group_dropped(self, version: int, reason: str, batch: Batch) -> None:
        """Write the responses of a group that nodes drop, with the step being filled: a process
        that only generates knows it from the newest version."""
        self._filled = max(self._filled, self._step, version)
        rows = [{**row, "dropped": reason} for row in sample_rows(batch)]
        self.folder.samples(self._filled + 1, rows, split=DROPPED)

    def engine_activity(self, engine: object) -> None:
        """Write a span for each stretch since the last call in which the engine decoded without a
        gap."""
        for stretch in take_activity(engine):
            self._span(
                "engine",
                Span(stretch.t0, stretch.t1, "decode", stretch.lane, version=stretch.version),
            )
            if stretch.lane == TRAINING:
                self.decoded.update({DECODED: stretch.tokens, DECODED_S: stretch.t1 - stretch.t0})

    def started(self, step: int, compared: Mapping[str, float]) -> None:
        """The comparison of engine and trainer at a start after `step` steps. It is not a metric of
        the run: an uninterrupted run has it once."""
        if compared and self._process.leads:
            self.folder.event(
                "canary", "engine and trainer were compared at the start", step=step, **compared
            )

    def training_step(self, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """A finished step, counted from 1. metrics: of all ranks. batch: this rank's share."""
        self._step = step
        rows = sample_rows(batch) if self._process.share is not None else []

        if rows:
            self.folder.samples(step, rows)
        if not self._process.leads:
            self.folder.flush()
            return

        if lost := self.folder.sample_writer.num_lost:
            metrics = {**metrics, "samples/lost": float(lost)}
        self.folder.metrics(step, "train", metrics)
        self._trackers.log(step, metrics)
        self._trackers.samples(step, rows)

        for found in self._rules.step(step, metrics):
            # the report's judgement, which follows, covers the whole run
            if step < self._total_steps:
                text = f"after step {step}: {found.text} {found.advice}".rstrip()
                self.note("finding", f"{text} [{found.rule}]", rule=found.rule)

        self._callbacks.call("on_step", step, dict(metrics))

    def validation(
        self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, object]]
    ) -> None:
        """A validation after `step` steps. metrics: of all ranks. rows: this rank's."""
        if rows:
            self.folder.samples(step, rows, split="val")
        if not metrics or not self._process.leads:
            return

        self.folder.metrics(step, "val", metrics)
        self._rules.history.add(step, metrics)
        self._trackers.log(step, metrics)
        self._callbacks.call("on_validation", step, dict(metrics))

    def saving(self) -> None:
        """Before a checkpoint: a run that resumes from it has the samples of all its steps."""
        self.folder.sample_writer.finish(SAVE_WAITS_S)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self.folder.event("checkpoint", f"saved {path.name}", step=step)
        self._callbacks.call("on_save", step, path)

    def keep_groups(self, step: int, batch: Batch, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Write all columns of this worker's share of a step, if `trainer.save_groups` says so."""
        trainer = self._spec.config.trainer
        run_dir = self.folder.path
        if trainer.save_groups == "none" or self._process.share is None:
            return

        keep_groups(run_dir, step, batch, *self._process.share)
        if self._process.leads:
            keep_token_texts(run_dir, tokenizer)
        if trainer.save_groups == "last_k" and self._process.leads:
            forget_groups(run_dir, trainer.save_groups_last)

    def _waited(self, wait: Wait, ended: float) -> None:
        """Write a wait. Many are for each row or each parameter, and short: they would be most of
        the file."""
        if ended - wait.since >= _SHORT_S or not (wait.on == DATA or wait.what == COLLECTIVE):
            span = Span(wait.since, ended, "wait", wait.what, group_id=wait.group_id, on=wait.on)
            self._span(wait.who, span)

    def _span(self, actor: str, span: Span) -> None:
        self.folder.span(actor, span, self._step + 1)


def make_view(spec: Spec, total_steps: int) -> TerminalLines:
    return TerminalLines(total_steps, generates=spec.plan.generates)


@contextmanager
def reported(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Writes the report of a run that fails inside, and says where it is. After success the
    launcher writes it."""

    def report() -> None:
        try:
            say(f"report of the failed run: {write_report(run_dir)}")
        # even if the report fails, the error to raise is the one that ended the run
        except Exception as failure:
            say(f"the report cannot be written: {failure}")

    with ExitStack() as if_it_fails:
        if_it_fails.callback(report)
        yield
        if_it_fails.pop_all()


def _raised(error: BaseException) -> dict[str, str]:
    """raised: the error's type if it is ours, since its message then needs no type. traceback:
    omitted for a user's wrong input, kept for an error in user code."""
    if type(error).__module__.startswith("distflow."):
        fields = {"raised": type(error).__name__}
    else:
        fields = {}

    if not isinstance(error, UserError) or error.__cause__ is not None:
        fields["traceback"] = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return fields
