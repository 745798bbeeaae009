"""Verdicts per second of the built-in verifiers, through the pool of processes that runs use.

    python benchmarks/rewards.py [--verdicts 400] [--rounds 3]

Each line is one verifier on one kind of work: how many verdicts a second one and two processes
give, once they are up; how many seconds they take to be up (started, loaded, one verdict each); and
which share of a step of 1,024 verdicts that would be. `code` is measured at each level of the
sandbox that this machine has: pipelines called with eight cases in one process, MBPP's three
assertions (a process each), and two inputs on standard input. Then a verdict that hangs is asked
for beside others on two processes: the longest that one of the others took, with and without.
Rounds take turns; the best counts.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from distflow.builtin_names import REWARDS
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON
from distflow.rewards.code.reward import score_program
from distflow.rewards.function_loading import FAILS_TARGET
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import RewardResult, Score
from distflow.sandbox.local_sandbox import LEVELS, Sandbox

STEP = 1024
TIMEOUT_S = 10.0
_ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\n"
_SUM = "```python\nprint(sum(map(int, input().split())))\n```"
_WORDS = "the river runs slowly past the old mill where nobody has lived for many years now. " * 8


Row = dict[str, object]


class Work(NamedTuple):
    """target: as a pool takes it. answers: (response, ground truth, columns of the row); each is
    right."""

    target: str
    answers: list[tuple[str, object, Row]]


@cache
def sandbox_at(level: str) -> Sandbox:
    return Sandbox(level=level)


def code_at_floor(
    solution_str: str, ground_truth: object, extra_info: Mapping[str, object]
) -> dict[str, JSON]:
    return score_program(sandbox_at("floor"), solution_str, ground_truth, extra_info)


def code_at_namespaces(
    solution_str: str, ground_truth: object, extra_info: Mapping[str, object]
) -> dict[str, JSON]:
    return score_program(sandbox_at("namespaces"), solution_str, ground_truth, extra_info)


def all_work() -> dict[str, Work]:
    """Only what this machine can run."""
    work = {
        "math, short": Work(
            REWARDS["math"].target, [(f"so it is {n}.\n#### {n}", str(n), {}) for n in range(50)]
        ),
        "math, LaTeX": Work(
            REWARDS["math"].target,
            [
                (rf"\boxed{{\frac{{{n}}}{{7}} + \sqrt{{{n}}}}}", rf"\sqrt{{{n}}} + {n}/7", {})
                for n in range(1, 50)
            ],
        ),
        "ifeval, 100 words": Work(REWARDS["ifeval"].target, [(_WORDS, None, _instructions())]),
    }
    for level in LEVELS:
        try:
            sandbox_at(level).close()
        except UserError as refused:
            print(f"no level '{level}': {refused}")
            continue

        target = f"{__file__}:code_at_{level}"
        calls = {
            "fn_name": "add",
            "inputs": [[i, 1] for i in range(8)],
            "outputs": [i + 1 for i in range(8)],
        }
        asserted = [f"assert add({i}, 1) == {i + 1}" for i in range(3)]
        work[f"code at {level}, 8 calls"] = Work(target, [(_ADD, calls, {})])
        work[f"code at {level}, 3 assertions"] = Work(target, [(_ADD, asserted, {})])
        work[f"code at {level}, 2 inputs"] = Work(
            target, [(_SUM, {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}, {})]
        )

    return work


def _instructions() -> dict[str, object]:
    asked: dict[str, dict[str, object]] = {
        "punctuation:no_comma": {},
        "length_constraints:number_sentences": {"num_sentences": 5, "relation": "at least"},
        "change_case:english_lowercase": {},
        "keywords:existence": {"keywords": ["river", "mill"]},
    }
    return {"instruction_id_list": list(asked), "kwargs": list(asked.values())}


async def ask(pool: RewardPool, work: Work, number: int) -> None:
    """A verdict on each of so many answers, all asked for at once; each must be 1."""
    answers = [work.answers[i % len(work.answers)] for i in range(number)]
    reward_results = await asyncio.gather(*(ask_one(pool, "work", *answer) for answer in answers))
    assert all(
        isinstance(reward_result, Score) and reward_result.value == 1.0
        for reward_result in reward_results
    ), reward_results[0]


async def ask_one(
    pool: RewardPool, name: str, response: str, ground_truth: object, row: Row
) -> RewardResult:
    arguments = {
        "data_source": "",
        "solution_str": response,
        "ground_truth": ground_truth,
        "extra_info": row,
    }
    return await pool.call(name, arguments)


async def measure(work: Work, num_workers: int, num_verdicts: int) -> tuple[float, float]:
    """Verdicts per second, seconds of start-up."""
    began = time.monotonic()
    pool = await asyncio.to_thread(
        RewardPool, PoolSettings({"work": work.target}, num_workers, TIMEOUT_S)
    )
    try:
        while len(pool._living) < num_workers:
            await ask(pool, work, 2 * num_workers)
        started = time.monotonic()
        await ask(pool, work, num_verdicts)
        return num_verdicts / (time.monotonic() - started), started - began
    finally:
        await asyncio.to_thread(pool.close)


async def longest_beside_a_hang(
    work: Work, hang: tuple[str, str, object] | None, number: int = 100
) -> float:
    """Milliseconds that the slowest of so many verdicts took, asked for one after another while
    `hang` (function, response, ground truth) holds the other of two processes."""
    pool = await asyncio.to_thread(
        RewardPool, PoolSettings({"work": work.target, "hang": FAILS_TARGET}, 2, TIMEOUT_S)
    )
    try:
        while len(pool._living) < 2:
            await ask(pool, work, 4)
        hanging = asyncio.create_task(ask_one(pool, *hang, {})) if hang else None
        await asyncio.sleep(0.1)

        slowest = 0.0
        for i in range(number):
            began = time.monotonic()
            await ask_one(pool, "work", *work.answers[i % len(work.answers)])
            slowest = max(slowest, time.monotonic() - began)
            if hanging and hanging.done():
                break

        if hanging:
            hanging.cancel()
        return 1000 * slowest
    finally:
        await asyncio.to_thread(pool.close)


def main() -> None:
    parser = argparse.ArgumentParser(description="verdicts per second")
    parser.add_argument("--verdicts", type=int, default=400, help="of each verifier, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="verifiers whose name has this in it")
    arguments = parser.parse_args()
    work = {name: each for name, each in all_work().items() if arguments.only in name}

    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        for name, each in work.items():
            for num_workers in (1, 2):
                measured = asyncio.run(measure(each, num_workers, arguments.verdicts))
                found.setdefault((name, num_workers), []).append(measured)

    print("| verdicts a second | 1 process | 2 | start of 1, s | of 2 | share of 1,024 verdicts |")
    print("|---|---|---|---|---|---|")

    for name in work:
        (one, one_s), (two, two_s) = (
            (max(rate for rate, _ in found[name, n]), min(start for _, start in found[name, n]))
            for n in (1, 2)
        )
        print(
            f"| {name} | {one:.0f} | {two:.0f} | {one_s:.2f} | {two_s:.2f} | "
            f"{two_s / (two_s + STEP / two):.0%} |"
        )

    endless = ("work", "```python\nwhile True: pass\n```", {"inputs": [""], "outputs": [""]})
    print(
        "\n| slowest of 100 verdicts, ms | alone | beside a hang in C | beside an endless pipeline "
        "|\n|---|---|---|---|"
    )

    for name, each in work.items():
        hangs = (None, ("hang", "hang", None), endless if "code" in name else None)
        alone, in_c, pipeline = (asyncio.run(longest_beside_a_hang(each, hang)) for hang in hangs)
        print(
            f"| {name} | {alone:.0f} | {in_c:.0f} | {f'{pipeline:.0f}' if 'code' in name else ''} |"
        )


if __name__ == "__main__":
    main()
