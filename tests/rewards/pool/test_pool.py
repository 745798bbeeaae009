"""Faults 18 and 19, really injected: whatever a verifier does, it costs one verdict, and nothing is
left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import Error, RewardResult, Score, Timeout
from tests.patience import at_some_deadline, is_running
from tests.rewards.routers import make_router, pids_of

FAULTY = f"{Path(__file__).with_name('faulty_verifiers.py')}:compute_score"
SHORT_S = 0.4


def make_pool(**settings) -> RewardPool:
    return RewardPool(
        PoolSettings({"faulty": FAULTY}, **{"num_workers": 1, "timeout_s": 20.0, **settings})
    )


@pytest.fixture(scope="module")
def pool():
    pool = make_pool(memory_bytes=512 << 20)
    yield pool
    pool.close()


def judge(pool: RewardPool, what: str, timeout_s: float | None = None, **extra) -> RewardResult:
    return asyncio.run(pool.call("faulty", arguments(what, **extra), timeout_s))


def arguments(what: str, **extra) -> dict:
    return {"data_source": "d", "solution_str": what, "ground_truth": "g", "extra_info": extra}


def still_serves(pool: RewardPool) -> bool:
    return judge(pool, "echo", value=0.75) == Score(0.75)


def wait_until_gone(pids: list[int], limit_s: float = 60.0) -> list[int]:
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("what", ["hang in c", "hang with signals blocked"])
def test_a_hang_is_killed_at_its_deadline(pool, what):
    assert judge(pool, what, SHORT_S) == Timeout(SHORT_S)
    assert still_serves(pool)


def test_what_a_hanging_verifier_started_dies_with_it(pool, tmp_path):
    def check(deadline_s: float) -> None:
        assert judge(pool, "hang with a child", deadline_s, file=str(tmp_path / "pid")) == Timeout(
            deadline_s
        )
        assert (tmp_path / "pid").exists(), "it has started one by now"
        assert wait_until_gone([int((tmp_path / "pid").read_text())]) == []

    at_some_deadline(check, 1.0, 10.0)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("full memory", "ran out of memory"),
        ("exit 0", "exited with status 0"),
        ("exit 3", "exited with status 3"),
        ("sys exit", "exited with status 0"),
        ("kill self", "killed by SIGKILL"),
        ("segfault", "killed by SIGSEGV (the last words)"),
    ],
)
def test_a_crash_is_an_error_after_one_retry(pool, what, reason):
    reward_result = judge(pool, what)
    assert (
        isinstance(reward_result, Error)
        and reason in reward_result.reason
        and "twice" in reward_result.reason
    )
    assert still_serves(pool)


def test_a_crash_is_retried_once_in_a_fresh_process(pool, tmp_path):
    assert judge(pool, "crash once", file=str(tmp_path / "first")) == Score(0.25)
    assert isinstance(judge(pool, "count then exit", file=str(tmp_path / "count")), Error)
    assert (tmp_path / "count").read_text() == "xx"


def test_a_verdict_that_is_judged_again_is_counted(tmp_path):
    functions = {"default": [(FAULTY, 1.0)]}

    def sample(what: str) -> Sample:
        about = {"file": str(tmp_path / "file"), "value": 1.0}
        return Sample("0-0", 0, [Segment("prompt", (1,))], response=what, extra_info=about)

    with make_router(functions, timeout_s=20.0, num_workers=2, max_response_length=9) as router:
        asyncio.run(router([sample("echo"), sample("crash once")]))
        counts = router.call_counts.take().counts

    assert counts == {"reward/calls": 2, "reward/retried_calls": 1}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nan", "nan"),
        ("inf", "inf"),
        ("huge number", "too large for a float"),
        ("none", "None"),
        ("text", "'1.0'"),
        ("complex", "not a number"),
        ("dict without score", "without 'score'"),
        ("dict with nan", "nan"),
        ("raises", "KeyError: 'what is missing' (at faulty_verifiers.py:"),
    ],
)
def test_what_is_no_finite_number_is_an_error_never_a_zero(pool, what, reason):
    assert still_serves(pool)
    pids = pids_of(pool)
    reward_result = judge(pool, what)
    assert isinstance(reward_result, Error) and reason in reward_result.reason
    assert still_serves(pool)
    assert pids_of(pool) == pids, "an error that the verifier reports needs no new process"


def test_scores_keep_their_remarks(pool):
    assert judge(pool, "dict") == Score(
        0.5, {"why": "half", "set": [1], "object": "<class 'object'>"}
    )
    assert judge(pool, "true") == Score(1.0)
    assert judge(pool, "chatty") == Score(0.5)
    huge = judge(pool, "huge")
    assert isinstance(huge, Score) and huge.value == 1.0 and len(str(huge.extra["remark"])) < 5000


def test_a_sample_that_json_cannot_hold_is_an_error(pool):
    reward_result = judge(pool, "echo", value={1, 2})
    assert isinstance(reward_result, Error) and "cannot be sent" in reward_result.reason


def test_answers_belong_to_their_requests_while_others_hang_and_crash():
    """40 requests, 4 of which hang and 4 crash: every other one gets its own number back."""
    pool = make_pool(num_workers=2)

    async def judge_all() -> list[RewardResult]:
        def request(i: int):
            if i % 10 == 3:
                return pool.call("faulty", arguments("hang in c"), SHORT_S)
            what = "exit 0" if i % 10 == 7 else "echo"
            return pool.call("faulty", arguments(what, value=i))

        return await asyncio.wait_for(asyncio.gather(*(request(i) for i in range(40))), 100)

    try:
        reward_results = asyncio.run(judge_all())
        for i, reward_result in enumerate(reward_results):
            if i % 10 == 3:
                assert reward_result == Timeout(SHORT_S)
            elif i % 10 == 7:
                assert isinstance(reward_result, Error)
            else:
                assert reward_result == Score(float(i))

        assert len(pids_of(pool)) <= 2
    finally:
        pool.close()


def test_what_befalls_one_of_a_group_befalls_no_other():
    pool = make_pool(timeout_s=2.0)
    again = list[int]()
    whats = ["echo"] * 4 + ["hang in c"] + ["echo"] * 4 + ["exit 0"] + ["echo"] * 4

    asked = [arguments(what, value=i) for i, what in enumerate(whats)]
    try:
        reward_results = asyncio.run(pool.score_group("faulty", asked, on_repeat=again.append))
        for i, (what, reward_result) in enumerate(zip(whats, reward_results, strict=True)):
            if what == "echo":
                assert reward_result == Score(float(i))

        assert reward_results[4] == Timeout(2.0)
        assert isinstance(reward_results[9], Error) and "twice" in reward_results[9].reason
        assert again == [1], "the one that ended its process"
    finally:
        pool.close()


def test_time_in_the_queue_does_not_count():
    """Verdicts of a third of the deadline each in one process: six together are longer than it."""
    pool = make_pool()

    async def judge_all(deadline_s: float) -> list[RewardResult]:
        asked = arguments("sleep", seconds=deadline_s / 3)
        return await asyncio.gather(*(pool.call("faulty", asked, deadline_s) for _ in range(6)))

    def check(deadline_s: float) -> None:
        assert asyncio.run(judge_all(deadline_s)) == [Score(1.0)] * 6

    try:
        at_some_deadline(check, 0.9, 12.0)
    finally:
        pool.close()


def test_a_process_that_is_killed_while_idle_is_replaced(pool):
    assert still_serves(pool)
    for pid in pids_of(pool):
        os.kill(pid, signal.SIGKILL)
    assert still_serves(pool)


def test_close_leaves_no_process_and_waits_for_no_verifier():
    pool = make_pool(num_workers=2)

    async def close_while_busy() -> tuple[list[int], list[RewardResult]]:
        tasks = [
            asyncio.create_task(pool.call("faulty", arguments("hang with signals blocked")))
            for _ in range(5)
        ]
        while len(pids_of(pool)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        pids = pids_of(pool)
        await asyncio.wait_for(asyncio.to_thread(pool.close), 60)

        return pids, await asyncio.gather(*tasks)

    pids, reward_results = asyncio.run(close_while_busy())
    assert len(pids) == 2 and wait_until_gone(pids) == []
    assert all(
        isinstance(reward_result, Error) and "closing" in reward_result.reason
        for reward_result in reward_results
    )
    assert isinstance(judge(pool, "echo", value=1), Error)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging in C code"])
def test_no_orphan_when_the_run_itself_is_killed(busy):
    script = f"""
