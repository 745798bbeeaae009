"""Columns of a row that a verifier reads.

A data set's own reference solutions, judged as a policy's answers are before a run learns from them.

Rows of which a reward could judge no response: their tests are no Python, their instructions unknown.
"""

import ast
import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

from distflow.errors import UserError
from distflow.import_target import load
from distflow.observe.sanitize import visible
from distflow.registry import CUSTOM_REWARD, REWARDS
from distflow.rewards.score import RewardResult, Score, is_right, own_reward_result


def decoded(value: object) -> object:
    """What a column means that holds a list or a mapping as JSON, as some data sets write them; any other as it is."""
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
    """A response that is right, says the data set. origin: file and line of its row. column: where it stands there."""

    origin: str
    domain: str
    column: str
    text: str
    ground_truth: object
    extra_info: Mapping[str, object]


def find_solution(
    names: Iterable[str], key: str | None, answer_key: str, ground_truth: object, row: Mapping[str, object], prompt: str
) -> tuple[str, str] | None:
    """(column, response): the row's reference solution, None where it has none.

    names: of the rewards that judge it. key: the column, "" for none, None for those that their rewards know, of which
    only a text of several lines, or an indented one, is taken for one. Of a list it is the first. ground_truth: the
    column `answer_key`, and `row` the others; prompt: what the solution continues where it is the rest of a program.
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
    """The solution behind the prompt where it is the rest of that program (HumanEval), and the row does not have what
    it continues in a column `prompt`."""
    continues = "prompt" not in row and _is_rest(solution) and _is_python(prompt + solution)
    return prompt + solution if continues else solution


def _is_rest(solution: str) -> bool:
    """Whether its first line is indented."""
    return solution.lstrip("\r\n")[:1].isspace()


def judging(functions: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Those of the functions (name, weight) that must call a solution right: which compare with the row's answer,
    know columns of solutions, or are the user's."""
    for name, weight in functions:
        entry = REWARDS.get(name)
        if weight > 0 and (entry is None or name == CUSTOM_REWARD or entry.needs_answer or entry.solutions):
            yield name


async def try_solutions(router: "RewardRouter", solutions: Sequence[Solution], seconds: float) -> list[str]:
    """What to warn of: by domain and column, which solutions are not judged right, and why. None are begun after these
    seconds. Raises UserError where most of a domain's fail."""
    deadline = time.monotonic() + seconds
    free = {
        domain: asyncio.Semaphore(router.pools.patience(domain).num_workers)
        for domain in {solution.domain for solution in solutions}
    }
    told = await asyncio.gather(*(_try(router, each, free[each.domain], deadline) for each in solutions))
    groups: dict[tuple[str, str], list[tuple[Solution, str]]] = {}
    for solution, why in zip(solutions, told, strict=True):
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
                f"{found}{lines}{more}\nsee data.answer_key and reward.functions; where the column holds no solutions, "
                "name another by data.solution_key, or none: data.solution_key=''"
            )
        warnings.append(
            f"{found}{lines}{more}\nsuch rows may punish right answers; `distflow reward check` with --response-key "
            f"{column} and --rows 0 tries all rows"
        )
    return warnings


async def _try(router: "RewardRouter", solution: Solution, free: asyncio.Semaphore, deadline: float) -> str | None:
    """Why it is not right; empty where it is, None where no time was left."""
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
                return visible(f"{name}: {why(reward_result)}", _SHOWN, one_line=True)
        return ""


def why(reward_result: RewardResult) -> str:
    """What a verdict says for people: the score, and the first case that failed where the reward tells of one."""
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
    """Why one of these rewards can give no verdict on the row, whatever is answered; empty where all can. Runs no
    code of the row."""
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
