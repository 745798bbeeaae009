"""Each domain has its own verifiers: what one of them does costs the others nothing."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from distflow.config.keys.reward import RewardPart
from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.rewards.pool.domain_pools import Patience, Pools, RewardSettings
from distflow.rewards.reward_results import Error, Score, Timeout
from distflow.rewards.router import RewardOutcome, RewardRouter
from tests.rewards.routers import make_router, pids_of

FAULTY = str(Path(__file__).with_name("faulty_verifiers.py"))
CUSTOM = [("custom", 1.0)]
DEADLINE_S = 1.5


def sample(domain: str, what: str, **extra: object) -> Sample:
    segments = [Segment("prompt", (1,)), Segment("environment", (1,))]
    return Sample(
        "0-0", 0, segments, response=what, ground_truth="", domain=domain, extra_info=extra
    )


def router_of(*domains: str, **settings: object) -> RewardRouter:
    settings = {"timeout_s": DEADLINE_S, "num_workers": 1, "max_response_length": 9, **settings}
    return make_router(dict.fromkeys(domains, CUSTOM), custom=(FAULTY, "compute_score"), **settings)  # type: ignore[arg-type]


def judge(router: RewardRouter, samples: Sequence[Sample]) -> list[RewardOutcome]:
    return asyncio.run(router(samples))


@pytest.mark.slow
def test_a_hang_in_one_domain_delays_no_verdict_of_another():
    """The hanging one has more to judge than it has places for, and hangs inside C code for as long
    as it is let."""

    async def both(router: RewardRouter) -> None:
        hanging = asyncio.create_task(router([sample("broken", "hang in c") for _ in range(3)]))
        await asyncio.sleep(0.2)  # every place of that domain hangs

        for _ in range(3):
            judged = await router([sample("sums", "echo", value=1) for _ in range(3)])
            assert [judgement.reward_result for judgement in judged] == [Score(1.0)] * 3

        assert not hanging.done()
        hanging.cancel()

    with router_of("broken", "sums", timeout_s=120.0) as router:
        asyncio.run(both(router))


def test_domains_that_neither_functions_nor_settings_name_share_the_places_of_the_default_one():
    with router_of("default", "sums", domains={"slow": Patience(7.0, 1)}) as router:
        pools = router.pools
        default, sums, slow, elsewhere = (
            pools.of(domain, "custom") for domain in ("default", "sums", "slow", "elsewhere")
        )
        assert sums is not default is elsewhere
        assert slow not in (default, sums)
        assert (slow.timeout_s, sums.timeout_s) == (7.0, DEADLINE_S)
        assert len(pids_of(pools)) == 3
        assert judge(router, [sample("elsewhere", "echo", value=2)])[0].reward_result == Score(2.0)


def test_a_domain_has_its_own_deadline():
    with router_of("a", "b", timeout_s=60.0, domains={"b": Patience(0.3, 1)}) as router:
        reward_results = judge(
            router, [sample("a", "sleep", seconds=0.6), sample("b", "sleep", seconds=60)]
        )
        assert [judgement.reward_result for judgement in reward_results] == [
            Score(1.0),
            Timeout(0.3),
        ]


@pytest.mark.slow
def test_a_function_that_hangs_on_every_response_is_given_up(tmp_path):
    """After a number of scores, not a whole group: here in time for a group that would take ten
    minutes. One that has returned before is not given up."""
    settings = {"timeout_s": 0.3, "give_up_after": 4}
    with router_of("a", **settings) as router:
        many = [sample("a", "sleep", seconds=60) for _ in range(2000)]
        with pytest.raises(UserError) as raised:
            judge(router, many)
        assert "'custom'" in str(raised.value) and f"{FAULTY}:compute_score" in str(raised.value)
        assert "none of its first 4 calls returned within 0.3 s (reward.timeout_s)" in str(
            raised.value
        )
        assert "the response 'sleep'" in str(raised.value)
        with pytest.raises(UserError, match=r"'custom' .* calls .* 0\.3 s"):
            judge(router, many[:1])

    with router_of("a", **settings) as router:
        judged = judge(router, [sample("a", "echo", value=2), *many[:5]])
        assert [each.reward_result for each in judged] == [Score(2.0), *[Timeout(0.3)] * 5]

    with router_of("a", **settings) as router:
        router.has_scored = True
        assert [each.reward_result for each in judge(router, many[:5])] == [Timeout(0.3)] * 5


def test_what_failed_is_asked_for_again_after_a_wait_that_doubles(tmp_path):
    patience = Patience(20.0, 1, retries=2, backoff_s=0.2)
    with router_of("a", "b", domains={"a": patience}) as router:
        flaky = [
            sample("a", "fails at first", file=str(tmp_path / f"{i}"), times=i) for i in range(4)
        ]
        began = time.monotonic()
        reward_results = [judgement.reward_result for judgement in judge(router, flaky)]
        took = time.monotonic() - began
        assert reward_results[:3] == [Score(1.0)] * 3 and isinstance(reward_results[3], Error)
        assert [len((tmp_path / f"{i}").read_text()) for i in range(4)] == [1, 2, 3, 3], (
            "nobody is asked more often"
        )
        assert took >= 0.2 + 0.4
        counts = router.call_counts.take().counts
        assert (counts["reward/retries"], counts["reward/errors"], counts["reward/calls"]) == (
            3 + 2,
            1,
            4,
        )
        (once,) = judge(router, [sample("b", "fails at first", file=str(tmp_path / "b"), times=1)])
        assert isinstance(once.reward_result, Error), "where nothing is said there is one try"


def test_a_batch_is_asked_for_again_as_a_whole(tmp_path):
    """Its answers are judged beside each other."""
    target = f"{FAULTY}:batch_that_fails_at_first"
    settings = {
        "timeout_s": 20.0,
        "num_workers": 1,
        "max_response_length": 9,
        "retries": 1,
        "backoff_s": 0.01,
    }
    with make_router({"default": [(target, 1.0)]}, **settings) as router:  # type: ignore[arg-type]
        asked = [sample("default", str(i), file=str(tmp_path / "calls")) for i in range(3)]
        assert [judgement.reward_result for judgement in judge(router, asked)] == [
            Score(0.0),
            Score(1.0),
            Score(2.0),
        ]

    assert (tmp_path / "calls").read_text() == "33", "twice, with all three"


def test_one_that_cannot_be_loaded_leaves_none_behind(monkeypatch):
    from distflow.rewards.pool.pool import RewardPool

    closed: list[RewardPool] = []
    close = RewardPool.close
    monkeypatch.setattr(RewardPool, "close", lambda pool: (closed.append(pool), close(pool)))
    functions = {"good": [RewardPart("format")], "bad": [RewardPart("no_such_module:score")]}
    with pytest.raises(UserError, match="no module 'no_such_module'"):
        Pools(RewardSettings(functions, Patience(5.0, 1)))
    assert closed and all(pool.closed and pids_of(pool) == [] for pool in closed)


def test_a_domain_without_a_function_is_told():
    with pytest.raises(UserError, match="domain 'b'"):
        Pools(
            RewardSettings({"a": [RewardPart("format")]}, Patience(5.0, 1), {"b": Patience(5.0, 1)})
        )


def test_a_function_is_asked_in_the_pool_of_the_domain_and_else_in_one_that_has_it():
    pools = Pools(
        RewardSettings(
            {"a": [RewardPart("format")], "b": [RewardPart("exact_match")]}, Patience(5.0, 1)
        )
    )
    told: list[str] = []
    pools.set_on_result(lambda name, arguments, reward_result: told.append(name))

    async def ask() -> None:
        for domain in ("a", "b", "elsewhere"):
            arguments = {
                "data_source": domain,
                "solution_str": "7",
                "ground_truth": "7",
                "extra_info": {},
            }
            assert await pools.call("exact_match", arguments) == Score(1.0)

    try:
        asyncio.run(ask())
        assert told == ["exact_match"] * 3
    finally:
        pools.close()
