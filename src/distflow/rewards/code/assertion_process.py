"""Runs assertions in the sandbox, in a process without the program. This file is sent there as
text.

A call without a known result ends the run of the assertion, which is rerun from its start when the
result has arrived, so that nothing waits in the sandbox. Its random numbers are the same each time.
Its code is changed so that equality includes types, a bool of the program is not a number, NaN has
no order, and an error of the program must reach a handler of the assertion. For this, operators
become calls of a module `operator` whose functions have these rules.
"""

import ast
import builtins
import copy
import copyreg
import math
import operator
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from traceback import walk_stack
from types import ModuleType
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


_TABLE: dict[Any, Any] = {}
_KEYS, _VALUES, _ITEMS = type(_TABLE.keys()), type(_TABLE.values()), type(_TABLE.items())


def typed(value: Any) -> Any:
    """A value that equals another's only if their types agree: True is not 1, 3+0j is not 3; but
    3.0 is 3."""
    kind = type(value)
    if kind in (bool, complex):
        return kind, value
    if kind is float:
        return Near(value)
    if kind in (list, tuple, set, frozenset, deque):
        return kind(map(typed, value))
    if kind in (_KEYS, _ITEMS):
        with suppress(TypeError):  # entries without a hash
            return set(map(typed, value))
    if kind in (dict, Counter, defaultdict):
        return {typed(key): typed(entry) for key, entry in value.items()}
    return value


