"""Runs assertions in the sandbox, in a process without the program. This file is sent there as text.

A call without a known result ends the run of the assertion, which is rerun from its start when the result has arrived,
so that nothing waits in the sandbox. Its random numbers are the same each time. Its code is changed so that equality
includes types, a bool is not a number, NaN has no order, and an error of the program must reach a handler of the
assertion.
"""

import ast
import builtins
import copy
import math
import random
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from traceback import walk_stack
from typing import Any


def typed(value: Any) -> Any:
    """A value that equals another's only if their types agree: True is not 1, 3+0j is not 3; but 3.0 is 3."""
    kind = type(value)
    if kind in (bool, complex):
        return kind, value
    if kind in (list, tuple, set, frozenset):
        return kind(map(typed, value))
    if kind in (dict, Counter, defaultdict):
        return {typed(key): typed(entry) for key, entry in value.items()}
    return value


class Asked(BaseException):
    """Raised when the program must be called."""


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


_NUMERIC = dict.fromkeys(("abs", "round", "divmod", "pow", "assertAlmostEqual", *dir(math)), "__term__")
_WRAPPED = {**_NUMERIC, "assertEqual": "__typed__"}
"""By function or method called in an assertion: the wrapper of its arguments."""


class Guard(ast.NodeTransformer):
    """Inserts calls of the functions of `Run.scope` where an assertion compares, computes and handles errors."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        operands, kinds = [node.left, *node.comparators], list[list[str]]()
        for op in node.ops:
            is_order = isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            kinds.append(["__ordered__"] if is_order else ["__typed__"] * isinstance(op, ast.Eq | ast.In))
        for i, operand in enumerate(operands):
            if names := sum(kinds[max(i - 1, 0) : i + 1], []):
                operands[i] = _call(min(names), operand)
        node.left, *node.comparators = operands
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Sub):
            node.left, node.right = _call("__term__", node.left), _call("__term__", node.right)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if passed := _WRAPPED.get(getattr(node.func, "id", getattr(node.func, "attr", ""))):
            node.args = [each if isinstance(each, ast.Starred) else _call(passed, each) for each in node.args]
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


class Run:
    """An assertion, and the program's answers so far. asked: the call without an answer. unseen: errors of the program
    that no handler received. refused: why a value cannot be what the assertion means."""

    def __init__(self, code: str, names: list[str]) -> None:
        tree = ast.fix_missing_locations(Guard().visit(ast.parse(code)))
        self.code, self.names, self.answers = compile(tree, "tests.py", "exec"), names, list[Any]()
        self.count, self.asked, self.unseen, self.refused = 0, list[Any](), list[Exception](), ""

    def scope(self) -> dict[str, Any]:
        return {
            "__name__": "tests",
            "__typed__": typed,
            "__ordered__": lambda value: self.unless(value, type(value) is bool or value != value, "it has no order"),
            "__term__": lambda value: self.unless(value, type(value) is bool, "a bool is used as a number"),
            "__seen__": self.seen,
            **{name: self.function(name) for name in self.names},
        }

    def function(self, name: str) -> Any:
        return lambda *args, **kwargs: self.answer(name, args, kwargs)

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += 1
        if self.count > len(self.answers):
            self.asked = self.asked or [name, list(args), kwargs]
            raise Asked
        kind, *content = self.answers[self.count - 1]
        if kind == "value":
            return copy.deepcopy(content[0])  # the assertion may change it, and runs again
        error = getattr(builtins, content[0], None)
        raised = Exception(": ".join(content))
        if isinstance(error, type) and issubclass(error, Exception):
            with suppress(TypeError):  # of an error that needs more than a text
                raised = error(content[1])
        if not any(frame.f_code.co_name.startswith("assertRaises") for frame, _ in walk_stack(None)):  # of unittest
            self.unseen.append(raised)
        raise raised

    def unless(self, value: Any, is_refused: bool, why: str) -> Any:
        if is_refused:
            self.refused = why
            raise AssertionError(why)
        return value

    def seen(self) -> None:
        error = sys.exception()
        while error is not None:
            self.unseen = [each for each in self.unseen if each is not error]
            error = error.__cause__ or error.__context__

    def step(self) -> list[Any]:
        """["call", name, args, kwargs], ["failed", type, text] or ["passed"]."""
        self.count, self.asked, self.unseen, self.refused = 0, [], [], ""
        random.seed(0)
        failure = list[str]()
        try:
            exec(self.code, self.scope())
        except BaseException as error:  # the assertion may raise anything
            failure = [type(error).__name__, str(error)[:500]]
        if self.asked:
            return ["call", *self.asked]
        if self.refused or self.unseen:
            failure = failure or ["AssertionError", self.refused or "no handler in the test caught its error"]
        return ["failed", *failure] if failure else ["passed"]


_run: Run


def begin(code: str, names: list[str]) -> list[Any]:
    global _run
    _run = Run(code, names)
    return _run.step()


def resume(answer: list[Any]) -> list[Any]:
    _run.answers.append(answer)
    return _run.step()
