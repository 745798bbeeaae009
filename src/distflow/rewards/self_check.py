"""Verifiers are certified before a run starts: good answers score high, bad ones low, and a hang is killed.

What a verifier pool is certified with: functions that give no verdict, each in a way of its own.
"""

import asyncio
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, cast

from distflow.errors import UserError
from distflow.import_target import load, split_name
from distflow.registry import REWARDS
from distflow.rewards.extracted_answers import bare_answer
from distflow.rewards.pool.pool import RewardPool
from distflow.rewards.score import Case, Error, RewardResult, Score, Timeout

if TYPE_CHECKING:  # it loads torch; this does not, so that it can begin before
    from distflow.rewards.router import RewardRouter

HANG_DEADLINE_S = 0.5
_FAILURES = ("fail", "fail_by_key", "not_a_number", "nothing", "a_text", "leave")
"""Probes that must give no score: an error or, where the machine is too busy to say so in time, a timeout."""

_PROBES = {name: f"distflow.rewards.self_check:{name}" for name in (*_FAILURES, "hang")}


async def run_self_check(router: "RewardRouter") -> None:
    """Judge the `CASES` of every built-in that the router uses, and see a hang killed at its deadline.

    Raises RuntimeError naming the verifier, the case and the verdict: the machine's installation is at fault, not the
    user's data. Functions of the user have no known cases, nor have those that are given options.
    """
    for name in (name for name in router.names if name not in router.configured):
        for case in known_cases(name):
            reward_result = await router.pools.call(name, _arguments(case.response, case.ground_truth, case.extra_info))
            if not isinstance(reward_result, Score) or reward_result.value != case.expected:
                raise RuntimeError(
                    f"the verifier '{name}' is not fit for use here: {case.response!r} against {case.ground_truth!r} "
                    f"should score {case.expected}, it got {reward_result}; reinstall distflow and what it stands on, "
                    "or set trust.check_rewards=false"
                )
    await asyncio.wrap_future(self_check_once())


@cache
def self_check_once() -> "Future[None]":
    """`self_check_faults` once a process, whose machine it is that is tried: it runs from the first call on."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="distflow-certify")
    try:
        return thread.submit(asyncio.run, self_check_faults())
    finally:
        thread.shutdown(wait=False)


def known_cases(name: str) -> tuple[Case, ...]:
    """The `CASES` in the file of a built-in reward; none for a function of the user."""
    entry = REWARDS.get(name)
    if entry is None or not entry.target:
        return ()
    return tuple(cast(Iterable[Case], load(f"{split_name(entry.target)[0]}:CASES")))


async def self_check_faults() -> None:
    """Raises RuntimeError unless a function that raises, gives no finite number or ends its process gives no score, and
    one that hangs in C code is killed at its deadline."""
    pool = await asyncio.to_thread(RewardPool, _PROBES, num_workers=1, timeout_s=HANG_DEADLINE_S)
    try:
        failed = {name: await pool.call(name, _arguments("", None, {})) for name in _FAILURES}
        hung = await pool.call("hang", _arguments("", None, {}))
    finally:
        await asyncio.to_thread(pool.close)
    for name, reward_result in failed.items():
        if isinstance(reward_result, Score):
            raise RuntimeError(
                f"a verifier that fails ({_PROBES[name]}) must give no verdict, but it gave {reward_result}"
            )
    if not isinstance(hung, Timeout):
        raise RuntimeError(f"a verifier that hangs was not killed after {HANG_DEADLINE_S} s on this machine: {hung}")


async def self_check_scores(router: "RewardRouter", rows: Iterable[tuple[str, object, Mapping[str, object]]]) -> None:
    """Each row's own answer, put into a box, must score 1: a wrong data.answer_key would else be a reward of 0 for all.

    rows: (domain, ground truth, extra info) of some rows. Raises UserError naming the first answer that fails where
    more than half of its domain's do.
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
    """Backtracks for ages inside the C code of `re`, holding the interpreter."""
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
