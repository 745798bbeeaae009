"""Reports on their way to the driver: none is lost, however slow the user's callbacks are."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distflow.cluster import reports_to_driver
from distflow.cluster.reports_to_driver import DriverOutput, Message, MessageQueue
from distflow.observe.writing.terminal_lines import TerminalLines
from distflow.runtime.callbacks import Callbacks, Caller


@pytest.mark.parametrize("is_asked", [False, True])
def test_at_the_end_all_reports_are_shown(monkeypatch, is_asked):
    """A request that is under way then may have come back without any."""

    def settled(found: list[Message]) -> Future[list[Message]]:
        reply: Future[list[Message]] = Future()
        reply.set_result(found)
        return reply

    queued, told = MessageQueue(), list[int]()
    for step in range(200):
        queued.append("on_step", step, {})
    coordinator = SimpleNamespace(
        messages=SimpleNamespace(remote=lambda timeout_s: settled(queued.fetch(timeout_s)))
    )
    monkeypatch.setattr(reports_to_driver, "reply_of", lambda ref, number: ref.result())

    def on_step(step: int, metrics: Any) -> None:
        told.append(step)

    output = DriverOutput(cast(TerminalLines, None), Caller(Callbacks(on_step), print), 0.0)
    output._asked = settled([]) if is_asked else None
    output.show(coordinator, last=True)
    assert told == list(range(200))
