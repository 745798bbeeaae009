"""Verifiers in processes that can be killed: a hang, a crash or a full memory costs one verdict, never the run."""

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

from distflow.config.errors import UserError
from distflow.observe.jsonlines import JSON
from distflow.rewards.frames import PeerGone, encode, receive_frame, send_frame
from distflow.rewards.verdict import Error, Score, Timeout, Verdict
from distflow.rewards.worker import EXIT_OUT_OF_MEMORY

MEMORY_BYTES = 4 * 2**30
START_TIMEOUT_S = 60.0
_SHOWN_STDERR_BYTES = 300
Told = Callable[[str, Mapping[str, object], Verdict], None]
"""(function's name, arguments, verdict)."""
_CLOSING = "the run was closing its verifiers"


class VerifierPool:
    """`num_workers` processes, each with the same functions loaded, each judging one answer at a time; by a function in
    `takes_groups` (one that is batched or async) several; `takes_batches` are those of them that are batched.

    The deadline of a verdict runs from the moment its process takes it, not while it queues: n hangs cost at most
    n · timeout_s / num_workers. A process that crashed or ran out of memory is replaced and the answer judged once
    more; one that passed its deadline is replaced and its answer is a `Timeout`. What happens to a process happens to
    all that it was asked at once, whose deadline is that of one times their number.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """functions: name → "module:function" or "file.py:function". memory_bytes: of one process, 0 for no limit.

        `told` is called with every verdict, on the loop that asked for it.
        Waits for the first process and raises UserError where a function cannot be loaded.
        """
        assert num_workers > 0 and timeout_s > 0 and functions
        self.timeout_s = timeout_s
        self._settings = (dict(functions), memory_bytes, start_timeout_s)
        self.told: Told = lambda name, arguments, verdict: None
        self.takes_groups = frozenset[str]()
        self.takes_batches = frozenset[str]()
        self._closed = False
        # Processes are started by these threads only: Linux kills a child when the thread that started it ends.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="distflow-verifier")
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # one that is up comes first
        # Changed by those threads, copied by `close`: `add`, `discard` and `list()` of a set are one step each.
        self._living: set[_Process] = set()
        for _ in range(num_workers):
            self._idle.put(None)  # a place whose process is started when it is first needed
        try:
            self._threads.submit(self._start_first).result()
        except BaseException:
            self.close()
            raise

    async def judge(self, name: str, arguments: Mapping[str, object], timeout_s: float | None = None) -> Verdict:
        """Call function `name` with `arguments` (by their names in `functions.PARAMETERS`; plain JSON values)."""
        (verdict,) = await self.judge_group(name, [arguments], timeout_s)
        return verdict

    @property
    def closed(self) -> bool:
        """Whether it was closed: no verdict will come any more."""
        return self._closed

    async def judge_group(
        self, name: str, asked: Sequence[Mapping[str, object]], timeout_s: float | None = None
    ) -> list[Verdict]:
        """The same for several at once, which one process takes; timeout_s: of each."""
        if self._closed:
            return [Error(_CLOSING)] * len(asked)
        timeout_s = timeout_s or self.timeout_s
        try:
            request = encode({"name": name, "asked": [dict(arguments) for arguments in asked], "timeout_s": timeout_s})
        except (TypeError, ValueError) as error:
            return [Error(f"the sample cannot be sent to a verifier: {error}")] * len(asked)
        verdicts = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._judge, request, timeout_s, len(asked)
        )
        for arguments, verdict in zip(asked, verdicts, strict=True):
            self.told(name, arguments, verdict)
        return verdicts

    def close(self) -> None:
        """Kill all processes, at once; verdicts under way, and those that queue, become errors."""
        self._closed = True
        for process in list(self._living):
            process.kill()
        self._threads.shutdown(wait=True)
        for process in list(self._living):
            self._retire(process)

    def pids(self) -> list[int]:
        """Of the processes that are up."""
        return sorted(process.pid for process in self._living)

    def _judge(self, request: bytes, timeout_s: float, num_asked: int) -> list[Verdict]:
        """At most two attempts; what fails while the pool closes fails because of that."""
        verdicts = self._attempt(request, timeout_s, num_asked)
        if isinstance(verdicts, _Crash):
            verdicts = self._attempt(request, timeout_s, num_asked)
        if isinstance(verdicts, _Crash):
            verdicts = [Error(f"{verdicts.reason}, twice")] * num_asked
        if self._closed:
            return [verdict if isinstance(verdict, Score) else Error(_CLOSING) for verdict in verdicts]
        return verdicts

    def _attempt(self, request: bytes, timeout_s: float, num_asked: int) -> "list[Verdict] | _Crash":
        """Judge in an idle process, started if need be; what is left of it goes back to its place."""
        process = self._idle.get()
        try:
            if process is None or not process.is_alive():
                process = self._start(process)
            return process.ask(request, timeout_s, num_asked)
        except _StartFailed as error:
            return [Error(f"no verifier process could be started: {error}")] * num_asked
        except TimeoutError:
            return [Timeout(timeout_s * num_asked)] * num_asked
        except PeerGone:
            assert process is not None
            return _Crash(process.cause_of_death())
        except ValueError as error:
            return _Crash(f"the verifier process answered nonsense: {error}")
        finally:
            self._idle.put(process if process is not None and self._keep(process) else None)

    def _keep(self, process: "_Process") -> bool:
        """Whether it may serve again: it is in step, having answered what it was asked."""
        if process.in_step and process.is_alive():
            return True
        self._retire(process)
        return False

    def _start_first(self) -> None:
        try:
            process = self._start(self._idle.get())
        except _StartFailed as error:
            users = [target for name, target in self._settings[0].items() if not name.startswith("(")]  # no probe
            raise UserError(
                f"the reward functions ({', '.join(users)}; see custom_reward_function.path and "
                f"reward.functions) cannot be loaded: {error}"
            ) from None
        self._idle.put(process)

    def _start(self, dead: "_Process | None") -> "_Process":
        if dead is not None:
            self._retire(dead)
        functions, memory_bytes, start_timeout_s = self._settings
        try:
            process = _Process(memory_bytes)
        except OSError as error:
            raise _StartFailed(str(error)) from None
        self._living.add(process)
        try:
            if self._closed:  # asked after the process is known to `close`: one of the two kills it
                raise _StartFailed(_CLOSING)
            self.takes_groups, self.takes_batches = process.load(functions, start_timeout_s)
        except _StartFailed:
            self._retire(process)
            raise
        return process

    def _retire(self, process: "_Process") -> None:
        process.discard()
        self._living.discard(process)


class _StartFailed(Exception):
    pass


class _Crash:
    """The process died while it judged: worth one more try in a fresh one."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _read_answer(answer: JSON, timeout_s: float) -> Verdict:
    """Raises ValueError for nonsense."""
    if isinstance(answer, dict):
        score, extra = answer.get("score"), answer.get("extra")
        if "error" in answer:
            return Error(str(answer["error"]))
        if "timeout" in answer:
            return Timeout(timeout_s)
        if isinstance(score, int | float) and isinstance(extra, dict):
            return Score(float(score), extra)
    raise ValueError("neither a score nor an error")


