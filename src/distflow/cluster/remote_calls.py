"""Calls to a run's actors: replies and errors, in messages of bounded size, and whether the actors
respond.

The actors are Ray's, or processes of the local launcher, which works without Ray: a `Peer` calls
one over a socket with the interface of Ray's actors.
"""

import io
import os
import pickle
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPLIES_WITHIN_S = 60.0
STOPPED_S = 5.0
"""How long a process may be stopped by a signal. One that replies late because it is busy is not
stopped."""
STARTS_WITHIN_S = 300.0
ENDS_WITHIN_S = 20.0
STARVED_S = 10.0
"""How long a busy machine may take to report a death, or that others are late too."""
COORDINATOR = -1
EXCHANGE = -2
FIRST_REWARD_ACTOR = -3
"""Numbers in place of a rank; further reward actors have lower numbers."""
MOST_TEXT = 2000
"""Most characters of a text that is sent to the coordinator or the driver."""

_AWAY_S = 5.0


class WorkerDied(RuntimeError):
    """A worker's process is gone: the run ends, and resumes from its last checkpoint when started
    again."""

    exit_status = 75  # EX_TEMPFAIL of sysexits(3): the job of `slurm.sbatch` is requeued


class WorkerHangs(WorkerDied):
    """A worker's process is alive, but does not reach the collective call in which the other ranks
    wait."""


class PeersLate(RuntimeError):
    """Another rank did not reach a collective call in time."""


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, not because of the user's input."""


def name_of(number: int) -> str:
    """The process's name in messages. number: a rank, or a number in place of one."""
    if number <= FIRST_REWARD_ACTOR:
        return f"actor {FIRST_REWARD_ACTOR - number} of the reward actors"
    return {COORDINATOR: "the coordinator", EXCHANGE: "the exchange"}.get(
        number, f"worker {number}"
    )


def future_of(ref: Any) -> "Future[Any]":
    """A future of the result of an actor's call."""
    return ref if isinstance(ref, Future) else ref.future()


def reply(ref: Any) -> Any:
    """Wait for the result of an actor's call. Raises what the actor raised."""
    if isinstance(ref, Future):
        return ref.result()
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as err:
        raise err.cause from err


def reply_of(ref: Any, number: int) -> Any:
    """The reply of the Ray actor of a rank or service. Raises WorkerDied if it is gone or
    unresponsive."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(ref, timeout=REPLIES_WITHIN_S)
    except (RayActorError, GetTimeoutError) as err:
        raise WorkerDied(
            f"{name_of(number)}'s process is gone or does not reply ({type(err).__name__})."
        ) from err


def kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # Ray itself may have failed
        ray.kill(actor)


def shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text):,} characters)"


def shorten(error: BaseException) -> None:
    """Shorten the message of an exception, and of its causes."""
    link: BaseException | None = error
    while link is not None:
        link.args = tuple(shortened(arg) if isinstance(arg, str) else arg for arg in link.args)
        link = link.__cause__ or link.__context__


def hanging(
    calls: "Mapping[int, Future[Any]]", workers: Mapping[int, Any], stacks: Path, limit_s: float
) -> WorkerHangs | None:
    """Names the training workers that did not reach a collective call within `limit_s`; None if
    they have ended since. calls: their runs, by rank. workers: all running ones, which append the
    stacks of their threads to `stacks`."""
    not_done = wait(calls.values(), STARVED_S).not_done
    late = [rank for rank, call in calls.items() if call in not_done]
    if not late:
        return None
    asked = [future_of(worker.write_stacks.remote(stacks)) for worker in workers.values()]
    where = {rank: future_of(workers[rank].where.remote()) for rank in late}
    answered = wait([*asked, *where.values()], ENDS_WITHIN_S).done
    places = [
        f"worker {rank} is {each.result() if each in answered else 'silent'}"
        for rank, each in where.items()
    ]
    return WorkerHangs(
        f"{' and '.join(places)}, and has not reached a collective call of all ranks within "
        f"{limit_s:g} s "
        "(trainer.peers_timeout_s): a function or a lock does not end, or the rank has much more "
        "work than others. "
        f"{_stacks_in('Its stacks are', stacks)}"
    )


def _stacks_in(which: str, stacks: Path) -> str:
    return f"{which} in {stacks}." if stacks.exists() else "No worker could write its stacks."


def process_here() -> tuple[str, int]:
    """This process: the kernel's name of its machine (or container), and its pid there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink(
        "/proc/self/ns/pid"
    ), os.getpid()


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process: T if SIGSTOP or Ctrl-Z has stopped it, t if a
    debugger has; empty if it has ended, or this is not Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


