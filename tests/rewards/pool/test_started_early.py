"""Pools that are started before they are asked for."""

from pathlib import Path

import pytest

from distflow.config.keys.reward import RewardPart
from distflow.errors import UserError
from distflow.rewards.pool import domain_pools
from distflow.rewards.pool.domain_pools import (
    Patience,
    RewardSettings,
    pool_settings,
    started_early,
    take_pool,
)
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from tests.rewards.routers import make_router, pids_of

FORMAT = {"default": [("format", 1.0)]}
REWARDS = RewardSettings(
    {"default": [RewardPart("format")]}, Patience(timeout_s=5.0, num_workers=1)
)
SETTINGS = pool_settings(REWARDS)["default"]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def pools(monkeypatch):
    """The pools that were started, in their order."""
    pools: list[RewardPool] = []

    def started(settings: PoolSettings) -> RewardPool:
        pools.append(RewardPool(settings))
        return pools[-1]

    monkeypatch.setattr(domain_pools, "RewardPool", started)
    return pools


def test_the_router_of_the_same_settings_takes_it_over_once(pools):
    with started_early(SETTINGS):
        with make_router(FORMAT, timeout_s=5.0, num_workers=1, max_response_length=9) as router:
            assert pools == [router.pools.of("default", "format")]
            pids = pids_of(router.pools)
            take_pool(SETTINGS).close()
            assert len(pools) == 2
        assert pids and not any(map(is_there, pids)), "who took it closed it"


def test_other_settings_get_their_own_and_what_nobody_takes_is_closed(pools):
    with started_early(SETTINGS):
        take_pool(SETTINGS._replace(timeout_s=7.0)).close()
    assert sorted(pool.timeout_s for pool in pools) == [5.0, 7.0]
    assert [pids_of(pool) for pool in pools] == [[], []]


def test_one_that_could_not_be_loaded_ahead_is_tried_again(tmp_path):
    """By what a run imports first it may become loadable. What nobody asks for is nobody's
    error."""
    file = tmp_path / "reward.py"
    settings = SETTINGS._replace(functions={"custom": f"{file}:compute_score"})
    with started_early(settings), pytest.raises(UserError, match="cannot be loaded"):
        take_pool(settings)
    with started_early(settings):
        pass
