"""Assertions that hold nothing but literals and one call of the program: they need no process to run in.

`assert f([1, 2], x=3) == (4,)` is most of what MBPP and HumanEval have; what it asks and expects can be read off it.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Literal(NamedTuple):
    """A call, and whether what it returned, a plain value, is right."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    holds: Callable[[Any], bool]


def read_literal(statements: Sequence[ast.stmt], names: Mapping[str, str]) -> Literal | None:
    """Of a case's statements, the last its assertion; None where it has to be run. names: what stands
    for a function of the program → that function's."""
    *before, assertion = statements
    if not isinstance(assertion, ast.Assert) or not all(map(_is_idle, before)):
        return None
    if assertion.msg is not None and not isinstance(assertion.msg, ast.Constant):
        return None
    try:
        return _read(assertion.test, names)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # as `literal_eval` says of what is none
        return None


def _read(test: ast.expr, names: Mapping[str, str]) -> Literal | None:
    match test:
        case ast.Call(ast.Name(name), args, keywords) if name in names:
            kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg}
            if len(kwargs) < len(keywords):  # `**` something
                return None
            return Literal(names[name], [ast.literal_eval(each) for each in args], kwargs, bool)
        case ast.UnaryOp(ast.Not(), operand):
            called = _read(operand, names) if isinstance(operand, ast.Call) else None
            return called and called._replace(holds=lambda value: not value)
        case ast.Compare(ast.Call() as left, [ast.Eq()], [right]):
            called, wanted = _read(left, names), ast.literal_eval(right)
            return called and called._replace(holds=lambda value: bool(value == wanted))
        case ast.Compare(ast.Call() as left, [ast.Is()], [ast.Constant(True | False | None as wanted)]):
            called = _read(left, names)
            return called and called._replace(holds=lambda value: value is wanted)
    return None


def _is_idle(statement: ast.stmt) -> bool:
    """Whether it only gives a name to a literal, or is a text."""
    if isinstance(statement, ast.Expr | ast.Assign):
        try:
            ast.literal_eval(statement.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return False
        return isinstance(statement, ast.Expr) or all(isinstance(target, ast.Name) for target in statement.targets)
    return False
