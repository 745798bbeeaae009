"""Self-check of reward functions before a run: known responses get their scores, faulty functions give reward errors.

The faulty functions, which raise, return nonsense, exit or hang, are at the end of this file.
"""

import asyncio
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, cast

from distflow.builtin_names import REWARDS
from distflow.errors import UserError
from distflow.import_target import load, split_name
from distflow.rewards.extracted_answers import bare_answer
from distflow.rewards.pool.pool import RewardPool
from distflow.rewards.score import Case, Error, RewardResult, Score, Timeout

if TYPE_CHECKING:  # it loads torch; this module does not, so that the check can start earlier
    from distflow.rewards.router import RewardRouter

HANG_DEADLINE_S = 0.5
_FAILURES = ("fail", "fail_by_key", "not_a_number", "nothing", "a_text", "leave")
"""Functions that must give no score: an error or, on a busy machine, a timeout."""

_FAULTY = {name: f"distflow.rewards.self_check:{name}" for name in (*_FAILURES, "hang")}


async def run_self_check(router: "RewardRouter") -> None:
    """Score the `CASES` of every built-in that the router uses, and check that a hang is killed at its deadline.

    Raises RuntimeError naming the reward function, the case and the result: the installation is at fault, not the
    user's data. User functions, and built-ins with options, have no known cases.
    """
    for name in (name for name in router.names if name not in router.configured):
        for case in known_cases(name):
            reward_result = await router.pools.call(name, _arguments(case.response, case.ground_truth, case.extra_info))
            if not isinstance(reward_result, Score) or reward_result.value != case.expected:
                raise RuntimeError(
                    f"the reward function '{name}' does not work here: {case.response!r} against {case.ground_truth!r} "
                    f"should score {case.expected}, it got {reward_result}; reinstall distflow and its dependencies, "
                    "or set trust.check_rewards=false"
                )
    await asyncio.wrap_future(self_check_once())


@cache
def self_check_once() -> "Future[None]":
    """`self_check_faults`, once per process; it starts with the first call."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="distflow-self-check")
    try:
        return thread.submit(asyncio.run, self_check_faults())
    finally:
        thread.shutdown(wait=False)


def known_cases(name: str) -> tuple[Case, ...]:
    """The `CASES` in the file of a built-in reward; none for a user function."""
    entry = REWARDS.get(name)
    if entry is None or not entry.target:
        return ()
    return tuple(cast(Iterable[Case], load(f"{split_name(entry.target)[0]}:CASES")))


async def self_check_faults() -> None:
    """Raises RuntimeError unless a function that raises, returns no finite number or ends its process gives no score,
    and one that hangs in C code is killed at its deadline."""
    pool = await asyncio.to_thread(RewardPool, _FAULTY, num_workers=1, timeout_s=HANG_DEADLINE_S)
    try:
        failed = {name: await pool.call(name, _arguments("", None, {})) for name in _FAILURES}
        hung = await pool.call("hang", _arguments("", None, {}))
    finally:
        await asyncio.to_thread(pool.close)
    for name, reward_result in failed.items():
        if isinstance(reward_result, Score):
            raise RuntimeError(
                f"a reward function that fails ({_FAULTY[name]}) must give no score, but it gave {reward_result}"
            )
    if not isinstance(hung, Timeout):
        raise RuntimeError(
            f"a reward function that hangs was not killed after {HANG_DEADLINE_S} s on this machine: {hung}"
        )


async def self_check_scores(router: "RewardRouter", rows: Iterable[tuple[str, object, Mapping[str, object]]]) -> None:
    """Each row's own answer, put into a box, must score 1: else a wrong data.answer_key would give a reward of 0 to
    all.

    rows: (domain, ground truth, extra info) of some rows. Raises UserError naming the first answer that fails if
    more than half of its domain's fail.
    """
    failures: dict[str, list[tuple[object, RewardResult]]] = {}
    totals: dict[str, int] = {}
    for domain, ground_truth, extra_info in rows:
        for name in (name for name, _ in router.functions_of(domain) if _scores_own_answer(name)):
            totals[domain] = totals.get(domain, 0) + 1
            golds = ground_truth if isinstance(ground_truth, list | tuple) and ground_truth else [ground_truth]
            response = f"\\boxed{{{bare_answer(str(golds[0]))}}}"
            reward_result = await router.pools.call(name, _arguments(response, ground_truth, extra_info))
            if not isinstance(reward_result, Score) or reward_result.value != 1.0:
                failures.setdefault(domain, []).append((ground_truth, reward_result))
    for domain, failed in failures.items():
        if 2 * len(failed) > totals[domain]:
            ground_truth, reward_result = failed[0]
            said = reward_result.reason if isinstance(reward_result, Error) else str(reward_result)
            raise UserError(
                f"{len(failed)} of {totals[domain]} answers of domain '{domain}' do not score 1 against themselves, "
                f"e.g. {ground_truth!r:.80} ({said}): see data.answer_key and reward.functions"
            )


def _scores_own_answer(name: str) -> bool:
    return name in REWARDS and REWARDS[name].scores_own_answer


def _arguments(response: str, ground_truth: object, extra_info: Mapping[str, object]) -> dict[str, object]:
    return {
        "data_source": "self_check",
        "solution_str": response,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }


def hang(solution_str: str, extra_info: object = None) -> float:
    """Backtracks practically forever in the C code of `re`, holding the interpreter lock."""
    return float(re.match(r"(a|aa)+$", "a" * 200 + "b") is not None)


def fail(solution_str: str, extra_info: object = None) -> float:
    raise ValueError("as it should")


def fail_by_key(solution_str: str, extra_info: object = None) -> float:
    raise KeyError("as it should")


def not_a_number(solution_str: str, extra_info: object = None) -> float:
    return math.nan


def nothing(solution_str: str, extra_info: object = None) -> None:
    return None


def a_text(solution_str: str, extra_info: object = None) -> str:
    return "1.0"


def leave(solution_str: str, extra_info: object = None) -> float:
    """Ends the process, as a crash does."""
    os._exit(0)