class Heartbeat:
    """Repeatedly asks processes whether they respond, on a thread of theirs that does nothing
    else."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        """actors: by rank."""
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, tuple[Future[Any], float]] = {}
        self._heard = dict[int, tuple[str, int] | None]()
        self._stopped = dict[int, float]()
        self._looked = time.monotonic()
        for rank, actor in actors.items():
            self.follow(rank, actor)

    def follow(self, rank: int, actor: Any) -> None:
        self._actors[rank] = actor
        self._asked[rank] = (future_of(actor.alive.remote()), time.monotonic())

    def forget(self, rank: int) -> None:
        self._actors.pop(rank, None)
        self._asked.pop(rank, None)

    def silent(self) -> int | None:
        """The rank of a process that has not responded for too long (`_limit_s`), or is stopped;
        None if all are well."""
        now = time.monotonic()
        before = self._looked
        self._looked = now
        if now - before > _AWAY_S:  # this process itself was stopped: answers are on their way
            self._asked = {
                rank: (asked, since + now - before) for rank, (asked, since) in self._asked.items()
            }
        for rank, (asked, since) in list(self._asked.items()):
            if asked.done():
                self._heard[rank] = asked.result() if asked.exception() is None else None
                self.follow(rank, self._actors[rank])
            elif now - since > self._limit_s(rank):
                return rank
        return None

    def pid(self, rank: int) -> int | None:
        """The pid of a process, once it has responded."""
        heard = self._heard.get(rank)
        return None if heard is None else heard[1]

    def describe_silence(self, silent: int, stacks: Path) -> str:
        """The message about an unresponsive process, after responding workers have written their
        threads' stacks to `stacks`."""
        workers = [actor for rank, actor in self._actors.items() if rank >= 0 and rank != silent]
        wait([future_of(worker.write_stacks.remote(stacks)) for worker in workers], ENDS_WITHIN_S)
        why = (
            "is stopped, hangs in native code"
            if silent in self._heard
            else "has not started, is stopped"
        )
        return (
            f"{name_of(silent)} has not responded for {self._limit_s(silent):g} s: its process "
            f"{why}, or its machine "
            f"is gone or overloaded. {_stacks_in('The stacks of the others are', stacks)}"
        )

    def _limit_s(self, rank: int) -> float:
        """How long it may take to reply. At first it still starts and imports."""
        machine, pid = self._heard.get(rank) or ("", 0)
        if machine != process_here()[0] or state_of(pid) != "T":
            self._stopped.pop(rank, None)
        elif time.monotonic() - self._stopped.setdefault(rank, time.monotonic()) >= STOPPED_S:
            return STOPPED_S
        return REPLIES_WITHIN_S if rank in self._heard else STARTS_WITHIN_S


_DOES_NOT_PICKLE = (
    pickle.PickleError,
    TypeError,
    AttributeError,
    ImportError,
    ValueError,
    KeyError,
    IndexError,
)


class PeerGone(RuntimeError):
    """The process at the other end has ended."""


class Peer:
    """The object at the other end of a socket: `peer.method.remote(...)` calls its method on a
    thread of that process, and returns a future.

    Only the two processes have the ends of the socket, so messages are unpickled.
    """

    def __init__(self, connection: Connection, num_threads: int) -> None:
        """num_threads: for simultaneous calls from the other process."""
        self._connection = connection
        self._sending = threading.Lock()
        self._replies = dict[int, Future[Any]]()
        self._numbers = count()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="peer")

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def serve(self, target: object) -> None:
        """Serve calls of methods of `target` until the process at the other end has ended."""
        with suppress(EOFError, OSError):
            while True:
                number, name, content = pickle.loads(self._connection.recv_bytes())
                if name is not None:
                    call = self._threads.submit(getattr(target, name), *content)
                    call.add_done_callback(partial(self._answer, number))
                elif (reply := self._replies.pop(number, None)) is not None:
                    result, error = content
                    reply.set_result(result) if error is None else reply.set_exception(error)
        for number in list(self._replies):
            self._gone(number)

    def _call(self, name: str, *arguments: Any) -> "Future[Any]":
        number = next(self._numbers)
        reply = Future[Any]()
        # it arrives even if a coroutine that waited for it was cancelled
        reply.set_running_or_notify_cancel()
        self._replies[number] = reply
        try:
            self._send(number, name, arguments)
        except OSError:
            self._gone(number)
        return reply

    def _answer(self, number: int, call: "Future[Any]") -> None:
        error = call.exception()
        if error is not None and not isinstance(error, PeerGone):
            # traceback of the other process
            error.add_note("".join(traceback.format_exception(error)))
        with suppress(OSError):
            self._send(number, None, (None if error else call.result(), error))

    def _send(self, *message: object) -> None:
        packed = io.BytesIO()
        _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(message)
        with self._sending:
            self._connection.send_bytes(packed.getbuffer())

    def _gone(self, number: int) -> None:
        if (reply := self._replies.pop(number, None)) is not None:
            reply.set_exception(PeerGone("the process at the other end has ended"))


class _Pickler(pickle.Pickler):
    """Pickles an error so that it arrives as text if it cannot be recreated from its arguments, or
    the process at the other end has not loaded the user's module that defines it."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, BaseException):
            return NotImplemented
        packed = b""
        with suppress(*_DOES_NOT_PICKLE):
            packed = pickle.dumps(value)
        return _recreated, (packed, f"{type(value).__name__}: {value}")


def _recreated(packed: bytes, text: str) -> Any:
    try:
        return pickle.loads(packed)
    except (*_DOES_NOT_PICKLE, EOFError):
        return RuntimeError(text)
