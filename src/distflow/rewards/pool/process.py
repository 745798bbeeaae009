"""One reward worker process, and our end of its socket."""

import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from distflow.observe.crash_safe_files import JSON
from distflow.processes.channel import Channel, PeerGone, encode
from distflow.processes.child import Child, how_it_ended
from distflow.processes.interpreters import environment, python_command
from distflow.rewards.reward_results import Error, RewardResult, Score, Timeout

EXIT_OUT_OF_MEMORY = 86
_SHOWN_STDERR_BYTES = 300
# faster calls are sent ahead: waking a process takes about 0.1 ms, like most calls
_QUICK_S = 0.005
# they fit into a socket together: nobody waits for the process to read
_MOST_AHEAD = 8
_AHEAD_BYTES = 2**13


class StartFailed(Exception):
    pass


@dataclass(eq=False)
class Request:
    """Calls that one process gets at once, and their results once available. crashes: how many
    processes crashed while serving it. on_results: called with the results."""

    frame: bytes
    num_asked: int
    reward_results: list[RewardResult] = field(default_factory=list)
    crashes: int = 0
    on_results: Callable[[list[RewardResult]], None] = lambda reward_results: None

    def end(self, reward_results: list[RewardResult]) -> None:
        self.reward_results = reward_results
        self.on_results(reward_results)


def take(pending: deque[Request], active: deque[Request]) -> bool:
    """Move the next request to `active`, unless other threads took them all."""
    with suppress(IndexError):
        active.append(pending.popleft())
        return True
    return False


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
        self.in_step = True
        self._is_quick = False

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
            frozenset(cast(list[str], answer[name])) for name in ("ready", "batched", "told")
        )

    def answer(self, active: deque[Request], pending: deque[Request], timeout_s: float) -> None:
        """Serve the request in `active`, and then the pending ones. timeout_s: of each call, from
        the end of the previous one.

        Raises TimeoutError, PeerGone, and ValueError for an invalid reply, all about the first in
        `active`; others may have been sent ahead. The process is then out of sync and must be
        discarded.
        """
        self.in_step = False
        self._stderr.truncate(0)
        self._channel.send(active[0].frame, timeout_s * active[0].num_asked)
        while active:
            request = active[0]
            began = time.monotonic()
            due = began + timeout_s * request.num_asked
            self._send_ahead(active, pending, due)
            reply = self._channel.receive(_left_s(due))
            answers = reply.get("answers") if isinstance(reply, dict) else None
            if not isinstance(answers, list) or len(answers) != request.num_asked:
                raise ValueError("not an answer to each")
            request.end([_read_answer(answer, timeout_s) for answer in answers])
            self._is_quick = time.monotonic() - began < _QUICK_S
            active.popleft()
            if not active and take(pending, active):
                self._channel.send(active[0].frame, timeout_s * active[0].num_asked)
        self.in_step = True

    def _send_ahead(self, active: deque[Request], pending: deque[Request], due: float) -> None:
        """due: deadline of the first in `active`. A process that has ended by now may have answered
        it: the first request without an answer killed it."""
        before = len(active)
        ahead = bytearray()
        while self._is_quick and len(active) <= _MOST_AHEAD and take(pending, active):
            if len(active[-1].frame) > _AHEAD_BYTES:
                pending.appendleft(active.pop())
                break
            ahead += active[-1].frame
        try:
            if ahead:
                self._channel.send(ahead, _left_s(due))
        except PeerGone:
            while len(active) > before:
                pending.appendleft(active.pop())

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
            return Score(float(score), extra, cast(dict[str, str], answer.get("as_text", {})))
    raise ValueError("neither a score nor an error")
