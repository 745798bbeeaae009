"""Reads the tests of a row in the formats of APPS, TACO, LiveCodeBench, HumanEval, MBPP and similar
data sets.

Splits a data set's assertions into test cases, which run separately from the tested program.

Most assertions of MBPP and HumanEval, like `assert f([1, 2], x=3) == (4,)`, have only literals and
one call, which can be read without running them. The others run in a separate sandbox without the
program: names that they do not define are functions of the program. Calls of these are passed to
the program's process, with only plain arguments, and the assertion gets the returned plain
value."""

import ast
import builtins
import json
import re
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

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
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_METHOD = re.compile(r"(?:Solution\(\)\.)?([A-Za-z_]\w*)")


def _has_value(entry: object) -> bool:
    return any(map(_has_value, entry)) if isinstance(entry, list) else entry not in (None, "", {})


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
    """Python code with assertions. entry: the function of the program to pass to HumanEval's
    `check`, or empty.

    prompt: code that the response continues or redefines; empty if there is none.
    """

    code: str
    setup: str = ""
    entry: str = ""
    prompt: str = ""


Tests = StreamTests | CallTests | AssertTests


def read_tests(ground_truth: object, row: Mapping[str, object]) -> Tests:
    """The tests in the row's ground truth, else in its columns. Raises ValueError if they cannot be
    read."""
    tests = decoded(ground_truth)
    # as LiveCodeBench
    if isinstance(tests, list) and tests and all(isinstance(entry, Mapping) for entry in tests):
        if not all("input" in pair and "output" in pair for pair in tests):
            raise ValueError("a list of mappings as tests: each needs 'input' and 'output'")
        tests = {
            "inputs": [pair["input"] for pair in tests],
            "outputs": [pair["output"] for pair in tests],
        }
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
        "'fn_name'), a list of "
        "assertions 'test_list', or 'test' with 'entry_point'"
    )


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
    test = columns["test"]
    entry = columns.get("entry_point")
    prompt = columns.get("prompt")
    if not isinstance(test, str):
        raise ValueError(f"'test' is {_short(test)}, not a str")
    if entry is None or entry == "":
        return AssertTests(test)
    name = _function(entry)
    continued = isinstance(prompt, str) and re.search(rf"^(?:async )?def {name}\b", prompt, re.M)
    asked = columns.get(PROMPT_MESSAGES)
    shown = asked[-1]["content"] if not continued and isinstance(asked, list) and asked else prompt
    return AssertTests(
        test, _helpers(str(shown), name, test), name, str(prompt) if continued else ""
    )


def _helpers(prompt: str, entry: str, test: str) -> str:
    """Definitions in the prompt's code besides the requested function, if the tests use any: a
    program must not replace them."""
    defined: list[ast.stmt] = []
    for block in _BLOCK.findall(prompt):
        # prose, e.g. a line that begins with "from"
        with suppress(SyntaxError, ValueError, RecursionError):
            defined += ast.parse(block).body
    defined = [each for each in defined if getattr(each, "name", "") != entry]
    scope = symtable.symtable(code := ast.unparse(ast.Module(defined, [])), "prompt", "exec")
    return code if any(re.search(rf"\b{name}\b", test) for name in scope.get_identifiers()) else ""


def parse(code: str, what: str) -> ast.Module:
    """Parse tests. Raises ValueError if they are not Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are broken: {what} is not valid Python: {error}") from error


def _short(value: object) -> str:
    return f"{value!r:.{_SHORT}}"


class Literal(NamedTuple):
    """A call, and the value that it must return."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    wanted: Any


def read_literal(statements: Sequence[ast.stmt], names: Mapping[str, str]) -> Literal | None:
    """Read a case's statements, the last of which is its assertion; None if they must be run.
    names: name in the tests → function of the program."""
    try:
        for statement in statements[:-1]:
            match statement:
                case ast.Expr(value) | ast.Assign([ast.Name()], value):
                    ast.literal_eval(value)
                case _:
                    return None
        match statements[-1]:
            case ast.Assert(
                ast.Compare(ast.Call(ast.Name(name), args, keywords), [ast.Eq()], [wanted]),
                None | ast.Constant(),
            ) if name in names and all(keyword.arg for keyword in keywords):
                kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                return Literal(
                    names[name],
                    [ast.literal_eval(each) for each in args],
                    kwargs,
                    ast.literal_eval(wanted),
                )
    # raised by `literal_eval`
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    return None


_SHOWN = 200
_CANDIDATE = "candidate"

# Code that asks for values that nearly all tests mean to exclude: NaN, infinities, complex numbers.
_SPECIAL = re.compile(
    r"\b(?:is)?(?:nan|inf|infinity|finite)\b|\b1e309|\b(?:complex|cmath)\b|\dj\b", re.IGNORECASE
)


