"""Calls between two ends of a socket: both ways, many at once, errors, and an end that is gone."""

import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
import pytest

from distflow.cluster.peer import Peer, PeerGone
from distflow.cluster.remote_calls import reply
from distflow.errors import UserError


class OfTwoArguments(Exception):
    """Cannot be made again from what it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class OfAModuleThatIsNotHere(Exception):
    """Can be made again only in the process that raised it, whose calls have threads named so."""

    def __reduce__(self) -> object:
        return _made_where_it_is_known, ()


def _made_where_it_is_known() -> Exception:
    if threading.current_thread().name.startswith("peer"):
        return OfAModuleThatIsNotHere()
    raise ModuleNotFoundError("No module named 'my_engine'")


class Target:
    def __init__(self) -> None:
        self.opened = threading.Event()

    def double(self, values: np.ndarray) -> np.ndarray:
        return 2 * values

    def open(self) -> None:
        self.opened.set()

    def wait(self) -> str:
        assert self.opened.wait(60)
        return "opened"

    def refuse(self) -> None:
        raise UserError("not like this")

    def refuse_oddly(self) -> None:
        raise OfTwoArguments("this", "that")

    def refuse_from_afar(self) -> None:
        time.sleep(0.3)  # a call that ends at once is answered by the thread that reads
        raise OfAModuleThatIsNotHere("no memory")


class Ends:
    """Two that serve each other in one process."""

    def __init__(self) -> None:
        self._sockets = socket.socketpair()
        self.target = Target()
        self.here, self.there = (Peer(Connection(os.dup(own.fileno())), 2) for own in self._sockets)
        self._threads = [
            threading.Thread(target=peer.serve, args=(self.target,))
            for peer in (self.here, self.there)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """As the end of a process does."""
        for own in self._sockets:
            with suppress(OSError):  # it is closed already
                own.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.target.open()
    made.close()


def test_both_ends_call_each_other(ends):
    values = np.arange(10**6)  # more than a socket holds
    assert (reply(ends.here.double.remote(values)) == 2 * values).all()
    assert (reply(ends.there.double.remote(values)) == 2 * values).all()


def test_a_call_that_waits_keeps_no_other_back(ends):
    waiting = ends.here.wait.remote()
    assert reply(ends.here.open.remote()) is None
    assert reply(waiting) == "opened"


def test_errors_come_as_they_are_with_the_traceback_of_the_other_process(ends):
    with pytest.raises(UserError, match="^not like this") as told:
        reply(ends.here.refuse.remote())
    assert str(told.value) == "not like this" and "in refuse" in told.value.__notes__[0]
    with pytest.raises(RuntimeError, match="^OfTwoArguments: this and that$"):
        reply(ends.here.refuse_oddly.remote())


def test_an_error_of_a_module_that_only_the_other_process_has_comes_as_text(ends):
    with pytest.raises(RuntimeError, match="^OfAModuleThatIsNotHere: no memory$"):
        ends.here.refuse_from_afar.remote().result(20)
    assert reply(ends.here.open.remote()) is None


def test_calls_of_an_end_that_is_gone_fail(ends):
    waiting = ends.here.wait.remote()
    ends.close()
    with pytest.raises(PeerGone):
        waiting.result(60)
    with pytest.raises(PeerGone):
        ends.here.open.remote().result(60)
