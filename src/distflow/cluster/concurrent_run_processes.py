"""The processes of several concurrent runs: each is a separate command, whose output this one
shows, and which dies with this one, even if killed."""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from signal import SIGTERM

from distflow.cluster.remote_calls import WorkerDied
from distflow.launch.plan_concurrent_runs import Ended, PlannedRun, SeveralOptions
from distflow.launch.threads import usable_cores
from distflow.processes.child import Child
from distflow.processes.interpreters import environment
from distflow.runtime.stop_signals import SIGNALS, StopRequest, exit_status

_LOOKS_EVERY_S = 0.5
_CLEANS_UP_WITHIN_S = 2.0
_ASKED = (*map(exit_status, SIGNALS), -SIGTERM)  # exit statuses of runs that were asked to end


def launch_several(runs: Sequence[PlannedRun], options: SeveralOptions) -> Ended:
    """Run all at once, each as a separate `distflow train`. On a single machine each gets its share
    of the cores, and its own GPUs."""
    num_devices = sum(len(run.devices) for run in runs)
    cores = usable_cores()

    environments = {}
    for run in runs:
        own = {"OMP_NUM_THREADS": str(max(1, cores * len(run.devices) // num_devices))}
        if run.plan.ranks[0].device.startswith("cuda"):
            seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_devices)))
            names = seen.split(",")
            own["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in run.devices)

        environments[run.name] = own

    with RunProcesses(runs, environments, options) as processes:
        return processes.watch()


class RunProcesses(AbstractContextManager["RunProcesses"]):
    """Starts a `distflow train` for each run; on exit, running ones are killed. environments:
    further variables by the run's name."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        environments: Mapping[str, Mapping[str, str]],
        options: SeveralOptions,
    ) -> None:
        self._options = options
        self._lines = SimpleQueue[str]()
        self._width = max(len(run.name) for run in runs)
        self._processes = dict[str, Child]()
        self._readers = list[threading.Thread]()
        for run in runs:
            self._start(run, environments.get(run.name, {}))

    def _start(self, run: PlannedRun, variables: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "distflow", "train"]
        reading, writing = os.pipe()
        self._processes[run.name] = Child(
            [*command, *run.words, *self._options.words],
            environment(**variables),
            stdout=writing,
            stderr=writing,
            leaves_s=_CLEANS_UP_WITHIN_S,
        )
        os.close(writing)
        reader = threading.Thread(target=self._read, args=(run.name, reading), daemon=True)
        reader.start()
        self._readers.append(reader)

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.end()

    def watch(self, failed_process: Callable[[], str | None] = lambda: None) -> Ended:
        """Show their lines until all have ended, even if one fails; a first signal asks all to save
        and end. failed_process: names a dead process that all need, which raises WorkerDied."""
        with StopRequest(self._ask_to_stop, ends_process=not self._options.embedded) as stop:
            while any(reader.is_alive() for reader in self._readers) or not self._lines.empty():
                if dead := failed_process():
                    raise WorkerDied(dead)
                with suppress(Empty):
                    self._options.say(self._lines.get(timeout=_LOOKS_EVERY_S))

        statuses = {name: process.wait() or 0 for name, process in self._processes.items()}
        failed = {}
        for name, status in statuses.items():
            how = "done"
            if status in _ASKED:
                how = "ended, as asked; the same command resumes it"
            elif status:
                failed[name] = max(status, 1)
                how = (
                    f"FAILED (status {status}), its last lines say why; the same command resumes it"
                )

            self._options.say(f"{name}: {how}")

        asked = 0
        if stop.signal or any(statuses.values()):
            asked = exit_status(stop.signal or SIGTERM)
        return Ended(next(iter(failed.values()), asked), tuple(failed))

    def _read(self, name: str, output: int) -> None:
        with open(output, errors="replace") as lines:
            for line in lines:
                self._lines.put(f"{name:<{self._width}} | {line.rstrip()}")

    def _ask_to_stop(self, signal_name: str) -> None:
        self._options.say(
            f"{signal_name}: all runs finish a step, save and exit; a second signal ends them at "
            "once"
        )
        for process in self._processes.values():
            process.ask_to_end()
