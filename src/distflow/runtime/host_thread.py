"""A thread that waits, and computes for others meanwhile.

A process in which training and generation take turns needs one OpenMP pool, that of the thread that trains: a second
one slows the first down (see `rollout/embedded/loop.py`).
"""

import concurrent.futures
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

from distflow.rollout.engine import Stretch

T = TypeVar("T")


class Abandoned(BaseException):
    """Raised in the thread by another: what it computes does not end, and nobody waits for that any more."""


@dataclass(eq=False)
class _Loan:
    """taken: the thread has computed it, or a part; set before `ended`. abandoned: it was told to leave it."""

    stretch: Stretch
    taken: bool = False
    abandoned: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class HostThread:
    """A `Host`: the thread that makes it.

    It computes only inside `wait`, and no longer than what it waits for lasts, but for one decode step: so nobody ever
    waits for a thread that does something else.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._lock = threading.Lock()  # guards the three below: which loans are taken, and what may be abandoned
        self.waits = False
        self._asked = set[_Loan]()
        self._loan: _Loan | None = None
        self._loans: SimpleQueue[_Loan | None] = SimpleQueue()  # None: look again

    def wait(self, begin: "Callable[[], concurrent.futures.Future[T]]") -> T:
        """Begin what is waited for, and return its result, or raise what it raised. On another thread nothing is
        computed meanwhile."""
        if threading.get_ident() != self._ident:
            return begin().result()
        try:  # an interrupt may come at any moment
            with self._lock:
                self.waits = True
            future = begin()
            future.add_done_callback(lambda _: self._loans.put(None))
            while not future.done():
                self._compute_next(future)
        finally:
            with self._lock:
                self.waits = False
                asked, self._asked = self._asked, set[_Loan]()
            while not self._loans.empty():
                self._loans.get()
            for loan in asked:  # an interrupt may have lost one that had left the queue
                loan.ended.set()
        return future.result()

    def compute(self, stretch: Stretch) -> bool:
        """See `Host`; for other threads."""
        loan = _Loan(stretch)
        with self._lock:
            if not self.waits:
                return False
            self._asked.add(loan)
            self._loans.put(loan)
        loan.ended.wait()
        with self._lock:
            self._asked.discard(loan)
        return loan.taken

    def abandon(self, within_s: float) -> bool:
        """Interrupt what it computes. False where that has not ended `within_s` seconds later: only Python code can be
        interrupted."""
        with self._lock:
            loan = self._loan
            if loan is not None:
                loan.abandoned = True
                self._interrupt(Abandoned)
        return loan is None or loan.ended.wait(within_s)

    def _compute_next(self, future: "concurrent.futures.Future[T]") -> None:
        loan = self._loans.get()
        if loan is None:
            return
        try:
            with self._lock:
                self._loan, loan.taken = loan, True
            loan.stretch(future.done)
        except Abandoned:  # who did it has told those who wait
            pass
        finally:
            with self._lock:
                self._loan = None
                if loan.abandoned:
                    # One that comes too late. Not where there is none: from then on this thread looks for exceptions
                    # at every call, and a profiler or debugger never gets past the first one (CPython 3.11).
                    self._interrupt(None)
            loan.ended.set()

    def _interrupt(self, error: type[BaseException] | None) -> None:
        """Have it raise the error, or no longer one that it was to raise."""
        ident = ctypes.c_ulong(self._ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error) if error is not None else None)
