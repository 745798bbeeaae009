"""Calls of the local launcher, which works without Ray: a `Peer` calls the object at the other end
of a socket with the interface of Ray's actors."""

import io
import pickle
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

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
