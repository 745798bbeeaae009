"""The processes of several concurrent runs: each is a separate command, whose output this one
shows, and which dies with this one, even if killed."""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from signal import SIGTERM

from distflow.cluster.remote_calls import WorkerDied
from distflow.launch.device_and_threads import usable_cores
from distflow.launch.plan_concurrent_runs import Ended, PlannedRun, SeveralOptions
from distflow.runtime.early_stop_and_signals import SIGNALS, StopRequest, die_with, exit_status

_LOOKS_EVERY_S = 0.5
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
            own["CUDA_VISIBLE_DEVICES"] = ",".join(
                seen.split(",")[device] for device in run.devices
            )
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
        modules = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._processes = {
            run.name: subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    __name__,
                    str(os.getpid()),
                    "train",
                    *run.words,
                    *options.words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **modules, **environments.get(run.name, {})},
                process_group=0,  # a signal to this process's group reaches it only once, from here
            )
            for run in runs
        }
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in self._processes
        ]
        for reader in self._readers:
            reader.start()

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def watch(self, failed_process: Callable[[], str | None] = lambda: None) -> Ended:
        """Show their lines until all have ended, even if one fails; a first signal asks all to save
        and end. failed_process: names a dead process that all need, which raises WorkerDied."""
        with StopRequest(self._ask_to_stop, ends_process=not self._options.embedded) as stop:
            while any(reader.is_alive() for reader in self._readers) or not self._lines.empty():
                if dead := failed_process():
                    raise WorkerDied(dead)
                with suppress(Empty):
                    self._options.say(self._lines.get(timeout=_LOOKS_EVERY_S))
        statuses = {name: process.wait() for name, process in self._processes.items()}
        for name, status in statuses.items():
            how = (
                "ended, as asked"
                if status in _ASKED
                else f"FAILED (status {status}), its last lines say why"
            )
            self._options.say(
                f"{name}: {f'{how}; the same command resumes it' if status else 'done'}"
            )
        failed = {
            name: max(status, 1)
            for name, status in statuses.items()
            if status and status not in _ASKED
        }
        asked = exit_status(stop.signal or SIGTERM) if stop.signal or any(statuses.values()) else 0
        return Ended(next(iter(failed.values()), asked), tuple(failed))

    def _read(self, name: str) -> None:
        width = max(map(len, self._processes))
        for line in self._processes[name].stdout or ():
            self._lines.put(f"{name:<{width}} | {line.rstrip()}")

    def _ask_to_stop(self, signal_name: str) -> None:
        self._options.say(
            f"{signal_name}: all runs finish a step, save and exit; a second signal ends them at "
            "once"
        )
        for process in self._processes.values():
            process.send_signal(SIGTERM)


if __name__ == "__main__":
    die_with(int(sys.argv.pop(1)))
    runpy.run_module("distflow", run_name="__main__")
