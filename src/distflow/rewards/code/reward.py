"""`code`: does the program in the response pass the row's tests? It runs in the sandbox
(docs/sandbox.md).

Finding the program takes linear time, since the policy writes the response.
"""

import atexit
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from distflow.builtin_names import REWARDS
from distflow.config.keys.reward import RewardPart
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON
from distflow.rewards.code.assertions import Assertions, split_assertions
from distflow.rewards.code.case_formats import (
    AssertTests,
    CallTests,
    StreamTests,
    Tests,
    read_tests,
)
from distflow.rewards.code.execution import (
    Outcome,
    ProgramUnderTest,
    Stopped,
    TimedSandbox,
    run_assertions,
    run_calls,
    run_streams,
)
from distflow.rewards.reward_results import left_s, shortened
from distflow.sandbox.interface import AnySandbox
from distflow.sandbox.local_sandbox import Sandbox, probe
from distflow.sandbox.remote import RemoteSandbox

Plan = StreamTests | CallTests | Assertions
LONGEST_S = 60.0
"""Wall-clock limit for a score outside of a pool, in seconds."""
_SHARE_OF_TIME = 0.8
_NUM_SHOWN = 3
_SHOWN = 500
# Imports that graders of function-call tasks add to a program, because their prompts assume them.
_IMPORTS = (
    "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string; "
    "from typing import *; from bisect import *; from collections import *; from functools import "
    "*; "
    "from heapq import *; from itertools import *; from math import *; from builtins import *\n"
)
_TYPING = "from typing import *\n"
_METHOD = """
if "{0}" not in globals() and "Solution" in globals():
    def {0}(*args, **kwargs):
        return Solution().{0}(*args, **kwargs)
"""

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`{]*)[^`\n]*")
_PYTHON = ("python", "python3", "py", "py3")
_THOUGHT_END = "</think>"


def find_program(response: str, names: Sequence[str] = ()) -> str | None:
    """The program, or None if the response shows only code of other languages.

    Text before the last `</think>` does not count. Fenced blocks marked as Python count or, if
    there are none, unmarked ones; the last of them that defines one of `names` is the program, else
    the last one. An unclosed block ends with the response. A response without a fence is a program
    as a whole.
    """
    text = response.rpartition(_THOUGHT_END)[2]
    blocks = _fenced(text)
    if not blocks:
        return text
    candidates = [body for mark, body in blocks if mark in _PYTHON] or [
        body for mark, body in blocks if not mark
    ]
    if not candidates:
        return None
    for body in reversed(candidates):
        if any(defines(body, name) for name in names):
            return body
    return candidates[-1]


def _fenced(text: str) -> list[tuple[str, str]]:
    """(language, code) of each block. A fence that is indented by four more spaces than the first
    (CommonMark) belongs to the code, as in a docstring."""
    blocks = list[tuple[str, str]]()
    opening: re.Match[str] | None = None
    body = list[str]()
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            opening = fence
            continue
        is_end = (
            fence is not None
            and fence[2].startswith(opening[2])
            and not fence[3]
            and len(fence[1]) <= len(opening[1]) + 3
        )
        if is_end:
            blocks.append((opening[3].lower(), textwrap.dedent("\n".join(body))))
            opening = None
            body = []
        else:
            body.append(line)
    if opening is not None:
        blocks.append((opening[3].lower(), textwrap.dedent("\n".join(body))))
    return blocks


def defines(program: str, name: str) -> bool:
    """Whether a line of it defines a function, a class, or at the top level a variable of that
    name."""
    name = re.escape(name)
    return (
        re.search(
            rf"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*=", program, re.M
        )
        is not None
    )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    sandbox: str = "",
) -> dict[str, JSON]:
    """1.0 if the program passes all tests, else 0.0.

    In the result, `share` is the part of the tests that it passes, `failed` the first failure with
    its reason and output; `program` is the code that ran, `seconds` the time that it took. sandbox:
    the URL of one on another machine (`distflow sandbox serve`). Raises ValueError if the tests are
    broken, UserError if nothing would confine a program, SandboxFault.
    """
    return score_program(_sandbox(sandbox), solution_str, ground_truth, extra_info or {})


def compute_share(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    sandbox: str = "",
) -> dict[str, JSON]:
    """As `compute_score`, but the score is the share of passed tests; only a program that passes
    all is right (`acc`)."""
    reward_result = compute_score(data_source, solution_str, ground_truth, extra_info, sandbox)
    return {**reward_result, "score": reward_result["share"]}


