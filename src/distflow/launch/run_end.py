"""How a run ended: its outcome, its last events, and what to do next."""

from collections.abc import Callable
from pathlib import Path

from distflow.launch.run_folders.export_checkpoint import write_hf_models
from distflow.launch.run_start import Start, open_store
from distflow.observe.findings.summary import accuracies
from distflow.observe.report.build import report_data, write_report
from distflow.observe.run_reader import read_events, read_metrics
from distflow.observe.writing.run_folder import RunFolder
from distflow.runtime.checkpoint.find_checkpoint import (
    done_message,
    is_done,
    newest_checkpoint,
)
from distflow.runtime.checkpoint.restore import check_same_facts
from distflow.runtime.run_recorder import Recorder
from distflow.runtime.spec import Outcome, Spec
from distflow.runtime.stop_signals import Stop
from distflow.scheduling.group_states import GroupCounts

DRIVER = -1
"""The process that starts the workers, in place of a rank among the parts of a run's folder."""


def done_before(spec: Spec, start: Start, say: Callable[[str], None]) -> Outcome | None:
    """The outcome of a run without steps left; None if there are some. Raises UserError if it is
    another run."""
    if start.checkpoint is None or not is_done(start.checkpoint, spec):
        return None

    say(done_message(start.checkpoint, spec, start.resumes))
    if start.resumes:
        notes = check_same_facts(start.checkpoint, spec, spec.facts)
    else:
        notes = []

    other = []
    for note in notes:
        if note.startswith("code_of_"):
            other.append(note.partition(" ")[0].removeprefix("code_of_"))

    if other:
        say(
            f"It was trained with different code than the call gives now ({', '.join(other)}), "
            "which is not used."
        )

    if spec.saves_hf_model:
        write_hf_models(spec.run_dir, say)
    return outcome_of(spec, start.checkpoint.step)


def outcome_of(spec: Spec, steps: int, signal: int | None = None, stopped: bool = False) -> Outcome:
    """The outcome of a run that has ended; writes its report, which says how it ended."""
    data = report_data(spec.run_dir)
    found = accuracies(read_metrics(spec.run_dir), read_events(spec.run_dir))
    report = write_report(spec.run_dir, data)
    saved = newest_checkpoint(spec.run_dir)
    return Outcome(steps, signal, stopped, report, *found, tuple(data["judgements"]), saved)


def note_end(
    recorder: Recorder,
    stop: Stop,
    finished: bool,
    group_counts: GroupCounts,
    done: int,
    planned: int,
) -> None:
    """Record how the run ended. Dropped groups are replaced by later ones, so it may have fewer
    steps than planned."""
    if stop.wanted and not finished:
        recorder.status = "stopped"
    else:
        recorder.status = "finished"

    if finished and not stop.wanted and done < planned:
        dropped = ", ".join(f"{n} {reason}" for reason, n in group_counts.dropped.items())
        recorder.note(
            "info",
            f"the data ended after {done} of {planned} steps: groups were dropped ({dropped})",
        )


def resume_hint(spec: Spec) -> str:
    """For the error of a death that ends the run: text on where the next start resumes."""
    store = open_store(spec)
    where = "the beginning: there is no checkpoint yet (trainer.save_freq)"
    if store.exists():
        where = store.load().path.name
    return f"The same command resumes from {where}"


def note_failure(run_dir: Path, error: BaseException) -> None:
    """Record how the run ended, for workers that were killed before they could."""
    events = read_events(run_dir)
    if events and events[-1].kind != "end":
        with RunFolder(run_dir, events[-1].restart, part=DRIVER) as folder:
            folder.event("error", f"{type(error).__name__}: {error}", raised=type(error).__name__)
            folder.event("end", "the run failed", status="failed")
