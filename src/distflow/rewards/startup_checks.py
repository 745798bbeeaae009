"""Checks before a run: known responses and the data set's reference solutions get the right scores,
the tests of rows are not broken, and a faulty function (`pool/faulty_test_functions.py`) gives
reward errors."""

import ast
import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.errors import UserError
from distflow.import_target import load_function, load_module, split_name
from distflow.observe.sanitized_output import escape_control
from distflow.rewards.extracted_answers import bare_answer, decoded
from distflow.rewards.function_calls import call_arguments
from distflow.rewards.function_loading import FAILS, FAILS_TARGET
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import (
    Case,
    Error,
    RewardResult,
    Score,
    Timeout,
    scored_right,
    why,
)

if TYPE_CHECKING:  # it loads torch; this module does not, so that the check can start earlier
    from distflow.rewards.router import RewardRouter

HANG_DEADLINE_S = 0.5
_FAILURES = ("ValueError", "KeyError", "nan", "None", "text", "exit")
"""Ways of `fail` that must give no score: an error or, on a busy machine, a timeout."""

_SHOWN_ROWS = 20
_SHOWN = 200


class Solution(NamedTuple):
    """A response that is right according to the data set. origin: file and line of its row. column:
    its source."""

    origin: str
    domain: str
    column: str
    text: str
    ground_truth: object
    extra_info: Mapping[str, object]


async def run_startup_checks(router: "RewardRouter") -> None:
    """Score the `CASES` of every built-in that the router uses, and check that a hang is killed at
    its deadline.

    Raises RuntimeError naming the reward function, the case and the result: the installation is at
    fault, not the user's data. User functions, and built-ins with options, have no known cases.
    """
    for name in router.without_options:
        for case in known_cases(name):
            reward_result = await router.pools.call(
                name,
                call_arguments("self_check", case.response, case.ground_truth, case.extra_info),
            )
            if reward_result != Score(case.expected):
                raise RuntimeError(
                    f"the reward function '{name}' does not work here: {case.response!r} against "
                    f"{case.ground_truth!r} "
                    f"should score {case.expected}, but got {reward_result}; reinstall distflow "
                    "and its "
                    f"dependencies, "
                    "or set trust.check_rewards=false"
                )
    await asyncio.wrap_future(self_check_once())