def check_row(ground_truth: object, extra_info: Mapping[str, object]) -> None:
    """Raises ValueError if the row's tests are broken, so that no program can be scored. Runs none
    of them."""
    tests = read_tests(ground_truth, extra_info)
    if isinstance(tests, AssertTests):
        split_assertions(tests)


def score_program(
    sandbox: AnySandbox, answer: str, ground_truth: object, row: Mapping[str, object]
) -> dict[str, JSON]:
    """As `compute_score`, in the caller's sandbox, which is not used by others meanwhile."""
    tests = read_tests(ground_truth, row)
    plan = split_assertions(tests) if isinstance(tests, AssertTests) else tests
    box = TimedSandbox(sandbox, min(LONGEST_S, _SHARE_OF_TIME * left_s()))
    outcomes = list[Outcome]()
    stopped = ""
    program = find_program(answer, _names(plan))
    if program is None:
        stopped = "the response has no program in Python"
    else:
        try:
            for outcome in _outcomes(box, _whole(program, tests, plan), plan):
                outcomes.append(outcome)
        except Stopped as reason:
            stopped = str(reason)
    summary = _summary(
        outcomes, stopped, len(plan.cases if isinstance(plan, Assertions) else plan.inputs)
    )
    summary |= {
        "program": program and shortened(program),
        "sandbox": sandbox.level.name,
        "seconds": box.seconds(),
    }
    return summary


def isolation_of(parts: Iterable[RewardPart]) -> str | None:
    """The isolation of code that reward functions run on this machine, None if they run none
    here. Raises UserError if nothing would confine a program."""
    for part in parts:
        runs_code = part.name in REWARDS and REWARDS[part.name].executes_response
        if runs_code and not part.options.get("sandbox"):
            level = probe()
            if level.name == "none":
                raise UserError(f"the reward '{part.name}' cannot run programs here: {level}")
            return level.name
    return None


@cache
def _sandbox(url: str) -> AnySandbox:
    """One sandbox for all calls in this process. url: "" for a local one."""
    sandbox = RemoteSandbox(url) if url else Sandbox()
    atexit.register(sandbox.close)
    return sandbox


def _names(plan: Plan) -> list[str]:
    """Names that the program must define."""
    if isinstance(plan, CallTests):
        return [plan.name]
    return list(plan.names.values()) if isinstance(plan, Assertions) else []


def _whole(program: str, tests: Tests, plan: Plan) -> str:
    """The program after the imports that its tests assume, with its method as a function."""
    if isinstance(tests, StreamTests):
        return program
    methods = "".join(_METHOD.format(name) for name in _names(plan))
    if "__future__" in program:  # such an import must come first
        return program + methods
    if isinstance(tests, CallTests):
        return _IMPORTS + program + methods
    if not tests.entry:
        return program
    if tests.prompt and not any(defines(program, name) for name in _names(plan)):
        program = (
            program if program.lstrip("\r\n")[:1].isspace() else textwrap.indent(program, "    ")
        )
    return (tests.prompt or _TYPING) + "\n" + program + methods


def _outcomes(box: TimedSandbox, code: str, plan: Plan) -> Iterator[Outcome]:
    if isinstance(plan, StreamTests):
        yield from run_streams(box, code, plan)
        return
    program = ProgramUnderTest(box, code)
    try:
        yield from (
            run_calls(program, plan)
            if isinstance(plan, CallTests)
            else run_assertions(box, program, plan)
        )
    finally:
        program.end_process()


def _summary(outcomes: list[Outcome], stopped: str, num_cases: int) -> dict[str, JSON]:
    failed: list[JSON] = []
    for case, why, printed in [outcome for outcome in outcomes if outcome.why][:_NUM_SHOWN]:
        failed.append({"case": case, "why": why[:_SHOWN], "printed": printed})
    if stopped:
        rest = num_cases - len(outcomes)
        failed.append(
            {"case": f"{rest} of {num_cases} cases", "why": f"not passed: {stopped}", "printed": ""}
        )
    num_passed = sum(not outcome.why for outcome in outcomes)
    right = float(num_passed == num_cases)
    share = num_passed / num_cases
    return {"score": right, "acc": right, "share": share, "cases": num_cases, "failed": failed}
