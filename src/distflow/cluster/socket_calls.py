"""Calls between two processes of a machine over a socket, in both directions, in the way of Ray's actors."""

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

_DOES_NOT_UNPICKLE = (pickle.PickleError, TypeError, AttributeError, ImportError, ValueError, KeyError, IndexError)


class PeerGone(RuntimeError):
    """The process at the other end has ended."""


class Peer:
    """The object at the other end of a socket: `peer.method.remote(...)` calls its method on a thread of that process,
    and returns a future.

    Only the processes themselves have the two ends of the socket, so what comes is unpickled.
    """

    def __init__(self, connection: Connection, num_threads: int) -> None:
        """num_threads: for calls from there that wait at once."""
        self._connection, self._sending = connection, threading.Lock()
        self._replies, self._numbers = dict[int, Future[Any]](), count()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="peer")

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def serve(self, target: object) -> None:
        """Calls from there get methods of `target`, until the process at the other end has ended."""
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
        number, reply = next(self._numbers), Future[Any]()
        self._replies[number] = reply
        try:
            self._send(number, name, arguments)
        except OSError:
            self._gone(number)
        return reply

    def _answer(self, number: int, call: "Future[Any]") -> None:
        error = call.exception()
        if error is not None and not isinstance(error, PeerGone):
            error.add_note("".join(traceback.format_exception(error)))  # of the other process
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
    """Of an error of the user's that could not be made again from its arguments, the text goes."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, BaseException):
            try:
                pickle.loads(pickle.dumps(value))
            except _DOES_NOT_UNPICKLE:
                return RuntimeError, (f"{type(value).__name__}: {value}",)
        return NotImplemented