import asyncio, sys
from distflow.rewards.pool.pool import PoolSettings, RewardPool
pool = RewardPool(PoolSettings({{"faulty": {FAULTY!r}}}, num_workers=1, timeout_s=600))
print(*(process.pid for process in pool._living), flush=True)
if {busy}:
    arguments = {arguments("hang in c")!r}
    asyncio.run(pool.call("faulty", arguments))
sys.stdin.read()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stdin is not None
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert pids and all(is_running(pid) for pid in pids)
    time.sleep(0.3)
    run.kill()
    run.communicate()
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def compute_score(batch, config): return 0", "takes (batch, config)"),
        ("def other(solution_str): return 0", "the module has no 'compute_score'; known: other"),
        ("import no_such_module", "needs the module 'no_such_module', which is not installed"),
        ("raise RuntimeError('at import')", "at import"),
        ("def compute_score(:", "SyntaxError"),
        ("import os; os._exit(0)", "exited with status 0"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_the_users_error(tmp_path, source, message):
    (tmp_path / "reward.py").write_text(source)
    with pytest.raises(UserError, match="cannot be loaded") as raised:
        RewardPool(
            PoolSettings(
                {"custom": f"{tmp_path / 'reward.py'}:compute_score"}, num_workers=1, timeout_s=1
            )
        )

    assert message in str(raised.value) and "reward.py" in str(raised.value)


@pytest.mark.slow
def test_workers_import_no_torch_and_asyncio_only_for_functions_that_need_it():
    code = """
        import sys, distflow.rewards.pool.worker
        from distflow.rewards.function_loading import FAILS_TARGET, load_reward
        load_reward(FAILS_TARGET)  # in every pool
        print("asyncio" in sys.modules)
        import distflow.rewards.math.reward
        print("torch" in sys.modules)
    """
    ended = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True)
    assert ended.stdout.split() == ["False", "False"]
