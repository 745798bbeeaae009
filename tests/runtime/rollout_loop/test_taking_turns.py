"""An engine that computes on the waiting thread of the session: the same responses, and nobody
waits in vain."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from distflow.data.sample import Segment
from distflow.rollout.embedded import EmbeddedEngine
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.engine_watch import Deadline
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.scheduling.group_states import Version
from tests.rollout.drive import (
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
)

REQUESTS = [request_of(prompt_of(4 + row), (0, 1), row=row, max_tokens=15) for row in range(3)]
LONG = [request_of(prompt_of(4), (0,), max_tokens=480)]


class Watched:
    """An engine in a session; which threads its model ran on, and with how many of torch."""

    def __init__(
        self, *, takes_turns: bool = True, timeout_s: float = 60.0, **options: Any
    ) -> None:
        self.model = make_model()
        self.engine: EmbeddedEngine = make_engine(self.model, **options)
        self.threads: set[tuple[bool, int]] = set()
        self.computed_on: set[threading.Thread] = set()
        self.model.model.norm.register_forward_hook(self._note)
        self.does: Callable[[], None] = lambda: None
        self.hurry = threading.Event()
        parts = Resources(None, (), {}, 0, rollout=self.engine)  # type: ignore[arg-type]
        self.session = RolloutServices(
            parts, None, 1.0, Deadline(timeout_s, None), takes_turns=takes_turns
        )

    def _note(self, *_: object) -> None:
        self.computed_on.add(threading.current_thread())
        self.threads.add(
            (threading.current_thread() is threading.main_thread(), torch.get_num_threads())
        )
        self.does()

    def slowly(self) -> None:
        """From the 20th token on each step takes a while, until it is to hurry: whoever looks on
        comes in time."""
        if self.engine.num_generated_tokens >= 20 and not self.hurry.is_set():
            time.sleep(0.02)

    def ask(self, requests: Any = REQUESTS) -> list[tuple[Segment, ...]]:
        return self.session.call(generate_all(self.session.resources.rollout, requests))


@pytest.fixture
def two_threads():
    """Of the thread that enters, as `trainer.num_threads` sets them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_it_computes_here_while_a_coroutine_or_a_function_is_waited_for(two_threads):
    watched = Watched(num_threads=1)
    with watched.session as session:
        assert watched.ask() == expected()
        elsewhere = session.wait_for(
            lambda: session.start(generate_all(watched.engine, REQUESTS)).result()
        )
        assert elsewhere == expected()

    assert watched.threads == {(True, 2)}


def test_with_a_thread_of_its_own_it_computes_there_with_its_own_threads(two_threads):
    watched = Watched(takes_turns=False, num_threads=1)
    with watched.session as session:
        assert watched.ask() == expected()
        future = session.start(generate_all(watched.engine, REQUESTS))
        assert session.wait_for(future.result) == expected()
        assert torch.get_num_threads() == 2

    assert watched.threads == {(False, 1)}


class Expected:
    """Equal to the answers to requests, whatever number of threads the sums in them were split
    over."""

    def __init__(self, requests: Any = REQUESTS) -> None:
        self.results = run_all(make_engine(make_model()), requests)

    def __eq__(self, others: object) -> bool:
        assert isinstance(others, list)
        pairs = zip(self._generations(self.results), self._generations(others), strict=True)
        return all(
            one.token_ids == other.token_ids
            and one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-5)
            for one, other in pairs
        )

    def _generations(self, results: list[tuple[Segment, ...]]) -> list[Segment]:
        return [generation for result in results for generation in result]


@cache
def expected() -> Expected:
    return Expected()


def test_the_thread_is_taken_when_it_waits_and_given_back_when_what_it_waits_for_is_there():
    """What runs begins elsewhere, comes here and goes on elsewhere; the tokens are the same."""
    watched = Watched()
    watched.does = watched.slowly

    def until_it_computes_here() -> None:
        while not any(here for here, _ in list(watched.threads)):
            time.sleep(0.001)

    with watched.session as session:
        future = session.start(generate_all(watched.engine, LONG))
        while watched.engine.num_generated_tokens < 20:
            time.sleep(0.001)
        assert {here for here, _ in list(watched.threads)} == {False}
        session.wait_for(until_it_computes_here)
        watched.threads.clear()
        watched.hurry.set()
        assert future.result(60) == Expected(LONG)
        assert {here for here, _ in watched.threads} == {False}


def test_a_step_that_fails_fails_its_requests_and_the_next_are_served():
    watched = Watched()

    def explode() -> None:
        if watched.engine.num_generated_tokens > 10:
            raise ArithmeticError("planted")

    watched.does = explode
    with watched.session:
        with pytest.raises(ArithmeticError, match="planted"):
            watched.ask()
        watched.does = lambda: None
        assert watched.ask() == expected()


def test_a_pause_an_update_and_a_resume_pass_while_it_computes_here():
    watched = Watched()
    watched.does = watched.slowly
    weights = list(make_model(seed=3).named_parameters())

    async def story() -> list[tuple[Segment, ...]]:
        engine = watched.session.resources.rollout
        assert engine is not None
        task = asyncio.create_task(generate_all(engine, LONG))
        while watched.engine.num_generated_tokens < 20:
            await asyncio.sleep(0.001)
        await engine.pause()
        before = watched.engine.num_generated_tokens
        await asyncio.sleep(0.05)
        assert watched.engine.num_generated_tokens == before
        await engine.load_weights(Version(0, 1), weights)
        watched.hurry.set()
        await engine.resume()

        return await task

    with watched.session as session:
        (result,) = session.call(story())
    assert set(result[0].versions) == {0, 1}
    assert {here for here, _ in watched.threads} == {True}


@pytest.mark.parametrize("entered_by", ["call", "wait_for"])
def test_an_interrupt_in_a_step_ends_the_session(entered_by):
    watched = Watched()

    struck: list[int] = []

    def interrupt() -> None:
        watched.slowly()
        here = threading.current_thread() is threading.main_thread()
        if here and watched.engine.num_generated_tokens >= 30 and not struck:
            struck.append(watched.engine.num_generated_tokens)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    watched.does = interrupt
    with pytest.raises(KeyboardInterrupt), watched.session as session:
        if entered_by == "call":
            watched.ask(LONG)
        else:
            future = session.start(generate_all(watched.engine, LONG))
            session.wait_for(future.result)

    assert watched.engine.num_generated_tokens - struck[0] in (0, 1)


def test_what_is_waited_for_may_fail():
    def fails() -> None:
        raise KeyError("it")

    with Watched().session as session, pytest.raises(KeyError, match="it"):
        session.wait_for(fails)
