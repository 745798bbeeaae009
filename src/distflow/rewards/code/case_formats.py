"""Reads the tests of a row in the formats of APPS, TACO, LiveCodeBench, HumanEval, MBPP and similar
data sets."""

import ast
import json
import re
import symtable
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distflow.builtin_names import PROMPT_MESSAGES
from distflow.rewards.extracted_answers import decoded

_SHORT = 200
_KINDS = ("inputs", "input_output", "test_list", "test")
# A statement of Python at the start of a line, with the lines that belong to it.
_BLOCK = re.compile(
    (
        r"^(?:@.*\n)*(?:async def |def |class |import |from |[A-Za-z_]\w* = ).*(?:\n(?:[ "
        r"\t)\]}].*|(?=\n)))*"
    ),
    re.M,
)
_METHOD = re.compile(r"(?:Solution\(\)\.)?([A-Za-z_]\w*)")


def _has_value(entry: object) -> bool:
    if isinstance(entry, list):
        return any(_has_value(each) for each in entry)
    return entry not in (None, "", {})


@dataclass(frozen=True)
class StreamTests:
    """Standard inputs of a program, and the required outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CallTests:
    """Arguments of a function (or a method of `Solution`), and the results that it must return, as
    JSON values."""

    name: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]

    @cached_property
    def may_be_wrapped(self) -> bool:
        """Whether each result may be the only entry of its list, as in APPS: all are lists of one
        entry, and some entry has a value, unlike in `[[]]`, `[None]` and `[[None]]`."""
        entries = [
            output[0] for output in self.outputs if isinstance(output, list) and len(output) == 1
        ]
        return len(entries) == len(self.outputs) and any(map(_has_value, entries))


@dataclass(frozen=True)
class AssertTests:
    """Python code with assertions."""

    code: str
    setup: str = ""
    """Code that runs before it."""
    entry: str = ""
    """The function of the program to pass to HumanEval's `check`, or empty."""
    prompt: str = ""
    """Code that the response continues or redefines; empty if there is none."""


Tests = StreamTests | CallTests | AssertTests


def read_tests(ground_truth: object, row: Mapping[str, object]) -> Tests:
    """The tests in the row's ground truth, else in its columns. Raises ValueError if they cannot be
    read."""
    tests = _by_kind(decoded(ground_truth))
    columns = {**row, **tests}
    kind = _first_kind(tests) or _first_kind(columns)
    if kind == "input_output":
        nested = decoded(columns[kind])
        if not isinstance(nested, Mapping):
            raise ValueError(f"'input_output' is {_short(nested)}, not a mapping")
        columns = {**columns, **nested}
        kind = "inputs"

    if kind == "inputs":
        return _read_pairs(columns)
    if kind == "test_list":
        return _read_list(columns)
    if kind == "test":
        return _read_check(columns)

    raise ValueError(
        "'code' needs tests in the row's ground truth or columns: 'inputs' and 'outputs' (and "
        "'fn_name'), a list of assertions 'test_list', or 'test' with 'entry_point'"
    )


def _by_kind(tests: object) -> Mapping[str, object]:
    """The tests of a ground truth under the names of columns; empty if it has none."""
    if isinstance(tests, Mapping):
        return tests
    if isinstance(tests, str):
        return {"test": tests} if "assert" in tests else {}  # else it may be a solution
    if not isinstance(tests, list):
        return {}

    is_of_mappings = bool(tests) and all(isinstance(entry, Mapping) for entry in tests)
    if not is_of_mappings:
        return {"test_list": tests}
    # as LiveCodeBench
    if not all("input" in pair and "output" in pair for pair in tests):
        raise ValueError("a list of mappings as tests: each needs 'input' and 'output'")

    inputs = [pair["input"] for pair in tests]
    outputs = [pair["output"] for pair in tests]
    return {"inputs": inputs, "outputs": outputs}


def _first_kind(columns: Mapping[str, object]) -> str | None:
    return next((kind for kind in _KINDS if columns.get(kind)), None)


def _read_pairs(columns: Mapping[str, object]) -> StreamTests | CallTests:
    inputs = decoded(columns["inputs"])
    outputs = decoded(columns.get("outputs"))
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
    match = None
    if isinstance(name, str):
        match = _METHOD.fullmatch(name.strip())

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
    test = columns["test"]
    entry = columns.get("entry_point")
    prompt = columns.get("prompt")
    if not isinstance(test, str):
        raise ValueError(f"'test' is {_short(test)}, not a str")
    if entry is None or entry == "":
        return AssertTests(test)

    name = _function(entry)
    if isinstance(prompt, str) and re.search(rf"^(?:async )?def {name}\b", prompt, re.M):
        return AssertTests(test, _helpers(prompt, name, test), name, prompt)

    shown = prompt
    messages = columns.get(PROMPT_MESSAGES)
    if isinstance(messages, list) and messages:
        shown = messages[-1]["content"]
    return AssertTests(test, _helpers(str(shown), name, test), name)


def _helpers(prompt: str, entry: str, test: str) -> str:
    """Definitions in the prompt's code besides the requested function, if the tests use any: a
    program must not replace them."""
    defined: list[ast.stmt] = []
    for block in _BLOCK.findall(prompt):
        # prose, e.g. a line that begins with "from"
        with suppress(SyntaxError, ValueError, RecursionError):
            defined += ast.parse(block).body

    defined = [each for each in defined if getattr(each, "name", "") != entry]
    code = ast.unparse(ast.Module(defined, []))

    scope = symtable.symtable(code, "prompt", "exec")
    for name in scope.get_identifiers():
        if re.search(rf"\b{name}\b", test):
            return code

    return ""


def _short(value: object) -> str:
    return f"{value!r:.{_SHORT}}"
