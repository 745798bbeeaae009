"""One reward worker process, and our end of its socket."""

import os
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import cast

from distflow.observe.crash_safe_files import JSON
from distflow.processes.channel import Channel, PeerGone, encode
from distflow.processes.child import Child, how_it_ended
from distflow.processes.interpreters import environment, python_command
from distflow.rewards.reward_results import Error, RewardResult, Score, Timeout

EXIT_OUT_OF_MEMORY = 86
_SHOWN_STDERR_BYTES = 300


class StartFailed(Exception):
    """A process, or the functions in it, could not be loaded."""


class Crashed(Exception):
    """A process ended, or answered nonsense, while it served a call."""


class RewardProcess:
    """One worker process and our end of its socket. Used by one thread at a time, except `kill`."""

    def __init__(self, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)

        # lives as long as the process, closed by discard
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115

        with theirs:
            self._child = Child(
                python_command("distflow.rewards.pool.worker", theirs.fileno()),
                environment(OMP_NUM_THREADS="1"),
                pass_fds=(theirs.fileno(),),
                stderr=self._stderr,
                memory_bytes=memory_bytes,
            )

        self.pid = self._child.pid

    def load(self, functions: Mapping[str, str], timeout_s: float) -> tuple[frozenset[str], ...]:
        """Load functions; returns those that take groups, those of them that are batched, and those
        that take conversations."""
        due = time.monotonic() + timeout_s
        try:
            self._channel.send(encode({"functions": dict(functions)}), timeout_s)
            answer = self._channel.receive(_left_s(due))
        except TimeoutError:
            raise StartFailed(f"it was not ready after {timeout_s:g} s") from None
        except PeerGone:
            raise StartFailed(self.cause_of_death()) from None

        if "error" in answer:
            raise StartFailed(str(answer["error"]))

        return tuple(
            frozenset(cast(list[str], answer[name]))
            for name in ("groups", "batches", "conversations")
        )

    def ask(self, frames: bytes, timeout_s: float) -> None:
        """Send requests, which are answered in their order. timeout_s: of each call.

        This and `answer` raise TimeoutError and Crashed, after which the process is of no use.
        """
        self._stderr.truncate(0)
        try:
            self._channel.send(frames, timeout_s)
        except PeerGone:
            raise Crashed(self.cause_of_death()) from None

    def answer(self, num_asked: int, timeout_s: float) -> list[RewardResult]:
        """The results of the next request, which has that many calls."""
        try:
            reply = self._channel.receive(timeout_s * num_asked)
            answers = None
            if isinstance(reply, dict):
                answers = reply.get("answers")

            if not isinstance(answers, list) or len(answers) != num_asked:
                raise ValueError("not an answer to each")
            return [_read_answer(answer, timeout_s) for answer in answers]
        except PeerGone:
            raise Crashed(self.cause_of_death()) from None
        except ValueError as error:
            raise Crashed(f"the reward worker returned invalid data: {error}") from None

    def is_alive(self) -> bool:
        return self._child.status() is None

    def cause_of_death(self) -> str:
        """How it ended, with the end of its stderr. Waits for it, as its socket is already
        closed."""
        status = self._child.wait(5)
        if status == EXIT_OUT_OF_MEMORY:
            return "the reward worker ran out of memory"

        self._stderr.seek(max(self._stderr.seek(0, os.SEEK_END) - _SHOWN_STDERR_BYTES, 0))
        text = self._stderr.read().decode(errors="replace").strip()
        cause = f"the reward worker {how_it_ended(status)}"
        return f"{cause} ({text})" if text else cause

    def kill(self) -> None:
        """End the process and its children. Idempotent; a thread that waits for its answer gets
        PeerGone."""
        self._child.kill()

    def discard(self) -> None:
        """Kill and reap the process, and release what this process holds for it."""
        self._child.end()
        self._channel.close()
        self._stderr.close()


def _left_s(due: float) -> float:
    return max(due - time.monotonic(), 0.0)


def _read_answer(answer: JSON, timeout_s: float) -> RewardResult:
    """The result of an answer. Raises ValueError for an invalid one."""
    if isinstance(answer, dict):
        score = answer.get("score")
        extra = answer.get("extra")
        if "error" in answer:
            return Error(str(answer["error"]))
        if "timeout" in answer:
            return Timeout(timeout_s)
        if isinstance(score, int | float) and isinstance(extra, dict):
            return Score(float(score), extra)

    raise ValueError("neither a score nor an error")
