"""Splits a data set's assertions into test cases, which run separately from the tested program.

Most assertions of MBPP and HumanEval, like `assert f([1, 2], x=3) == (4,)`, have only literals and
one call, which can be read without running them. The others run in a separate sandbox without the
program: names that they do not define are functions of the program. Calls of these are passed to
the program's process, with only plain arguments, and the assertion gets the returned plain
value."""

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from distflow.rewards.code.case_formats import AssertTests

_SHOWN = 200
_CANDIDATE = "candidate"
# Code that asks for values that nearly all tests mean to exclude: NaN, infinities, complex numbers.
_SPECIAL = re.compile(
    r"\b(?:is)?(?:nan|inf|infinity|finite)\b|\b1e309|\b(?:complex|cmath)\b|\dj\b", re.IGNORECASE
)


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


class Assertions(NamedTuple):
    """The assertions of a data set's row, as test cases."""

    cases: tuple[str, ...]
    """Whole modules, each with the statements before its assertion."""
    shown: tuple[str, ...]
    """The assertions, for messages."""
    names: Mapping[str, str]
    """Name in the tests → function of the program."""
    literals: tuple[Literal | None, ...]
    """Of each case that holds only literals; None for those that must be run."""
    any_number: bool
    """Whether they may mean NaN, infinities or complex numbers."""


@lru_cache(maxsize=64)  # the responses to a prompt have the same tests
def split_assertions(tests: AssertTests) -> Assertions:
    """Each assertion at the top level (or at that of HumanEval's `check`) is a case, with
    everything before it except the other assertions. If some are in loops or other blocks, all are
    one case. Raises ValueError for tests that are not Python, or test nothing.
    """
    setup = parse(tests.setup, "their setup")
    module = parse(tests.code, "their code")
    check = _check_of(module) if tests.entry else None

    body = module.body
    before = list(setup.body)
    if check is not None:
        body = check.body
        for statement in module.body:
            if statement is not check and not _is_call_of(statement, check.name):
                before.append(statement)

    split = _split(body)
    whole = ast.unparse(ast.Module([*setup.body, *module.body], []))
    imports = list[ast.stmt]()
    for name in _modules(module, _names(whole, tests.entry)):
        imports.append(ast.Import([ast.alias(name)]))

    cases = list[str]()
    shown = list[str]()
    names = dict[str, str]()
    for part in split:
        called = part if check is None else _call_with(check, part)
        case = ast.unparse(ast.Module([*imports, *before, *called], []))
        cases.append(case)
        shown.append("all assertions" if part is body else ast.unparse(part[-1])[:_SHOWN])

        for name in _names(case, tests.entry):
            is_candidate = check is not None and name == _CANDIDATE
            names[name] = tests.entry if is_candidate else name

    if not names:
        raise ValueError("the tests are broken: they do not call a function of the program")

    callable_names = dict(names)
    if check is not None:
        callable_names[check.args.args[0].arg] = tests.entry
    literals = [read_literal([*before, *part], callable_names) for part in split]
    any_number = bool(_SPECIAL.search(whole)) or _asks_for_nan(module)

    return Assertions(tuple(cases), tuple(shown), names, tuple(literals), any_number)


def parse(code: str, what: str) -> ast.Module:
    """Parse tests. Raises ValueError if they are not Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are broken: {what} is not valid Python: {error}") from error


def _asks_for_nan(tests: ast.Module) -> bool:
    """Whether the tests assert that something does not equal itself."""
    for node in ast.walk(tests):
        match node:
            case ast.Compare(left, [ast.NotEq()], [right]) if ast.dump(left) == ast.dump(right):
                return True
    return False


def _check_of(module: ast.Module) -> ast.FunctionDef | None:
    for statement in reversed(module.body):
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            takes_one = len(statement.args.args) == 1
            return statement if takes_one else None
    return None


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
    for statement in body:
        if isinstance(statement, ast.Assert):
            continue
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
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

    bound = {"__name__"}
    read = set[str]()
    for symbol in table.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            bound.add(symbol.get_name())
        if symbol.is_referenced():
            read.add(symbol.get_name())

    for scope in _scopes(table):
        for symbol in scope.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
            if symbol.is_global():
                read.add(symbol.get_name())

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