class Assertions(NamedTuple):
    """cases: whole modules, each with the statements before its assertion. shown: the assertions,
    for messages.

    names: name in the tests → function of the program.
    literals: of each case that holds only literals; None for those that must be run. any_number:
    whether they may mean NaN, infinities or complex numbers.
    """

    cases: tuple[str, ...]
    shown: tuple[str, ...]
    names: Mapping[str, str]
    literals: tuple[Literal | None, ...]
    any_number: bool


@lru_cache(maxsize=64)  # the responses to a prompt have the same tests
def split_assertions(tests: AssertTests) -> Assertions:
    """Each assertion at the top level (or at that of HumanEval's `check`) is a case, with
    everything before it except the other assertions. If some are in loops or other blocks, all are
    one case. Raises ValueError for tests that are not Python, or test nothing.
    """
    setup = parse(tests.setup, "their setup")
    module = parse(tests.code, "their code")
    check = _check_of(module) if tests.entry else None
    body = check.body if check else module.body
    split = _split(body)
    before = list(setup.body)
    if check:
        before += [
            each for each in module.body if each is not check and not _is_call_of(each, check.name)
        ]
    parts = [_call_with(check, part) if check else part for part in split]
    whole = ast.unparse(ast.Module([*setup.body, *module.body], []))
    modules = [
        ast.Import([ast.alias(name)]) for name in _modules(module, _names(whole, tests.entry))
    ]
    cases = tuple(ast.unparse(ast.Module([*modules, *before, *part], [])) for part in parts)
    names = {name: name for case in cases for name in _names(case, tests.entry)}
    if not names:
        raise ValueError("the tests are broken: they do not call a function of the program")
    called = names
    if check:
        names = {name: tests.entry if name == _CANDIDATE else name for name in names}
        called = {**names, check.args.args[0].arg: tests.entry}
    literals = tuple(read_literal([*before, *part], called) for part in split)
    shown = tuple(
        "all assertions" if part is body else ast.unparse(part[-1])[:_SHOWN] for part in split
    )
    return Assertions(
        cases, shown, names, literals, bool(_SPECIAL.search(whole)) or _asks_for_nan(module)
    )


def _asks_for_nan(tests: ast.Module) -> bool:
    """Whether the tests assert that something does not equal itself."""
    for node in ast.walk(tests):
        match node:
            case ast.Compare(left, [ast.NotEq()], [right]) if ast.dump(left) == ast.dump(right):
                return True
    return False


def _check_of(module: ast.Module) -> ast.FunctionDef | None:
    found = [
        each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == "check"
    ]
    return found[-1] if found and len(found[-1].args.args) == 1 else None


def _is_call_of(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Name(called))):
            return called == name
    return False


def _call_with(check: ast.FunctionDef, body: list[ast.stmt]) -> list[ast.stmt]:
    """`check` with another body, and its call."""
    call = ast.Call(ast.Name(check.name, ast.Load()), [ast.Name(_CANDIDATE, ast.Load())], [])
    return [ast.FunctionDef(check.name, check.args, body, [], lineno=1), ast.Expr(call)]


def _split(body: list[ast.stmt]) -> list[list[ast.stmt]]:
    blocks = [each for each in body if not isinstance(each, ast.Assert)]
    if any(isinstance(node, ast.Assert) for block in blocks for node in ast.walk(block)):
        return [body]
    parts = []
    before = list[ast.stmt]()
    for statement in body:
        if not isinstance(statement, ast.Assert):
            before.append(statement)
        elif not isinstance(statement.test, ast.Constant):  # `assert True` tests nothing
            parts.append([*before, statement])
    return parts or [body]


def _names(case: str, entry: str) -> list[str]:
    """Names that the code reads but does not define. A built-in counts only if there are no others:
    a program that defines `abs` must not change its meaning in the tests."""
    try:
        table = symtable.symtable(case, "tests.py", "exec")
    except SyntaxError as error:
        raise ValueError(f"the tests are broken: {error}") from error
    bound = {
        each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()
    }
    everywhere = [each for scope in _scopes(table) for each in scope.get_symbols()]
    bound |= {"__name__"} | {
        each.get_name() for each in everywhere if each.is_declared_global() and each.is_assigned()
    }
    read = {each.get_name() for each in everywhere if each.is_global()}
    read |= {each.get_name() for each in table.get_symbols() if each.is_referenced()}
    free = sorted(read - bound)
    own = [name for name in free if not hasattr(builtins, name) or name == entry]
    return own or [name for name in free if isinstance(getattr(builtins, name), type(len) | type)]


def _modules(tests: ast.Module, names: list[str]) -> list[str]:
    """Modules of the standard library that the tests use by attribute, but leave to the program to
    import."""
    owners = set[str]()
    called = set[str]()
    for node in ast.walk(tests):
        match node:
            case ast.Attribute(ast.Name(name)):
                owners.add(name)
            case ast.Call(ast.Name(name)):
                called.add(name)
    return [name for name in names if name in owners - called and name in sys.stdlib_module_names]


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)
