"""Runs assertions in the sandbox, in a process without the program. This file is sent there as
text.

A call without a known result ends the run of the assertion, which is rerun from its start when the
result has arrived, so that nothing waits in the sandbox. Its random numbers are the same each time.

A bool of the program reaches the assertion as a `Bool`, which is not a number. The assertion's code
is changed so that `==` and `in` compare types as well, NaN has no order, and an error of the
program must reach a handler of the assertion.
"""

import ast
import builtins
import math
import operator
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from traceback import walk_stack
from typing import Any


class Near(float):
    """A float that equals another one up to rounding, since the order of operations changes the
    last digits."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not Near:
            return float.__eq__(self, other)
        return math.isclose(self, other, rel_tol=1e-9, abs_tol=0.0 if self and other else 1e-12)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__


def _refuse(why: str) -> None:
    """End the assertion: the program's value cannot be what it means."""
    _run.refused = why
    raise AssertionError(why)


def _with_bools(compute: Callable[[bool, bool], bool]) -> Any:
    def method(self: "Bool", other: Any) -> Any:
        if type(other) in (bool, Bool):
            return compute(self.value, bool(other))
        return NotImplemented

    return method


class Bool:
    """A bool, but not a number: it can neither be computed with nor equal one."""

    def __init__(self, value: bool) -> None:
        self.value = value

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for `isinstance`
        return bool

    def __eq__(self, other: object) -> bool:
        if type(other) in (bool, Bool):
            return self.value == bool(other)
        if isinstance(other, int | float | complex) and self.value == other:
            _refuse("a bool is compared with a number")
        return False

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return self.value

    def __int__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    __lt__ = _with_bools(operator.lt)
    __gt__ = _with_bools(operator.gt)
    __and__ = __rand__ = _with_bools(operator.and_)
    __or__ = __ror__ = _with_bools(operator.or_)
    __xor__ = __rxor__ = _with_bools(operator.xor)


_VIEWS: dict[type, Callable[[list[Any]], Any]] = {
    type({}.keys()): lambda entries: dict.fromkeys(entries).keys(),
    type({}.values()): lambda entries: dict(enumerate(entries)).values(),
    type({}.items()): lambda entries: dict(entries).items(),
}
_ITERATOR = "distflow.sandbox.inside.program_messages"
"""The module of an iterator over what one of the program's yielded."""


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of built-in containers, with `change` called on everything else in them."""
    kind = type(value)
    if kind in (dict, Counter, defaultdict):
        return {rebuilt(key, change): rebuilt(entry, change) for key, entry in value.items()}
    if kind in (list, tuple, set, frozenset, deque):
        return kind([rebuilt(entry, change) for entry in value])
    if kind in _VIEWS:
        return _VIEWS[kind]([rebuilt(entry, change) for entry in value])
    if kind.__module__ == _ITERATOR:
        return kind([rebuilt(entry, change) for entry in value.items])

    return change(value)


def exact(value: Any) -> Any:
    """A value that equals another's only if their types agree: True is not 1, 3+0j is not 3; but
    3.0 is 3."""
    kind = type(value)
    if kind in (bool, Bool):
        return bool, bool(value)
    if kind is complex:
        return kind, value
    return Near(value) if kind is float else value


def _guarded(value: Any) -> Any:
    return Bool(value) if type(value) is bool else value


def _plain(value: Any) -> Any:
    return value.value if type(value) is Bool else value


def _ordered(value: Any) -> Any:
    if value != value:
        _refuse("it has no order")
    if isinstance(value, list | tuple):
        for entry in value:
            _ordered(entry)
    return value


def _sum(values: Iterable[Any], start: Any = 0) -> Any:
    """Bools may be counted, but not added to numbers."""
    terms = list(values)
    if all(type(term) in (bool, Bool) for term in terms):
        terms = [bool(term) for term in terms]
    return sum(terms, start)


_SCOPE = {
    "__name__": "tests",
    "__exact__": lambda value: rebuilt(value, exact),
    "__ordered__": _ordered,
    "__plain__": _plain,
    "__all_plain__": lambda value: rebuilt(value, _plain),
    "sum": _sum,
}
_EXACT = ("assertEqual", "assertListEqual", "assertIn", "count", "index")
_ARGUMENTS = {
    **dict.fromkeys(_EXACT, "__exact__"),
    **dict.fromkeys(("type", "float", "assertIs", "assertIsNot"), "__plain__"),
    "dumps": "__all_plain__",
}
"""By function or method called in an assertion: the function of `_SCOPE` for its arguments."""
_COMPARED: dict[type[ast.cmpop], str] = {
    **dict.fromkeys((ast.Eq, ast.In), "__exact__"),
    **dict.fromkeys((ast.Lt, ast.LtE, ast.Gt, ast.GtE), "__ordered__"),
    **dict.fromkeys((ast.Is, ast.IsNot), "__plain__"),
}
"""By operator: the function of `_SCOPE` for its operands. A `Bool` itself rejects the others."""


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


class Guard(ast.NodeTransformer):
    """Inserts calls of the functions of `Run.scope` where an assertion compares and handles
    errors."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        operands = [node.left, *node.comparators]
        compared = _COMPARED
        if len(node.ops) > 1:  # here `!=` shares an operand with other operators
            compared = {**_COMPARED, ast.NotEq: "__exact__"}
        names = [compared.get(type(op), "") for op in node.ops]

        for i, operand in enumerate(operands):
            name = max(names[max(i - 1, 0) : i + 1])
            if name:
                operands[i] = _call(name, operand)

        node.left, *node.comparators = operands
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        wrapper = _ARGUMENTS.get(name)
        if wrapper is None:
            return node

        for i, argument in enumerate(node.args):
            if not isinstance(argument, ast.Starred):
                node.args[i] = _call(wrapper, argument)

        if isinstance(node.func, ast.Attribute) and name in ("count", "index"):
            node.func.value = _call(wrapper, node.func.value)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("__seen__")))
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        self.generic_visit(node)
        seen = ast.ExceptHandler(None, None, [ast.Expr(_call("__seen__")), ast.Raise()])
        node.body = [ast.Try(node.body, [seen], [], [])]
        return node


