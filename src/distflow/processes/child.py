"""A child process under a keeper: it ends with `end`, or with this process, and so does everything
that it started."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from distflow.processes.descendants import ending_by_themselves
from distflow.processes.interpreters import bare_command, environment
from distflow.processes.survivors import without_mark

_ENDS_WITHIN_S = 10.0
"""What a keeper takes to kill and reap, beside busy processes."""


class Child:
    """A command, and everything that it starts. pid: of the keeper. May be used by several
    threads."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = subprocess.DEVNULL,
        stderr: int | IO[Any] | None = subprocess.DEVNULL,
        *,
        cwd: str | None = None,
        memory_bytes: int = 0,
        continued: bool = False,
        leaves_s: float = 0.0,
        removed: Sequence[str] = (),
    ) -> None:
        """env: None for `environment()`. memory_bytes: the most that each process may allocate; 0
        for no limit. continued: the command goes on when a signal stops it. leaves_s: at its end,
        what it started gets so many seconds to end by itself. removed: patterns of folders to
        remove if this process ends first. Raises OSError if it cannot be started."""
        options = (os.getpid(), memory_bytes, continued, leaves_s, "\n".join(removed))
        keeper = bare_command("distflow.processes.keeper", *options, *command)
        self._popen = subprocess.Popen(
            keeper,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            cwd=cwd,
            env=without_mark(environment() if env is None else env),  # the keeper ends what it has
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        self.pid = self._popen.pid
        self._ends_within_s = _ENDS_WITHIN_S + leaves_s
        ending_by_themselves.add(self.pid)

    def status(self) -> int | None:
        """The command's exit status, negative for a signal; None while it, or something that it
        started, runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The same, after waiting for the end at most that long."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout_s)
        return None

    def ask_to_end(self) -> None:
        """Send the command a SIGTERM."""
        self._popen.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Have everything killed, without waiting. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGCONT):  # the keeper may have been stopped
            self._popen.send_signal(number)

    def end(self) -> None:
        """Kill everything, and wait for that. Idempotent."""
        self.kill()
        if self.wait(self._ends_within_s) is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
        ending_by_themselves.discard(self.pid)


def keep_exit_statuses() -> None:
    """Have the system keep how children of this process end, for drivers and workers of a Ray that
    ends what workers started: Ray makes them ignore SIGCHLD, and each child, of a user's
    `subprocess.run` too, would seem to end with status 0."""
    ctypes.CDLL(None).signal(int(signal.SIGCHLD), 0)  # unlike Python's, from any thread


def how_it_ended(status: int | None) -> str:
    """A status in words; None if it is unknown."""
    if status is None:
        return "is gone"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
