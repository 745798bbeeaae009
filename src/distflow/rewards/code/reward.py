"""`code`: does the program in the response pass the row's tests? It runs in the sandbox
(docs/sandbox.md).

Finding the program takes linear time, since the policy writes the response.
"""

import ast
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
from distflow.rewards.code.score_client import score_at
from distflow.rewards.reward_results import left_s, shortened
from distflow.sandbox.local_sandbox import Sandbox, probe

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
    "*; from heapq import *; from itertools import *; from math import *; from builtins import *\n"
)
_TYPING = "from typing import *\n"
_METHOD = """
if "{0}" not in globals() and "Solution" in globals():
    def {0}(*args, **kwargs):
        return Solution().{0}(*args, **kwargs)
"""

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`{]*)[^`\n]*")
_PYTHON = ("python", "python3", "py", "py3")
_MARKDOWN = ("markdown", "md")
_MOST_ENDS = 4
"""Fences of each kind tried as the end of a block."""
_CAREFUL_BLOCKS = 8
"""The first blocks, which may have fences in their docstrings. All bounds are for linear time."""
_MOST_HELPERS = 100
"""The last blocks, which may define what the program uses."""
_TRIPLE = re.compile(r"\"{3}|'{3}")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_READS_INPUT = re.compile(r"\b(?:input|stdin)\b")
_THOUGHT_END = "</think>"


def find_program(response: str, names: Sequence[str] = ()) -> str | None:
    """The program, or None if the response shows only code of other languages.

    Text before the last `</think>` does not count. Fenced blocks marked as Python count or, if
    there are none, unmarked ones; the last of them that defines one of `names` is the program, else
    the last one. Other blocks that only define what it needs come before it. An unclosed block ends
    with the response. A response without a fence is a program as a whole.
    """
    text = response.rpartition(_THOUGHT_END)[2]
    blocks = list[tuple[str, str]]()
    for block in _fenced(text):
        blocks += _fenced(block[1]) if block[0] in _MARKDOWN else [block]
    if not blocks:
        return text

    candidates = [body for mark, body in blocks if mark in _PYTHON] or [
        body for mark, body in blocks if not mark
    ]
    if not candidates:
        return None

    defining = [
        i for i, body in enumerate(candidates) if any(defines(body, name) for name in names)
    ]
    chosen = candidates.pop(defining[-1] if defining else -1)

    return "\n".join([*_helpers(candidates, chosen, names), chosen])


def _helpers(blocks: list[str], program: str, names: Sequence[str]) -> list[str]:
    """The definitions, in other blocks, of what the program uses and does not define itself; none
    of blocks that use the program, which are examples."""
    if not blocks or "__future__" in program:  # such an import must come first
        return []

    tree = _parsed(program)
    if tree is None:
        return []

    functions = {each.name for each in tree.body if isinstance(each, _FUNCTIONS)}
    definitions: dict[str, ast.stmt] = {}
    sources: dict[ast.stmt, str] = {}
    for block in blocks[-_MOST_HELPERS:]:
        module = _parsed(block)
        if module is None or functions & _used(module) - _bound(module):
            continue

        lines = block.split("\n")
        for statement in module.body:
            decorators = getattr(statement, "decorator_list", [])
            start = min(each.lineno for each in (statement, *decorators))
            sources[statement] = "\n".join(lines[start - 1 : statement.end_lineno])
            for name in _defined(statement, sources[statement]):
                definitions[name] = statement

    wanted = list({*names, *_used(tree)} - _bound(tree))
    found = set[ast.stmt]()
    while wanted:
        definition = definitions.get(wanted.pop())
        if definition is not None and definition not in found:
            found.add(definition)
            wanted += _used(definition)

    return [source for statement, source in sources.items() if statement in found]


def _parsed(code: str) -> ast.Module | None:
    """None if it is not Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the latter if nested deeply
        return None


def _defined(statement: ast.stmt, source: str) -> list[str]:
    """The names that a definition at the top level defines; none for other statements, such as
    examples and what reads input."""
    match statement:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return [name]
        case ast.Import(names) | ast.ImportFrom(_, names):
            return [each.asname or each.name.partition(".")[0] for each in names]
        case ast.Assign() | ast.AnnAssign():
            if _READS_INPUT.search(source):
                return []
            return [*_bound(statement)]

    return []


def _used(tree: ast.AST) -> set[str]:
    """Names that it reads."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
    return names


def _bound(tree: ast.AST) -> set[str]:
    """Names of its functions, parameters and variables."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.arg(name):
                names.add(name)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)

    return names


def _fenced(text: str) -> list[tuple[str, str]]:
    """(language, code) of each block."""
    blocks: list[tuple[str, str]] = []
    lines = text.split("\n")

    position = 0
    while position < len(lines):
        opening = _FENCE.fullmatch(lines[position].rstrip())
        position += 1
        if opening:
            is_careful = len(blocks) < _CAREFUL_BLOCKS
            end = _block_end(lines, position, opening[1], is_careful)
            blocks.append((opening[2].lower(), _code(lines[position:end])))
            position = end + 1

    return blocks


def _block_end(lines: list[str], start: int, fence: str, is_careful: bool) -> int:
    """The line of the fence that ends the block, else the number of lines.

    is_careful: a fence in a docstring does not end it, so the first fence before which the code is
    valid Python does, or the end of the response; if there is none, the first of all."""
    first = len(lines)
    tried = [0, 0]  # fences outside of triple quotes and within, by the number of these before
    is_quoted = False
    for i in range(start, len(lines)):
        found = _FENCE.fullmatch(lines[i].rstrip())
        if found is not None and not found[2] and found[1].startswith(fence):
            if not is_careful:
                return i

            first = min(first, i)
            tried[is_quoted] += 1

            if tried[is_quoted] <= _MOST_ENDS:
                code = _code(lines[start:i])
                if not _TRIPLE.search(code) or _parsed(code) is not None:
                    return i

        is_quoted ^= len(_TRIPLE.findall(lines[i])) % 2 == 1

    if first == len(lines) or _parsed(_code(lines[start:])) is not None:
        return len(lines)
    return first


def _code(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines))


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
    row = extra_info or {}
    if sandbox:
        return score_at(sandbox, solution_str, ground_truth, row, min(LONGEST_S, left_s()))
    return score_program(_sandbox(), solution_str, ground_truth, row)


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
    sandbox: Sandbox, answer: str, ground_truth: object, row: Mapping[str, object]
) -> dict[str, JSON]:
    """As `compute_score`, in the caller's sandbox."""
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
def _sandbox() -> Sandbox:
    """One for all calls in this process."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


def _names(plan: Plan) -> list[str]:
    """Names that the program must define."""
    if isinstance(plan, CallTests):
        return [plan.name]
    if isinstance(plan, Assertions):
        return list(plan.names.values())
    return []


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

    completes = tests.prompt and not any(defines(program, name) for name in _names(plan))
    if completes and not program.lstrip("\r\n")[:1].isspace():
        program = textwrap.indent(program, "    ")
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