class Asked(BaseException):
    """Raised when the program must be called."""


class Run:
    """An assertion, and the program's answers so far."""

    def __init__(self, code: str, names: list[str]) -> None:
        tree = ast.fix_missing_locations(Guard().visit(ast.parse(code)))
        self.code = compile(tree, "tests.py", "exec")
        self.names = names
        self.answers = list[Any]()
        self.count = 0
        self.asked = list[Any]()
        """The call without an answer."""
        self.unseen = list[Exception]()
        """Errors of the program that no handler received."""
        self.refused = ""
        """Why a value cannot be what the assertion means."""

    def scope(self) -> dict[str, Any]:
        functions = {name: self.function(name) for name in self.names}
        return {**_SCOPE, "__seen__": self.seen, **functions}

    def function(self, name: str) -> Any:
        return lambda *args, **kwargs: self.answer(name, args, kwargs)

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += 1
        if self.count > len(self.answers):
            self.asked = self.asked or [name, *rebuilt([list(args), kwargs], _plain)]
            raise Asked

        kind, *content = self.answers[self.count - 1]
        if kind == "value":
            return rebuilt(content[0], _guarded)  # a copy: the assertion may change it, and reruns

        error = getattr(builtins, content[0], None)
        raised = Exception(": ".join(content))
        if isinstance(error, type) and issubclass(error, Exception):
            with suppress(TypeError):  # of an error that needs more than a text
                raised = error(content[1])

        # of unittest
        if not any(
            frame.f_code.co_name.startswith("assertRaises") for frame, _ in walk_stack(None)
        ):
            self.unseen.append(raised)

        raise raised

    def seen(self) -> None:
        error = sys.exception()
        while error is not None:
            self.unseen = [each for each in self.unseen if each is not error]
            error = error.__cause__ or error.__context__

    def step(self) -> list[Any]:
        """["call", name, args, kwargs], ["failed", type, text] or ["passed"]."""
        self.count = 0
        self.asked = []
        self.unseen = []
        self.refused = ""
        random.seed(0)

        failure = list[str]()
        try:
            exec(self.code, self.scope())
        except BaseException as error:  # the assertion may raise anything
            failure = [type(error).__name__, str(error)[:500]]

        if self.asked:
            return ["call", *self.asked]

        if self.refused or self.unseen:
            failure = failure or [
                "AssertionError",
                self.refused or "no handler in the test caught its error",
            ]

        return ["failed", *failure] if failure else ["passed"]


_run: Run


def begin(code: str, names: list[str]) -> list[Any]:
    global _run
    _run = Run(code, names)
    return _run.step()


def resume(answer: list[Any]) -> list[Any]:
    _run.answers.append(answer)
    return _run.step()
