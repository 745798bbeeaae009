"""Runs assertions in the sandbox, in a process without the program. This file is sent there as
text.

A call without a known result ends the run of the assertion, which is rerun from its start when the
result has arrived, so that nothing waits in the sandbox. Its random numbers are the same each time.
An error of the program must reach a handler of the assertion: a `StopIteration` that `map` takes
for its end would otherwise pass.
"""

import ast
import builtins
import copy
import math
import random
import sys
from contextlib import suppress
from traceback import walk_stack
from typing import Any


class Near(float):
    """A float that equals another one up to rounding, since the order of operations changes the
    last digits."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, float):
            return float.__eq__(self, other)
        return math.isclose(self, other, rel_tol=1e-9, abs_tol=0.0 if self and other else 1e-12)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__


def typed(value: Any) -> Any:
    """A value that equals another's only if their types agree: True is not 1, 3+0j is not 3; but
    3.0 is 3."""
    kind = type(value)
    if kind in (bool, complex):
        return kind, value
    if kind is float:
        return Near(value)
    if kind in (list, tuple, set, frozenset):
        return kind(map(typed, value))
    if kind is dict:
        return {typed(key): typed(entry) for key, entry in value.items()}
    return value


def _near(value: Any) -> Any:
    """The value with floats that equal others up to rounding."""
    kind = type(value)
    if kind is float:
        return Near(value)
    if kind in (list, tuple, set, frozenset):
        return kind(map(_near, value))
    if kind is dict:
        return {key: _near(entry) for key, entry in value.items()}
    return value


class Asked(BaseException):
    """Raised when the program must be called."""


class Guard(ast.NodeTransformer):
    """Inserts a call of `Run.seen` where an assertion handles errors."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        node.body.insert(0, _seen())
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        self.generic_visit(node)
        seen = ast.ExceptHandler(None, None, [_seen(), ast.Raise()])
        node.body = [ast.Try(node.body, [seen], [], [])]
        return node


def _seen() -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name("__seen__", ast.Load()), [], []))


class Run:
    """An assertion, and the program's answers so far. asked: the call without an answer. unseen:
    errors of the program that no handler received."""

    def __init__(self, code: str, names: list[str]) -> None:
        tree = ast.fix_missing_locations(Guard().visit(ast.parse(code)))
        self.code = compile(tree, "tests.py", "exec")
        self.names = names
        self.asks_types = "type(" in code
        self.answers = list[Any]()
        self.count = 0
        self.asked = list[Any]()
        self.unseen = list[Exception]()

    def function(self, name: str) -> Any:
        return lambda *args, **kwargs: self.answer(name, args, kwargs)

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += 1
        if self.count > len(self.answers):
            self.asked = self.asked or [name, list(args), kwargs]
            raise Asked
        kind, *content = self.answers[self.count - 1]
        if kind == "value":
            value = copy.deepcopy(content[0])  # the assertion may change it, and runs again
            return value if self.asks_types else _near(value)
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
        random.seed(0)
        scope = {"__name__": "tests", "__seen__": self.seen}
        for name in self.names:
            scope[name] = self.function(name)
        failure = list[str]()
        try:
            exec(self.code, scope)
        except BaseException as error:  # the assertion may raise anything
            failure = [type(error).__name__, str(error)[:500]]
        if self.asked:
            return ["call", *self.asked]
        if self.unseen and not failure:
            failure = ["AssertionError", "no handler in the test caught its error"]
        return ["failed", *failure] if failure else ["passed"]


_run: Run


def begin(code: str, names: list[str]) -> list[Any]:
    global _run
    _run = Run(code, names)
    return _run.step()


def resume(answer: list[Any]) -> list[Any]:
    _run.answers.append(answer)
    return _run.step()