@cache
def self_check_once() -> "Future[None]":
    """`self_check_faults`, once per process, started by the first call."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="distflow-self-check")
    try:
        return thread.submit(asyncio.run, self_check_faults())
    finally:
        thread.shutdown(wait=False)


def known_cases(name: str) -> tuple[Case, ...]:
    """The `CASES` in the module of a built-in reward, by name if it has several; none for a user
    function."""
    entry = REWARDS.get(name)
    if entry is None or not entry.target:
        return ()
    cases: Mapping[str, tuple[Case, ...]] | tuple[Case, ...] = load_module(
        split_name(entry.target)[0]
    ).CASES
    return cases[name] if isinstance(cases, Mapping) else cases


async def self_check_faults() -> None:
    """Raises RuntimeError unless a function that raises, returns no finite number or ends its
    process gives no score, and one that hangs in C code is killed at its deadline."""
    settings = PoolSettings({FAILS: FAILS_TARGET}, num_workers=1, timeout_s=HANG_DEADLINE_S)
    pool = await asyncio.to_thread(RewardPool, settings)
    try:
        failed = {
            way: await pool.call(FAILS, call_arguments("self_check", way, None, {}))
            for way in _FAILURES
        }
        hung = await pool.call(FAILS, call_arguments("self_check", "hang", None, {}))
    finally:
        await asyncio.to_thread(pool.close)
    for way, reward_result in failed.items():
        if isinstance(reward_result, Score):
            raise RuntimeError(
                f"a reward function that fails ({way}) must give no score, but it gave "
                f"{reward_result}"
            )
    if not isinstance(hung, Timeout):
        raise RuntimeError(
            f"a reward function that hangs was not killed after {HANG_DEADLINE_S} s on this "
            f"machine: {hung}"
        )


async def startup_check_scores(
    router: "RewardRouter", rows: Iterable[tuple[str, object, Mapping[str, object]]]
) -> None:
    """Each row's own answer, in a box, must score 1, or else a wrong data.answer_key would give all
    a reward of 0.

    rows: (domain, ground truth, extra info) of some rows. Raises UserError with the first failing
    answer if more than half of its domain's fail.
    """
    scorable = {name for name, entry in REWARDS.items() if entry.scores_own_answer}
    failures: dict[str, list[tuple[object, RewardResult]]] = {}
    totals: dict[str, int] = {}
    for domain, ground_truth, extra_info in rows:
        for name in (part.name for part in router.functions_of(domain) if part.name in scorable):
            totals[domain] = totals.get(domain, 0) + 1
            golds = (
                ground_truth
                if isinstance(ground_truth, list | tuple) and ground_truth
                else [ground_truth]
            )
            response = f"\\boxed{{{bare_answer(str(golds[0]))}}}"
            reward_result = await router.pools.call(
                name, call_arguments("self_check", response, ground_truth, extra_info)
            )
            if reward_result != Score(1.0):
                failures.setdefault(domain, []).append((ground_truth, reward_result))
    for domain, failed in failures.items():
        if 2 * len(failed) > totals[domain]:
            ground_truth, reward_result = failed[0]
            result = (
                reward_result.reason if isinstance(reward_result, Error) else str(reward_result)
            )
            raise UserError(
                f"{len(failed)} of {totals[domain]} answers of domain '{domain}' do not score 1 "
                "when compared with "
                f"themselves, e.g. {ground_truth!r:.80} ({result}): see data.answer_key and "
                "reward.functions"
            )


def find_solution(
    names: Iterable[str],
    key: str | None,
    answer_key: str,
    ground_truth: object,
    row: Mapping[str, object],
    prompt: str,
) -> tuple[str, str] | None:
    """(column, response): the row's reference solution; None if it has none.

    names: of its reward functions. key: the column, "" for none, None for those known to the reward
    functions, where only text that has several lines or is indented counts. From a list, the first
    is taken. ground_truth: the column `answer_key`; `row`: the others; prompt: what the solution
    continues if it is the rest of a program.
    """
    known = [column for name in names if name in REWARDS for column in REWARDS[name].solutions]
    known = known if key is None else [key] if key else []
    for column in known:
        found = decoded(ground_truth if column == answer_key else row.get(column))
        text = found[0] if isinstance(found, list) and found else found
        if (
            isinstance(text, str)
            and text.strip()
            and (key is not None or "\n" in text.strip() or _is_rest(text))
        ):
            return column, whole(text, row, prompt)
    return None


def whole(solution: str, row: Mapping[str, object], prompt: str) -> str:
    """The solution, preceded by the prompt if it is the rest of that program (HumanEval) and the
    row has no column `prompt` with the beginning."""
    if "prompt" in row or not _is_rest(solution):
        return solution
    try:
        ast.parse(prompt + solution)
    except (SyntaxError, ValueError, RecursionError):
        return solution
    return prompt + solution


async def try_solutions(
    router: "RewardRouter", solutions: Sequence[Solution], seconds: float
) -> list[str]:
    """Warnings: by domain and column, the solutions that are not scored as right, with the reason.
    None is started after `seconds`. Raises UserError if most of a domain's fail."""
    deadline = time.monotonic() + seconds
    free = {
        domain: asyncio.Semaphore(router.pools.patience(domain).num_workers)
        for domain in {solution.domain for solution in solutions}
    }
    reasons = await asyncio.gather(
        *(_try(router, each, free[each.domain], deadline) for each in solutions)
    )
    groups: dict[tuple[str, str], list[tuple[Solution, str]]] = {}
    for solution, reason in zip(solutions, reasons, strict=True):
        if reason is not None:
            groups.setdefault((solution.domain, solution.column), []).append((solution, reason))
    warnings = []
    for (domain, column), tried in groups.items():
        failed = [(solution, reason) for solution, reason in tried if reason]
        if not failed:
            continue
        found = (
            f"{len(failed)} of {len(tried)} reference solutions of domain '{domain}' (column "
            f"'{column}') fail:"
        )
        lines = "".join(
            f"\n  {solution.origin}: {reason}" for solution, reason in failed[:_SHOWN_ROWS]
        )
        more = f"\n  and {len(failed) - _SHOWN_ROWS} more" if len(failed) > _SHOWN_ROWS else ""
        if 2 * len(failed) > len(tried):
            raise UserError(
                f"{found}{lines}{more}\nsee data.answer_key and reward.functions; if the column "
                "does not contain "
                "solutions, name another one with data.solution_key, or disable this with "
                "data.solution_key=''"
            )
        warnings.append(
            f"{found}{lines}{more}\nthey may punish correct responses; `distflow reward check` "
            "with --response-key "
            f"{column} and --rows 0 tries all rows"
        )
    return warnings


def find_broken(
    names: Iterable[str], ground_truth: object, extra_info: Mapping[str, object]
) -> str:
    """Why one of these reward functions cannot score any response to the row; empty if all can.
    Does not run row code."""
    for name in names:
        check = REWARDS[name].row_check if name in REWARDS else ""
        try:
            if check:
                _load_check(check)(ground_truth, extra_info)
        except ValueError as error:
            return str(error)
    return ""


_load_check = cache(load_function)


def must_accept(name: str) -> bool:
    """Whether the function must score a solution as right: it compares with the ground truth, knows
    columns of solutions, or is a user's."""
    entry = REWARDS.get(name)
    return entry is None or name == CUSTOM_REWARD or entry.needs_answer or bool(entry.solutions)


def _is_rest(solution: str) -> bool:
    """Whether its first line is indented."""
    return solution.lstrip("\r\n")[:1].isspace()


async def _try(
    router: "RewardRouter", solution: Solution, free: asyncio.Semaphore, deadline: float
) -> str | None:
    """Why a solution is not right; empty if it is, None if no time was left."""
    async with free:
        if time.monotonic() > deadline:
            return None
        arguments = call_arguments(
            solution.domain, solution.text, solution.ground_truth, solution.extra_info
        )
        for part in router.functions_of(solution.domain):
            if part.weight <= 0 or not must_accept(part.name):
                continue
            reward_result = await router.pools.of(solution.domain).call(part.name, arguments)
            if not scored_right(reward_result):
                return escape_control(f"{part.name}: {why(reward_result)}", _SHOWN, one_line=True)
        return ""
