"""The built-in tools. Like a user's, each is a function, or a class whose instances are called."""

import ast
import math
import operator
from collections.abc import Callable

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
}
_MAX_EXPONENT = 10_000
_MAX_CHARACTERS = 1000


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: The expression, for example "(12 + 30) * 2 / sqrt(16)".
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {_MAX_CHARACTERS} characters")
    return str(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first = _value(left)
            second = _value(right)
            if isinstance(sign, ast.Pow) and abs(second) > _MAX_EXPONENT:
                raise ValueError(f"the exponent is larger than {_MAX_EXPONENT}")
            return _OPERATORS[type(sign)](first, second)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


PYTHON_SESSION = '''
import ast as _ast, contextlib as _contextlib, io as _io, sys as _sys, traceback as _traceback

_names = {"__name__": "__main__"}

def run(code):
    """What the code prints, and the value of its last line if that is an expression."""
    printed = _io.StringIO()
    with _contextlib.redirect_stdout(printed), _contextlib.redirect_stderr(printed):
        try:
            body = _ast.parse(code).body
            last = body.pop() if body and isinstance(body[-1], _ast.Expr) else None
            exec(compile(_ast.Module(body, []), "<tool>", "exec"), _names)
            if last is not None:
                value = eval(compile(_ast.Expression(last.value), "<tool>", "eval"), _names)
                if value is not None:
                    print(repr(value))
        except:
            return printed.getvalue() + "".join(_traceback.format_exception_only(_sys.exception())), True
    return printed.getvalue() or "(no output)", False
'''  # noqa: E501
"""Executed in the sandbox once per episode, so that names persist between calls."""


def python(code: str) -> str:
    """Runs Python code and returns what it prints. Names that it defines are kept for later calls.

    Args:
        code: The code to run.
    """
    raise AssertionError("it runs in the sandbox")


BUILTIN_TOOLS = ("calculator", "python")
"""The names of the built-in tools in a config, which are those of their functions."""
