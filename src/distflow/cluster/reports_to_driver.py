"""Forwards reports of workers to the driver's terminal and to the user's callbacks: the workers'
side, the queue in the coordinator, and the driver's side."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from distflow.cluster.remote_calls import COORDINATOR, future_of, reply, reply_of
from distflow.observe.writing.terminal_lines import TerminalLines
from distflow.runtime.callbacks import Callbacks, Caller
from distflow.runtime.run_recorder import make_view
from distflow.runtime.spec import Spec
from distflow.runtime.worker_place import Place

Message = tuple[str, tuple[Any, ...]]
"""A method of the driver's view or callbacks, and its arguments."""

_CALLBACKS = tuple(field.name for field in fields(Callbacks))
_LOOKS_EVERY_S = 0.5
_MAX_MESSAGES = 10_000


class MessageSender:
    """Sends messages to the driver through the coordinator, each once those before have arrived."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="messages")

    def __call__(self, method: str, *arguments: Any) -> None:
        self._thread.submit(self._send, method, *arguments)

    def flush(self) -> None:
        """Wait until all messages have arrived, or the coordinator's process is gone."""
        self._thread.submit(lambda: None).result()

    def _send(self, method: str, *arguments: Any) -> None:
        reply(self._coordinator.add_message.remote(method, *arguments))


def remote_callbacks(send: MessageSender, place: Place) -> Callbacks:
    """Callbacks of the leading worker, which call the user's functions in the driver."""
    if not place.leads:
        return Callbacks()
    return Callbacks(*(partial(send, name) for name in _CALLBACKS))


class RemoteView:
    """The driver's `TerminalLines`, for a worker; one that does not lead shows only notes."""

    def __init__(self, send: MessageSender, place: Place) -> None:
        self._send = send
        self._place = place

    def note(self, kind: str, message: str) -> None:
        where = ""
        if not self._place.leads:
            where = f"worker {self._place.rank}: "
        self._send("note", kind, where + message)

    def __getattr__(self, name: str) -> Any:
        return partial(self._send_if_leading, name)

    def _send_if_leading(self, method: str, *arguments: Any) -> None:
        if self._place.leads:
            self._send(method, *arguments)


class MessageQueue:
    """The messages that the driver has not fetched yet. Any method may be called on any thread."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque(maxlen=_MAX_MESSAGES)
        self._changed = threading.Condition()

    def append(self, method: str, *arguments: Any) -> None:
        with self._changed:
            self._messages.append((method, arguments))
            self._changed.notify_all()

    def fetch(self, timeout_s: float) -> list[Message]:
        """The messages since the last call; waits up to `timeout_s` for one."""
        with self._changed:
            if not self._messages:
                self._changed.wait(timeout_s)
            found = list(self._messages)
            self._messages.clear()
            return found


@contextmanager
def shown(
    spec: Spec, total_steps: int, callbacks: Callbacks, waits_s: float = 2 * _LOOKS_EVERY_S
) -> "Iterator[DriverOutput]":
    """Shows what workers report meanwhile in this terminal. waits_s: see `DriverOutput`."""
    view = make_view(spec, total_steps)
    try:
        yield DriverOutput(
            view, Caller(callbacks, lambda message: view.note("warning", message)), waits_s
        )
    finally:
        view.close()


class DriverOutput:
    """Passes workers' reports to the driver's terminal and to the user's callbacks."""

    def __init__(self, view: TerminalLines, caller: Caller, waits_s: float) -> None:
        """waits_s: how long to wait for the next report."""
        self._view = view
        self._caller = caller
        self._waits_s = waits_s
        self._asked: Any = None

    def show(self, coordinator: Any, last: bool = False) -> None:
        """Show new reports, waiting a moment for them. Raises WorkerDied if the coordinator is
        gone. last: no more are sent, and all are shown."""
        while True:
            is_new = self._asked is None
            self._asked = self._asked or coordinator.messages.remote(
                0.0 if last else _LOOKS_EVERY_S
            )
            if not last and not wait([future_of(self._asked)], self._waits_s).done:
                return  # its heartbeat reports whether it responds at all

            asked = self._asked
            self._asked = None
            self.pass_on(reply_of(asked, COORDINATOR))
            if is_new or not last:
                return

    def note_stop(self, name: str) -> None:
        """name: of the first signal."""
        self._view.note(
            "info", f"{name}: finishing this step, then exiting; a second signal exits at once"
        )

    def pass_on(self, messages: Sequence[Message]) -> None:
        for method, arguments in messages:
            if method in _CALLBACKS:
                self._caller.call(method, *arguments)
            else:
                getattr(self._view, method)(*arguments)
