"""One reward worker process, and our end of its socket.

Messages between the run and its reward workers are JSON: 4 bytes of length, then UTF-8. No pickle;
sizes are capped."""

import json
import os
import signal
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from distflow.observe.crash_safe_files import JSON
from distflow.processes.child import Child, python_command, python_path
from distflow.rewards.reward_results import Error, RewardResult, Score, Timeout

EXIT_OUT_OF_MEMORY = 86
MAX_FRAME_BYTES = 32 * 2**20
_READ_BYTES = 2**16
_HEADER = struct.Struct(">I")


class PeerGone(Exception):
    """The other process closed its end: it exited, crashed or was killed."""


def encode(message: Mapping[str, object]) -> bytes:
    """Raises TypeError for values that JSON lacks, ValueError for a message beyond
    `MAX_FRAME_BYTES`."""
    body = json.dumps(dict(message)).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message of {len(body):,} bytes exceeds the limit of {MAX_FRAME_BYTES:,}"
        )
    return _HEADER.pack(len(body)) + body


class Channel:
    """One end of a socket. Used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # Bytes after the last message: one recv may return several. Each recv releases the
        # interpreter lock, which takes up to 5 ms to get back while another thread computes.
        self._received = bytearray()

    def close(self) -> None:
        self._socket.close()

    def send(self, frames: bytes | bytearray, timeout_s: float | None = None) -> None:
        """Raises TimeoutError if the peer does not read in time, PeerGone if it is gone."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(frames)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError from None
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, JSON]:
        """The next message. Raises TimeoutError unless it arrived whole in time, PeerGone,
        ValueError if invalid.

        Data that has arrived is read even after the deadline: this process may have been stopped or
        starved.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = _HEADER.unpack(self._take(_HEADER.size, deadline))
        if size > MAX_FRAME_BYTES:
            raise ValueError(
                f"a message of {size:,} bytes exceeds the limit of {MAX_FRAME_BYTES:,}"
            )
        message = json.loads(self._take(size, deadline))
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, got {type(message).__name__}")
        return message

    def _take(self, num_bytes: int, deadline: float | None) -> bytes:
        while (missing := num_bytes - len(self._received)) > 0:
            self._socket.settimeout(
                None if deadline is None else max(deadline - time.monotonic(), 0.0)
            )
            try:
                part = self._socket.recv(max(missing, _READ_BYTES))
            except (TimeoutError, BlockingIOError):
                raise TimeoutError from None
            except OSError as error:
                raise PeerGone(str(error)) from error
            if not part:
                raise PeerGone("end of stream")
            self._received += part
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken


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
                python_command("distflow.rewards.pool.worker", theirs.fileno(), memory_bytes),
                env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                stderr=self._stderr,
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
            answers = self._channel.receive(_left_s(due)).get("answers")
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
        how = f"exited with {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        self._stderr.seek(max(self._stderr.seek(0, os.SEEK_END) - _SHOWN_STDERR_BYTES, 0))
        text = self._stderr.read().decode(errors="replace").strip()
        return f"the reward worker {how}" + (f" ({text})" if text else "")

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
