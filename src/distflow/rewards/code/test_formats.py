"""Reads the tests of a row in the formats of APPS, TACO, LiveCodeBench, HumanEval, MBPP and similar data sets."""

import ast
import json
import re
import symtable
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distflow.builtin_names import PROMPT_MESSAGES
from distflow.rewards.extracted_answers import decoded

_SHORT = 200
_KINDS = ("inputs", "input_output", "test_list", "test")
# A statement of Python at the start of a line, with the lines that belong to it.
_BLOCK = re.compile(
    r"^(?:@.*\n)*(?:async def |def |class |import |from |[A-Za-z_]\w* = ).*(?:\n(?:[ \t)\]}].*|(?=\n)))*", re.M
)
_METHOD = re.compile(r"(?:Solution\(\)\.)?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class StreamTests:
    """Standard inputs of a program, and the outputs that it must print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CallTests:
    """Arguments of a function (or a method of `Solution`), and the results that it must return, as JSON values."""

    name: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class AssertTests:
    """Python code that asserts. entry: the function of the program that HumanEval's `check` is to get, or empty.

    prompt: code that the response continues, or defines again; empty if there is none.
    """

    code: str
    setup: str = ""
    entry: str = ""
    prompt: str = ""


Tests = StreamTests | CallTests | AssertTests


def read_tests(ground_truth: object, row: Mapping[str, object]) -> Tests:
    """The tests in the row's ground truth, else in its columns. Raises ValueError if they cannot be read."""
    tests = decoded(ground_truth)
    if isinstance(tests, list) and tests and all(isinstance(entry, Mapping) for entry in tests):  # as LiveCodeBench
        if not all("input" in pair and "output" in pair for pair in tests):
            raise ValueError("a list of mappings as tests: each needs 'input' and 'output'")
        tests = {"inputs": [pair["input"] for pair in tests], "outputs": [pair["output"] for pair in tests]}
    elif isinstance(tests, list):
        tests = {"test_list": tests}
    elif isinstance(tests, str) and "assert" in tests:  # else it may be a solution
        tests = {"test": tests}
    columns = {**row, **tests} if isinstance(tests, Mapping) else dict(row)
    kind = next((name for name in _KINDS if isinstance(tests, Mapping) and tests.get(name)), None)
    kind = kind or next((name for name in _KINDS if columns.get(name)), None)
    if kind == "input_output":
        nested = decoded(columns[kind])
        if not isinstance(nested, Mapping):
            raise ValueError(f"'input_output' is {_short(nested)}, not a mapping")
        columns, kind = {**columns, **nested}, "inputs"
    if kind == "inputs":
        return _read_pairs(columns)
    if kind == "test_list":
        return _read_list(columns)
    if kind == "test":
        return _read_check(columns)
    raise ValueError(
        "'code' needs tests in the row's ground truth or columns: 'inputs' and 'outputs' (and 'fn_name'), a list of "
        "assertions 'test_list', or 'test' with 'entry_point'"
    )


def _read_pairs(columns: Mapping[str, object]) -> StreamTests | CallTests:
    inputs, outputs = decoded(columns["inputs"]), decoded(columns.get("outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("'inputs' and 'outputs' must be lists")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} 'inputs' and {len(outputs)} 'outputs'")
    name = columns.get("fn_name")
    if name is None or name == "":
        return StreamTests(tuple(map(_stream, inputs)), tuple(map(_stream, outputs)))
    arguments = tuple(_arguments(each) for each in inputs)
    texts = all(isinstance(each, str) for each in inputs)
    return CallTests(_function(name), arguments, tuple(_returned(each, texts) for each in outputs))


def _stream(value: object) -> str:
    """A str, or the list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not text for standard input or output")
    return value


def _arguments(value: object) -> list[Any]:
    """A list of arguments, or JSON of one on each line."""
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not a list of arguments")
    try:
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    except ValueError as error:
        raise ValueError(f"the arguments {_short(value)} are not JSON: {error}") from error


def _returned(value: object, is_text: bool) -> Any:
    if not (is_text and isinstance(value, str)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"the result {_short(value)} is not JSON: {error}") from error


def _function(name: object) -> str:
    match = _METHOD.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"{_short(name)} is not a function name")
    return match[1]


def _read_list(columns: Mapping[str, object]) -> AssertTests:
    tests = _lines("test_list", columns["test_list"])
    imports = _lines("test_imports", columns.get("test_imports") or [])
    setup = columns.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise ValueError(f"'test_setup_code' is {_short(setup)}, not a str")
    return AssertTests("\n".join(tests), "\n".join([*imports, setup]))


def _lines(name: str, value: object) -> list[str]:
    lines = decoded(value)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"'{name}' is {_short(lines)}, not a list of str")
    return lines


def _read_check(columns: Mapping[str, object]) -> AssertTests:
    test, entry, prompt = columns["test"], columns.get("entry_point"), columns.get("prompt")
    if not isinstance(test, str):
        raise ValueError(f"'test' is {_short(test)}, not a str")
    if entry is None or entry == "":
        return AssertTests(test)
    name = _function(entry)
    continued = isinstance(prompt, str) and re.search(rf"^(?:async )?def {name}\b", prompt, re.M)
    asked = columns.get(PROMPT_MESSAGES)
    shown = asked[-1]["content"] if not continued and isinstance(asked, list) and asked else prompt
    return AssertTests(test, _helpers(str(shown), name, test), name, str(prompt) if continued else "")


def _helpers(prompt: str, entry: str, test: str) -> str:
    """What the code in the prompt defines beside the function that is asked for, if the tests use any of it: a program
    must not replace it."""
    defined: list[ast.stmt] = []
    for block in _BLOCK.findall(prompt):
        with suppress(SyntaxError, ValueError, RecursionError):  # prose, e.g. a line that begins with "from"
            defined += ast.parse(block).body
    defined = [each for each in defined if getattr(each, "name", "") != entry]
    scope = symtable.symtable(code := ast.unparse(ast.Module(defined, [])), "prompt", "exec")
    return code if any(re.search(rf"\b{name}\b", test) for name in scope.get_identifiers()) else ""


def parse(code: str, what: str) -> ast.Module:
    """Raises ValueError for tests that are not Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are broken: {what} is not valid Python: {error}") from error


def _short(value: object) -> str:
    return f"{value!r:.{_SHORT}}"
