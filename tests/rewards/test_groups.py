"""Async and batched rewards: handed all answers to a prompt at a time, judged as one by one."""

import asyncio

import pytest

from distflow.data.sample import Sample, Segment
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import Error, RewardResult, Score, Timeout
from tests.patience import at_some_deadline
from tests.rewards.routers import make_router

SOURCE = """
import asyncio, os, time

arrived = 0

async def waiting(solution_str, extra_info):
    global arrived
    arrived += "together" in extra_info
    while arrived < extra_info.get("together", 0):
        await asyncio.sleep(0.01)
    await asyncio.sleep(extra_info.get("sleeps", 0))
    if solution_str == "raise":
        raise KeyError("no such answer")
    return {"score": float(len(solution_str)), "acc": 0}

async def blocking(solution_str):
    time.sleep(30)

def ranked(solution_strs, ground_truths, extra_infos):
    assert len(solution_strs) == len(ground_truths) == len(extra_infos)
    order = sorted(solution_strs)
    return [float(order.index(text)) for text in solution_strs]

async def ranked_async(solution_strs):
    await asyncio.sleep(0)
    return ranked(solution_strs, solution_strs, solution_strs)

def mixed(solution_strs):
    return [1.0, {"score": 0.5, "why": "so"}, None, float("nan")][: len(solution_strs)]

def short(solution_strs):
    return [1.0]

def tensor(solution_strs, **kwargs):
    import torch
    return torch.arange(len(solution_strs), dtype=torch.float32)

def leaves(solution_strs):
    os._exit(3)
"""
NAMES = ("waiting", "blocking", "ranked", "ranked_async", "mixed", "short", "tensor", "leaves")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def pool(file):
    pool = RewardPool(
        PoolSettings({name: f"{file}:{name}" for name in NAMES}, num_workers=1, timeout_s=20.0)
    )
    yield pool
    pool.close()


def ask(
    pool: RewardPool, name: str, texts: list[str], timeout_s: float | None = None, **extra
) -> list[RewardResult]:
    asked = [
        {"data_source": "d", "solution_str": t, "ground_truth": "g", "extra_info": extra}
        for t in texts
    ]
    return asyncio.run(pool.score_group(name, asked, timeout_s))


def test_the_pool_knows_which_take_groups(pool):
    assert pool.takes_groups == set(NAMES)


def test_async_ones_wait_together_and_fail_alone(pool):
    """Each waits for all others to have begun."""
    reward_results = ask(pool, "waiting", ["a", "raise", "abc", *["abcd"] * 20], together=23)
    assert reward_results[0] == Score(1.0, {"acc": 0.0}) and reward_results[2] == Score(
        3.0, {"acc": 0.0}
    )
    assert (
        isinstance(reward_results[1], Error)
        and "KeyError: 'no such answer' (at rewards.py:" in reward_results[1].reason
    )


def test_an_async_one_has_a_deadline_of_its_own(pool):
    """Else both would be killed after the time of two."""

    def check(deadline_s: float) -> None:
        assert ask(pool, "waiting", ["a", "b"], deadline_s, sleeps=600) == [Timeout(deadline_s)] * 2

    at_some_deadline(check, 0.3, 10.0)
    assert ask(pool, "waiting", ["a"]) == [Score(1.0, {"acc": 0.0})]


def test_one_that_blocks_is_killed(pool):
    assert ask(pool, "blocking", ["a", "b"], 0.2) == [Timeout(0.4), Timeout(0.4)]
    assert ask(pool, "waiting", ["a"]) == [Score(1.0, {"acc": 0.0})]


@pytest.mark.parametrize("name", ["ranked", "ranked_async"])
def test_a_batched_one_sees_all_answers_to_a_prompt(pool, name):
    assert ask(pool, name, ["c", "a", "b"]) == [Score(2.0), Score(0.0), Score(1.0)]


def test_what_a_batched_one_may_return(pool):
    first, second, third, fourth = ask(pool, "mixed", ["a", "b", "c", "d"])
    assert (first, second) == (Score(1.0), Score(0.5, {"why": "so"}))
    assert isinstance(third, Error) and "None" in third.reason
    assert isinstance(fourth, Error) and "nan" in fourth.reason
    assert ask(pool, "tensor", ["a", "b"]) == [Score(0.0), Score(1.0)]

    for reward_result in ask(pool, "short", ["a", "b"]):
        assert (
            isinstance(reward_result, Error)
            and "it returned a list of 1 for 2 responses" in reward_result.reason
        )


def test_a_crash_is_an_error_for_the_whole_group(pool):
    reward_results = ask(pool, "leaves", ["a", "b"])
    assert [
        isinstance(v, Error) and "exited with status 3, twice" in v.reason for v in reward_results
    ] == [True, True]


def test_the_router_hands_them_the_samples_of_their_domain(file):
    functions = {
        "default": [(f"{file}:ranked", 1.0), ("exact_match", 10.0)],
        "other": [(f"{file}:waiting", 1.0)],
    }

    def sample(response: str, domain: str = "default") -> Sample:
        segments = [Segment("prompt", (1,)), Segment("environment", (1,))]
        return Sample(
            "0-0", 0, segments, response=response, ground_truth="b", domain=domain, extra_info={}
        )

    with make_router(functions, timeout_s=20.0, num_workers=1, max_response_length=8) as router:
        judged = asyncio.run(router([sample("c"), sample("zz", "other"), sample("b"), sample("a")]))
    assert [
        judgement.reward_result.value
        for judgement in judged
        if isinstance(judgement.reward_result, Score)
    ] == [
        2,
        2,
        11,
        0,
    ]
