"""A thread that computes for others while it waits: nobody waits for it in vain, whatever ends or
interrupts it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from distflow.rollout.engine import Stretch
from distflow.runtime.rollout_loop.rollout_services import HostThread

WITHIN_S = 60


def until(wanted_back: Callable[[], bool]) -> None:
    while not wanted_back():
        time.sleep(0.001)


def until_it_waits(host: HostThread) -> None:
    while not host.waits:
        time.sleep(0.001)


def until_it_computes(host: HostThread, beside: int = 0) -> None:
    """beside: others that have asked meanwhile."""
    while host._loan is None or host._loans.qsize() < beside:
        time.sleep(0.001)


def asks_later(host: HostThread, stretch: Stretch) -> bool:
    until_it_waits(host)
    return host.compute(stretch)


@contextmanager
def other_threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_it_computes_what_is_asked_while_it_waits_and_then_has_its_result():
    host, waited, idents = HostThread(), Future[list[bool]](), list[int]()

    def asks() -> None:
        until_it_waits(host)
        waited.set_result(
            [host.compute(lambda back: idents.append(threading.get_ident())) for _ in range(3)]
        )

    with other_threads() as pool:
        pool.submit(asks)
        assert host.wait(lambda: waited) == [True] * 3

    assert idents == [threading.get_ident()] * 3


def test_one_that_does_not_wait_computes_nothing():
    host = HostThread()
    with other_threads() as pool:
        assert pool.submit(host.compute, until).result(WITHIN_S) is False
        done: Future[int] = Future()
        done.set_result(1)
        assert host.wait(lambda: done) == 1
        assert pool.submit(host.compute, until).result(WITHIN_S) is False


def test_on_another_thread_waiting_is_only_waiting():
    host = HostThread()
    waited = Future[int]()

    with other_threads() as pool:
        waiting = pool.submit(host.wait, lambda: waited)
        assert pool.submit(host.compute, until).result(WITHIN_S) is False
        waited.set_result(2)
        assert waiting.result(WITHIN_S) == 2


def test_a_stretch_is_told_when_the_thread_is_wanted_back():
    host, waited = HostThread(), Future[int]()

    def ends() -> None:
        until_it_computes(host)
        waited.set_result(3)

    with other_threads() as pool:
        asked = pool.submit(asks_later, host, until)
        pool.submit(ends)
        assert host.wait(lambda: waited) == 3
        assert asked.result(WITHIN_S) is True


@pytest.mark.parametrize("error", [KeyError("it"), KeyboardInterrupt(), SystemExit(3)])
def test_what_it_waited_for_and_what_it_computed_may_raise(error):
    def fails(back: Callable[[], bool]) -> None:
        raise error

    host, waited, fine = HostThread(), Future[int](), Future[int]()
    with other_threads() as pool:
        pool.submit(asks_later, host, fails)
        with pytest.raises(type(error)):
            host.wait(lambda: waited)
        waited.set_exception(error)
        with pytest.raises(type(error)):
            host.wait(lambda: waited)
        fine.set_result(4)
        assert host.wait(lambda: fine) == 4


@pytest.mark.parametrize("computes", [False, True])
def test_an_interrupt_while_it_waits_or_computes_leaves_nobody_waiting(computes):
    host = HostThread()

    def interrupts() -> None:
        if computes:
            until_it_computes(host, beside=2)
        else:
            until_it_waits(host)
        os.kill(os.getpid(), signal.SIGINT)

    with other_threads() as pool:
        asked = [pool.submit(asks_later, host, until) for _ in range(3 * computes)]
        with pytest.raises(KeyboardInterrupt):
            pool.submit(interrupts)
            host.wait(Future[int])
        assert sorted(one.result(WITHIN_S) for one in asked) == [False, False, True][: len(asked)]


def test_a_storm_of_stretches_and_short_waits_loses_none():
    """Each stretch is computed here, or handed back; none is computed twice, and nobody waits for
    ever."""
    host, over, done, refused = HostThread(), threading.Event(), list[int](), list[int]()

    def asks(number: int) -> None:
        while not over.is_set():
            (
                done if host.compute(lambda back: done.append(threading.get_ident())) else refused
            ).append(number)

    with other_threads() as pool:
        asking = [pool.submit(asks, number) for number in range(4)]
        for _ in range(300):
            assert host.wait(lambda: pool.submit(int, 1)) == 1
        over.set()
        for one in asking:
            one.result(WITHIN_S)

    computed = sum(1 for entry in done if entry == threading.get_ident())
    assert computed == len(done) - computed > 0 and refused
