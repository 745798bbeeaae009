"""A data set's reference solutions, scored before a run like a policy's responses, and rows with broken tests."""

import ast
import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.errors import UserError
from distflow.import_target import load
from distflow.observe.sanitize import escape_control
from distflow.rewards.score import RewardResult, Score, is_right, own_reward_result


def decoded(value: object) -> object:
    """The list or mapping of a column that holds JSON, as in some data sets; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


if TYPE_CHECKING:  # it loads torch
    from distflow.rewards.router import RewardRouter

_SHOWN_ROWS = 20
_SHOWN = 200


class Solution(NamedTuple):
    """A response that is right according to the data set. origin: file and line of its row. column: where it is
    from."""

    origin: str
    domain: str
    column: str
    text: str
    ground_truth: object
    extra_info: Mapping[str, object]


def find_solution(
    names: Iterable[str], key: str | None, answer_key: str, ground_truth: object, row: Mapping[str, object], prompt: str
) -> tuple[str, str] | None:
    """(column, response): the row's reference solution; None if it has none.

    names: of its reward functions. key: the column, "" for none, None for those that the reward functions know, where
    only a text of several lines, or an indented one, counts. Of a list it is the first. ground_truth: the column
    `answer_key`, and `row` the others; prompt: what the solution continues if it is the rest of a program.
    """
    known = [column for name in names if name in REWARDS for column in REWARDS[name].solutions]
    known = known if key is None else [key] if key else []
    for column in known:
        found = decoded(ground_truth if column == answer_key else row.get(column))
        text = found[0] if isinstance(found, list) and found else found
        if isinstance(text, str) and text.strip() and (key is not None or "\n" in text.strip() or _is_rest(text)):
            return column, whole(text, row, prompt)
    return None


def whole(solution: str, row: Mapping[str, object], prompt: str) -> str:
    """The solution, after the prompt if it is the rest of that program (HumanEval) and the row has no column `prompt`
    with the beginning."""
    continues = "prompt" not in row and _is_rest(solution) and _is_python(prompt + solution)
    return prompt + solution if continues else solution


def _is_rest(solution: str) -> bool:
    """Whether its first line is indented."""
    return solution.lstrip("\r\n")[:1].isspace()


def judging(functions: Sequence[tuple[str, float]]) -> Iterator[str]:
    """The functions (name, weight) that must score a solution as right: those that compare with the ground truth, know
    columns of solutions, or are the user's."""
    for name, weight in functions:
        entry = REWARDS.get(name)
        if weight > 0 and (entry is None or name == CUSTOM_REWARD or entry.needs_answer or entry.solutions):
            yield name


async def try_solutions(router: "RewardRouter", solutions: Sequence[Solution], seconds: float) -> list[str]:
    """Warnings: by domain and column, the solutions that are not scored as right, and why. None is started after these
    seconds. Raises UserError if most of a domain's fail."""
    deadline = time.monotonic() + seconds
    free = {
        domain: asyncio.Semaphore(router.pools.patience(domain).num_workers)
        for domain in {solution.domain for solution in solutions}
    }
    reasons = await asyncio.gather(*(_try(router, each, free[each.domain], deadline) for each in solutions))
    groups: dict[tuple[str, str], list[tuple[Solution, str]]] = {}
    for solution, why in zip(solutions, reasons, strict=True):
        if why is not None:
            groups.setdefault((solution.domain, solution.column), []).append((solution, why))
    warnings = []
    for (domain, column), tried in groups.items():
        failed = [(solution, why) for solution, why in tried if why]
        if not failed:
            continue
        found = f"{len(failed)} of {len(tried)} reference solutions of domain '{domain}' (column '{column}') fail:"
        lines = "".join(f"\n  {solution.origin}: {why}" for solution, why in failed[:_SHOWN_ROWS])
        more = f"\n  and {len(failed) - _SHOWN_ROWS} more" if len(failed) > _SHOWN_ROWS else ""
        if 2 * len(failed) > len(tried):
            raise UserError(
                f"{found}{lines}{more}\nsee data.answer_key and reward.functions; if the column holds no solutions, "
                "name another one with data.solution_key, or none: data.solution_key=''"
            )
        warnings.append(
            f"{found}{lines}{more}\nsuch rows may punish right responses; `distflow reward check` with --response-key "
            f"{column} and --rows 0 tries all rows"
        )
    return warnings


async def _try(router: "RewardRouter", solution: Solution, free: asyncio.Semaphore, deadline: float) -> str | None:
    """Why it is not right; empty if it is, None if no time was left."""
    async with free:
        if time.monotonic() > deadline:
            return None
        asked = {
            "data_source": solution.domain,
            "solution_str": solution.text,
            "ground_truth": solution.ground_truth,
            "extra_info": solution.extra_info,
        }
        for name in judging(router.functions_of(solution.domain)):
            reward_result = await router.pools.of(solution.domain).call(name, asked)
            if not (isinstance(reward_result, Score) and is_right(own_reward_result(reward_result))):
                return escape_control(f"{name}: {why(reward_result)}", _SHOWN, one_line=True)
        return ""


def why(reward_result: RewardResult) -> str:
    """A reward result in words: the score, and the first failed case if the reward function reports one."""
    if not isinstance(reward_result, Score):
        return str(reward_result)
    failed = reward_result.extra.get("failed")
    first = failed[0] if isinstance(failed, list) and failed else None
    if isinstance(first, dict) and "why" in first:
        return f"{own_reward_result(reward_result):g}, {first.get('case', '')}: {first['why']}"
    return f"{own_reward_result(reward_result):g}"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


Check = Callable[[object, Mapping[str, object]], None]


def find_broken(names: Iterable[str], ground_truth: object, extra_info: Mapping[str, object]) -> str:
    """Why one of these reward functions cannot score any response to the row; empty if all can. Runs no code of the
    row."""
    for name in names:
        check = _check_of(name)
        try:
            if check is not None:
                check(ground_truth, extra_info)
        except ValueError as error:
            return str(error)
    return ""


@cache
def _check_of(name: str) -> Check | None:
    entry = REWARDS.get(name)
    return cast(Check, load(entry.row_check)) if entry is not None and entry.row_check else None
