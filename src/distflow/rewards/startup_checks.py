"""Checks before a run: rows' own answers get the right scores, and the tests of rows are not
broken."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from distflow.builtin_names import REWARDS
from distflow.errors import UserError
from distflow.import_target import load_function
from distflow.rewards.extracted_answers import bare_answer
from distflow.rewards.function_calls import call_arguments
from distflow.rewards.reward_results import (
    Error,
    RewardResult,
    Score,
)

if TYPE_CHECKING:  # it loads torch; this module does not, so that the check can start earlier
    from distflow.rewards.router import RewardRouter


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
        gold = ground_truth
        if isinstance(ground_truth, list | tuple) and ground_truth:
            gold = ground_truth[0]
        response = f"\\boxed{{{bare_answer(str(gold))}}}"

        for name in (part.name for part in router.functions_of(domain) if part.name in scorable):
            totals[domain] = totals.get(domain, 0) + 1
            reward_result = await router.pools.call(
                name, call_arguments("self_check", response, ground_truth, extra_info)
            )
            if reward_result != Score(1.0):
                failures.setdefault(domain, []).append((ground_truth, reward_result))

    for domain, failed in failures.items():
        if 2 * len(failed) > totals[domain]:
            ground_truth, reward_result = failed[0]
            result = str(reward_result)
            if isinstance(reward_result, Error):
                result = reward_result.reason

            raise UserError(
                f"{len(failed)} of {totals[domain]} answers of domain '{domain}' do not score 1 "
                f"when compared with themselves, e.g. {ground_truth!r:.80} ({result}): see "
                "data.answer_key and reward.functions"
            )


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
