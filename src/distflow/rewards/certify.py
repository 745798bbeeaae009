"""Verifiers are certified before a run starts: good answers score high, bad ones low, and a hang is killed."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.config.errors import UserError
from distflow.rewards.pool import VerifierPool
from distflow.rewards.router import RewardRouter
from distflow.rewards.verdict import Error, Score, Timeout, Verdict

HANG_DEADLINE_S = 0.5
_HANG = "distflow.rewards.probes:hang"
_MARKABLE = ("math", "exact_match")


@dataclass(frozen=True)
class Case:
    """A response whose score is known: `good` ones score 1, the others 0."""

    response: str
    ground_truth: Any
    good: bool
    extra_info: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, tuple[Case, ...]] = {
    "math": (
        Case(r"3 + 4 = 7, so \boxed{7}.", "7", True),
        Case(r"first \boxed{6}, then again: \boxed{\frac{14}{2}}", "so 3 + 4 = 7\n#### 7", True),
        Case(r"\boxed{1\,000}", "1e3", True),
        Case(r"\boxed{7} or rather \boxed{8}", "7", False),
        Case(r"\boxed{[2,5]}", "[2,5)", False),
        Case("", "7", False),
    ),
    "exact_match": (
        Case("Paris", "Paris", True),
        Case(r"It is \boxed{Paris}", " Paris ", True),
        Case("Paris, I think", "Paris", False),
        Case("", "Paris", False),
    ),
    "format": (
        Case(r"so \boxed{7}", None, True),
        Case("so 7", None, False),
        Case(r"so \boxed{7", None, False),
        Case("<think>a</think>7", None, True, {"format_regex": "<think>.*</think>.+"}),
        Case("7", None, False, {"format_regex": "<think>.*</think>.+"}),
    ),
}


async def certify(router: RewardRouter) -> None:
    """Judge the known cases of every built-in that the router uses, and see a hang killed at its deadline.

    Raises RuntimeError naming the verifier, the case and the verdict: the machine's installation is at fault, not the
    user's data. Functions of the user have no known cases.
    """
    for name in router.names:
        for case in CASES.get(name, ()):
            verdict = await router.pool.judge(name, _arguments(case.response, case.ground_truth, case.extra_info))
            if not isinstance(verdict, Score) or verdict.value != float(case.good):
                raise RuntimeError(
                    f"the verifier '{name}' is not fit for use here: {case.response!r} against {case.ground_truth!r} "
                    f"should score {float(case.good)}, it got {verdict}; reinstall math-verify and its parts, "
                    "or set trust.certify_rewards=false"
                )
    await certify_deadline()


async def certify_deadline() -> None:
    """Raises RuntimeError unless a function that hangs in C code is killed at its deadline."""
    pool = await asyncio.to_thread(VerifierPool, {"hang": _HANG}, num_workers=1, timeout_s=HANG_DEADLINE_S)
    try:
        verdict = await pool.judge("hang", _arguments("", None, {}))
    finally:
        await asyncio.to_thread(pool.close)
    if not isinstance(verdict, Timeout):
        raise RuntimeError(f"a verifier that hangs was not killed after {HANG_DEADLINE_S} s on this machine: {verdict}")


async def certify_answers(router: RewardRouter, rows: Iterable[tuple[str, Any, dict[str, Any]]]) -> None:
    """Each row's own answer, put into a box, must score 1: a wrong data.answer_key would else be a reward of 0 for all.

    rows: (domain, ground truth, extra info) of some rows. Raises UserError naming the first answer that fails where
    more than half of its domain's do.
    """
    failures: dict[str, list[tuple[Any, Verdict]]] = {}
    totals: dict[str, int] = {}
    for domain, ground_truth, extra_info in rows:
        for name in (name for name, _ in router.functions_of(domain) if name in _MARKABLE):
            totals[domain] = totals.get(domain, 0) + 1
            response = f"\\boxed{{{_bare(ground_truth)}}}"
            verdict = await router.pool.judge(name, _arguments(response, ground_truth, extra_info))
            if not isinstance(verdict, Score) or verdict.value != 1.0:
                failures.setdefault(domain, []).append((ground_truth, verdict))
    for domain, failed in failures.items():
        if 2 * len(failed) > totals[domain]:
            ground_truth, verdict = failed[0]
            said = verdict.reason if isinstance(verdict, Error) else str(verdict)
            raise UserError(
                f"{len(failed)} of {totals[domain]} answers of domain '{domain}' do not score 1 against themselves, "
                f"e.g. {ground_truth!r:.80} ({said}): see data.answer_key and reward.functions"
            )


def _bare(ground_truth: Any) -> str:
    first = (
        ground_truth[0] if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str) else ground_truth
    )
    return str(first).rpartition("####")[2].strip()


def _arguments(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"data_source": "certify", "solution_str": response, "ground_truth": ground_truth, "extra_info": extra_info}