class _Process:
    """One verifier process and our end of its socket. Used by one thread at a time, but `kill` by any."""

    def __init__(self, memory_bytes: int) -> None:
        self._channel, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115  lives as long as the process, closed by discard
        with theirs:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "distflow.rewards.worker",
                    *map(str, (theirs.fileno(), os.getpid(), memory_bytes)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,  # Ctrl-C goes to the run alone, and what a verifier starts dies with it
            )
        self.pid = self._popen.pid
        self.in_step = True
        self._killed = False

    def load(self, functions: Mapping[str, str], timeout_s: float) -> tuple[frozenset[str], frozenset[str]]:
        """Returns those that take groups, and those of them that judge these as one batch."""
        try:
            answer = self._exchange(encode({"functions": dict(functions)}), timeout_s)
        except TimeoutError:
            raise _StartFailed(f"it was not ready after {timeout_s:g} s") from None
        except PeerGone:
            raise _StartFailed(self.cause_of_death()) from None
        if "error" in answer:
            raise _StartFailed(str(answer["error"]))
        return frozenset(cast(list[str], answer["ready"])), frozenset(cast(list[str], answer["batched"]))

    def ask(self, request: bytes, timeout_s: float, num_asked: int) -> list[Verdict]:
        """Raises TimeoutError, PeerGone; the process is then out of step and must go. ValueError for nonsense."""
        self._stderr.truncate(0)
        answers = self._exchange(request, timeout_s * num_asked).get("answers")
        if not isinstance(answers, list) or len(answers) != num_asked:
            raise ValueError("not an answer to each")
        return [_read_answer(answer, timeout_s) for answer in answers]

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def cause_of_death(self) -> str:
        """How it ended, with the last of what it wrote. Waits for it: its socket is closed already."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)
        status = self._popen.returncode
        if status == EXIT_OUT_OF_MEMORY:
            return "the verifier ran out of memory"
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status is not None and status < 0
            else f"exited with {status}"
        )
        self._stderr.seek(0)
        said = self._stderr.read()[-_SHOWN_STDERR_BYTES:].decode(errors="replace").strip()
        return f"the verifier process {how}" + (f" ({said})" if said else "")

    def kill(self) -> None:
        """End the process and all that it started. Idempotent; whoever waits for its answer gets PeerGone."""
        if not self._killed:
            self._killed = True  # once: later the number may be another process group's
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kill it, reap it and give back what it held here."""
        self.kill()
        self._popen.wait()
        self._channel.close()
        self._stderr.close()

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, JSON]:
        self.in_step = False
        deadline = time.monotonic() + timeout_s
        send_frame(self._channel, request, timeout_s)
        answer = receive_frame(self._channel, max(deadline - time.monotonic(), 0.0))
        self.in_step = True
        return answer