def _has_bool(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return any(map(_has_bool, value))
    return (
        not isinstance(value, int | float | complex | str | bytes | bytearray | range)
        or type(value) is bool
    )


def _refuse(why: str) -> None:
    """End the assertion: the program's value cannot be what it means."""
    _run.refused = why
    raise AssertionError(why)


def _term(value: Any) -> Any:
    if type(value) is bool and _run.has_bool:
        _refuse("a bool is used as a number")
    return value


def _summed(value: Any) -> Any:
    """Bools may be counted, but not added to numbers."""
    if not isinstance(value, Iterable):  # the start
        return value
    terms = list(value)
    if len({type(term) is bool for term in terms}) > 1:
        terms = [*map(_term, terms)]
    return terms


def _ordered(value: Any) -> Any:
    if value != value:
        _refuse("it has no order")
    if isinstance(value, list | tuple):
        for entry in value:
            _ordered(entry)
    return _term(value)


def _differ(first: Any, second: Any) -> bool:
    is_different = bool(first != second)
    if not is_different and _run.has_bool and typed(first) != typed(second):
        _refuse("a bool is compared with a number")
    return is_different


def _item(owner: Any, key: Any) -> Any:
    is_mapping = isinstance(owner, dict)
    if not is_mapping or (_has_bool(key) and typed(key) not in [*map(typed, owner)]):
        _term(key)
    return owner[key]


def _get(owner: Any, *args: Any) -> Any:
    """`owner.get(*args)`, also of an owner that is no dict."""
    if isinstance(owner, dict) and args and args[0] in owner:
        _item(owner, args[0])
    return owner.get(*args)


_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.USub: "neg",
    ast.UAdd: "pos",
    ast.Invert: "invert",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
}
"""By operator in the assertion's code: the function of `operator` that replaces it."""
_METHODS = [f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul")]
_COMPARED = ("eq", "contains", "countOf", "indexOf")
_ORDERED = ("lt", "le", "gt", "ge")


def _guarded(name: str) -> Any:
    """A function of `operator` for assertions."""
    compute = getattr(operator, name)

    def call(*terms: Any) -> Any:
        if name in _COMPARED:
            return compute(*map(typed, terms))
        if name in _ORDERED:
            return compute(*map(_ordered, terms))
        is_format = name in ("mod", "imod") and isinstance(terms[0], str)
        # of two bools
        is_logic = name.strip("i_") in ("and", "or", "xor") and type(terms[0]) is type(terms[1])
        return compute(*terms if is_format or is_logic else map(_term, terms))

    return call


def _operator_module() -> ModuleType:
    names = [*_COMPARED, *_ORDERED, *_OPERATORS.values()]
    names += [f"i{name.strip('_')}" for name in _OPERATORS.values()]  # `iadd`, for `+=`
    module = ModuleType("operator")
    vars(module).update(vars(operator))
    vars(module).update({name: _guarded(name) for name in names if hasattr(operator, name)})
    vars(module).update(ne=_differ, getitem=_item)
    return module


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _operation(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(
        ast.Attribute(ast.Name("__operator__", ast.Load()), name, ast.Load()), list(args), []
    )


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"


class Asked(BaseException):
    """Raised when the program must be called."""


_NUMERIC = dict.fromkeys(
    (
        "abs",
        "round",
        "divmod",
        "pow",
        "range",
        "chr",
        "bin",
        "hex",
        "oct",
        "assertAlmostEqual",
        *dir(math),
    ),
    "__term__",
)
_WRAPPED = {
    **_NUMERIC,
    **dict.fromkeys(("sum", "fsum", "prod"), "__summed__"),
    **dict.fromkeys(("assertEqual", "assertListEqual", "assertIn", "count", "index"), "__typed__"),
}
"""By function or method called in an assertion: the wrapper of its arguments."""


class Guard(ast.NodeTransformer):
    """Inserts calls of the functions of `Run.scope` where an assertion compares, computes and
    handles errors."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if [*map(type, node.ops)] == [ast.NotEq]:
            return _operation("ne", node.left, *node.comparators)
        operands = [node.left, *node.comparators]
        kinds = list[list[str]]()
        for op in node.ops:
            is_order = isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            is_equality = isinstance(op, ast.Eq | ast.NotEq | ast.In)
            kinds.append(["__ordered__"] if is_order else ["__typed__"] * is_equality)
        for i, operand in enumerate(operands):
            if names := sum(kinds[max(i - 1, 0) : i + 1], []):
                operands[i] = _call(min(names), operand)
        node.left, *node.comparators = operands
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        return _operation(name, node.left, node.right) if name else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        is_literal = isinstance(node.operand, ast.Constant)  # as in a pattern, which takes no call
        return _operation(name, node.operand) if name and not is_literal else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        target = ast.unparse(node.target)
        if name is None or "(" in target:  # which must not be evaluated twice
            return node
        value = self.visit(ast.parse(target, mode="eval").body)
        return ast.Assign([node.target], _operation(f"i{name.strip('_')}", value, node.value))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        return (
            _operation("getitem", node.value, node.slice)
            if isinstance(node.ctx, ast.Load)
            else node
        )

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        self.generic_visit(node)
        return _call(
            "__slice__",
            *(bound or ast.Constant(None) for bound in (node.lower, node.upper, node.step)),
        )

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        is_plain = not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args)
        if isinstance(node.func, ast.Attribute) and is_plain:
            if name == "get":
                return _call("__get__", node.func.value, *node.args)
            if name in _METHODS and len(node.args) == 1 and not _is_super(node.func.value):
                return _operation(name.strip("_"), node.func.value, *node.args)
        if passed := _WRAPPED.get(name):
            node.args = [
                each if isinstance(each, ast.Starred) else _call(passed, each) for each in node.args
            ]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("count", "index"):
                node.func.value = _call(passed, node.func.value)
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
    """An assertion, and the program's answers so far. asked: the call without an answer. unseen:
    errors of the program that no handler received. refused: why a value cannot be what the
    assertion means. has_bool: whether the program has returned any."""

    def __init__(self, code: str, names: list[str]) -> None:
        tree = ast.fix_missing_locations(Guard().visit(ast.parse(code)))
        self.code = compile(tree, "tests.py", "exec")
        self.names = names
        self.answers = list[Any]()
        self.count = 0
        self.asked = list[Any]()
        self.unseen = list[Exception]()
        self.refused = ""
        self.has_bool = False

    def scope(self) -> dict[str, Any]:
        return {
            "__name__": "tests",
            "__typed__": typed,
            "__ordered__": _ordered,
            "__term__": _term,
            "__summed__": _summed,
            "__get__": _get,
            "__slice__": lambda *bounds: slice(*map(_term, bounds)),
            "__operator__": _OPERATOR,
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
_OPERATOR = _operator_module()


def begin(code: str, names: list[str]) -> list[Any]:
    global _run
    sys.modules["operator"] = _OPERATOR  # for the assertion's own imports
    copyreg.pickle(_KEYS, lambda view: (_view, ("keys", dict.fromkeys(view))))
    copyreg.pickle(_VALUES, lambda view: (_view, ("values", dict(enumerate(view)))))
    copyreg.pickle(_ITEMS, lambda view: (_view, ("items", dict(view))))
    _run = Run(code, names)
    return _run.step()


def _view(kind: str, entries: dict[Any, Any]) -> Any:
    return getattr(entries, kind)()


def resume(answer: list[Any]) -> list[Any]:
    _run.answers.append(answer)
    _run.has_bool = _run.has_bool or _has_bool(answer[1:])
    return _run.step()
