"""The services of a run: entered together, left together, and their ends hide no earlier error."""

import asyncio

import pytest

from distflow.rewards.router import RewardRouter
from distflow.runtime.resources import Resources, build_resources
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from tests.e2e.runs import Playground
from tests.rewards.routers import pids_of


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=4)


def resources_of(ground: Playground) -> Resources:
    _, spec = ground.spec("grpo")
    return build_resources(spec.factories, spec.plan.ranks[0])


def test_leaving_cancels_work_before_it_closes_what_the_work_needs(ground):
    resources = resources_of(ground)
    seen: list[str] = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            assert resources.reward_fn is not None
            (pool,) = resources.reward_fn.pools._pools.values()
            seen.append("closed" if pool.closed else "open")

    with pytest.raises(KeyError, match="the first"), RolloutServices(resources, None) as session:
        future = session.start(works())
        session.call(asyncio.sleep(0))
        raise KeyError("the first")

    assert seen == ["open"] and future.cancelled()
    assert resources.reward_fn is not None and pids_of(resources.reward_fn.pools) == []


def test_a_service_that_cannot_end_is_told_only_where_nothing_failed_before(ground, monkeypatch):
    close = RewardRouter.close

    def fails(self: RewardRouter) -> None:
        close(self)
        raise OSError("the second")

    monkeypatch.setattr(RewardRouter, "close", fails)
    for first, told in ((KeyError("the first"), "the first"), (None, "the second")):
        resources = resources_of(ground)
        with pytest.raises((KeyError, OSError), match=told), RolloutServices(resources, None):
            if first is not None:
                raise first


def test_a_loop_that_dies_ends_the_session_and_fails_the_trainer_s_call(ground):
    resources = resources_of(ground)

    async def exits() -> None:
        raise SystemExit(3)

    with (
        pytest.raises(RuntimeError, match="has ended"),
        RolloutServices(resources, None) as session,
    ):
        waiting = session.start(asyncio.Event().wait())
        session.start(exits())
        waiting.result(20)

    assert resources.reward_fn is not None
    resources.reward_fn.close()
