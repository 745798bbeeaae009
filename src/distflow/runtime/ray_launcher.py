"""The Ray launcher: one worker a device, each a process, and one that only starts them and watches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distflow.observe.report import write_report
from distflow.observe.run_folder import RunFolder
from distflow.observe.run_reader import read_events
from distflow.runtime.begin import done_before, find_accuracies, starting
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.ray_cluster import bundles_of, connected
from distflow.runtime.ray_run import RayRun
from distflow.runtime.recorder import reported
from distflow.runtime.saved import check_same_facts
from distflow.runtime.spec import Outcome, Spec

_DRIVER = -1  # among the parts of a run's folder


def launch(
    spec: Spec, allow_change: tuple[str, ...], say: Callable[[str], None], callbacks: Callbacks, embedded: bool
) -> Outcome:
    """See `Launch`."""
    spec = replace(spec, options=replace(spec.options, run_dir=spec.run_dir.absolute()))  # actors start elsewhere
    with starting(spec, allow_change) as start:
        if start.checkpoint:
            check_same_facts(start.checkpoint, spec, spec.facts)
        if done := done_before(spec, start, say):
            return done
        start.set_aside(spec, say)
    needs = spec.options.worker
    with (
        connected(spec.plan, say, needs.num_judges * needs.judge_cpus) as ends,
        bundles_of(spec.plan, needs, say, ends) as bundles,
        reported(spec.run_dir, say),
    ):
        run = RayRun(spec, start, allow_change, bundles)
        try:
            differences = run.build(say)
            steps, stop = run.watch(differences, callbacks, ends_process=not embedded)
        except BaseException as err:
            run.kill()
            _note_end(spec.run_dir, err)
            raise
        run.kill()
    stopped = stop.wanted and not run.finished
    return Outcome(steps, stop.signal, stopped, write_report(spec.run_dir), *find_accuracies(spec.run_dir))


def _note_end(run_dir: Path, error: BaseException) -> None:
    """A worker that was killed had no time to record how the run ended."""
    events = read_events(run_dir)
    if events and events[-1].kind != "end":
        with RunFolder(run_dir, events[-1].inc, part=_DRIVER) as folder:
            folder.event("error", f"{type(error).__name__}: {error}", raised=type(error).__name__)
            folder.event("end", "the run failed", status="failed")
