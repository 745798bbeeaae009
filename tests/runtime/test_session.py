"""The services of a run: entered together, left together, and their ends hide no earlier error."""

import asyncio
from pathlib import Path

import pytest

from distflow.rewards.router import RewardRouter
from distflow.runtime.session import Session
from tests.e2e.runs import Playground


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    return Playground(tmp_path, num_rows=4)


def test_leaving_cancels_work_before_it_closes_what_the_work_needs(ground: Playground) -> None:
    _, parts = ground.parts("grpo", "trust.certify_rewards=false")
    seen: list[str] = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            assert parts.rewards is not None
            seen.append("closed" if parts.rewards.pool._closed else "open")

    with pytest.raises(KeyError, match="the first"), Session(parts) as session:
        future = session.start(works())
        session.call(asyncio.sleep(0))
        raise KeyError("the first")
    assert seen == ["open"] and future.cancelled()
    assert parts.rewards is not None and parts.rewards.pool.pids() == []


def test_a_service_that_cannot_end_is_told_only_where_nothing_failed_before(
    ground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = RewardRouter.close

    def fails(self: RewardRouter) -> None:
        close(self)
        raise OSError("the second")

    monkeypatch.setattr(RewardRouter, "close", fails)
    for first, told in ((KeyError("the first"), "the first"), (None, "the second")):
        _, parts = ground.parts("grpo", "trust.certify_rewards=false")
        with pytest.raises((KeyError, OSError), match=told), Session(parts):
            if first is not None:
                raise first


def test_a_loop_that_dies_ends_the_session_and_answers_the_learner(ground: Playground) -> None:
    _, parts = ground.parts("grpo", "trust.certify_rewards=false")

    async def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="has ended"), Session(parts) as session:
        waiting = session.start(asyncio.Event().wait())
        session.start(exits())
        waiting.result(20)
    assert parts.rewards is not None
    parts.rewards.close()
