"""The processes of several runs side by side: each is a command of its own, and this one shows what they say."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from signal import SIGTERM

from distflow.cluster.actor_calls import WorkerDied
from distflow.cluster.ray_cluster import failed_process
from distflow.runtime.early_stop_and_signals import SIGNALS, StopRequest, exit_status

_LOOKS_EVERY_S = 0.5
_ASKED = (*map(exit_status, SIGNALS), -SIGTERM)  # exit statuses of runs that were asked to end


class RunProcesses(AbstractContextManager["RunProcesses"]):
    """Starts a `distflow` for each of the commands, by name; when it exits, those that still run are killed."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._say, self._lines = say, SimpleQueue[str]()
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, "-m", "distflow", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                process_group=0,  # a signal to the group of this process reaches it once, from here
            )
            for name, command in commands.items()
        }
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in commands]
        for reader in self._readers:
            reader.start()

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def watch(self) -> int:
        """Show their lines until all have ended, also where one fails; a first signal asks all to save and end. Returns
        the exit status for all. Raises WorkerDied if a process of Ray is gone."""
        with StopRequest(self._ask_to_stop) as stop:
            while any(reader.is_alive() for reader in self._readers) or not self._lines.empty():
                if dead := failed_process():
                    raise WorkerDied(dead)
                with suppress(Empty):
                    self._say(self._lines.get(timeout=_LOOKS_EVERY_S))
        statuses = [process.wait() for process in self._processes.values()]
        for name, status in zip(self._processes, statuses, strict=True):
            how = "ended, as asked" if status in _ASKED else f"FAILED (status {status}), its last lines say why"
            self._say(f"{name}: {f'{how}; the same command resumes it' if status else 'done'}")
        failed = [max(status, 1) for status in statuses if status and status not in _ASKED]
        asked = exit_status(stop.signal or SIGTERM) if stop.signal or any(statuses) else 0
        return failed[0] if failed else asked

    def _read(self, name: str) -> None:
        width = max(map(len, self._processes))
        for line in self._processes[name].stdout or ():
            self._lines.put(f"{name:<{width}} | {line.rstrip()}")

    def _ask_to_stop(self, signal_name: str) -> None:
        self._say(f"{signal_name}: all runs finish a step, save and exit; a second signal ends them at once")
        for process in self._processes.values():
            process.send_signal(SIGTERM)
