"""Methods of papers, one file each: the paper, the settings, and the estimator and the loss that
belong to it. The built-in ones are in `algorithms/methods`.

A file is read, never imported, so that no command loads torch for a name: its settings are a text,
and what its parts need is in the signatures of their functions.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ALGORITHMS = Path(__file__).parent / "algorithms"
METHODS = ALGORITHMS / "methods"


@dataclass(frozen=True)
class RegisteredPart:
    """A function that a file registers under a name."""

    decorator: str
    """`register_adv_est` or `register_policy_loss`."""
    name: str
    attribute: str
    """The file's name for the function."""
    function: str
    """The function's own name, which is another if it is that of another file."""
    selects: str
    """The function that selects tokens for a loss, or empty."""


class MethodFile:
    """What the text of a file says. Raises SyntaxError or ValueError if it is not Python."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        self.functions = {
            each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)
        }
        self.parts = tuple(_registered_parts(tree))
        self.title = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
        self.paper = ""
        self.settings: str | None = None
        """YAML, each key in the line of the text in which it is; None if there are none."""

        for name, value in _assigned(tree):
            if isinstance(value, ast.Constant) and name == "PAPER":
                self.paper = str(value.value)
            elif isinstance(value, ast.Constant) and name == "SETTINGS":
                self.settings = "\n" * (value.lineno - 1) + str(value.value)

    @staticmethod
    def of(path: Path) -> "MethodFile":
        return MethodFile(path.read_text("utf-8"))


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What a file binds to a name at its top."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _registered_parts(tree: ast.Module) -> Iterator[RegisteredPart]:
    """By a decorator, or by a call for a function of another method."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                yield from _part(decorator, node.name, node.name)

    for name, value in _assigned(tree):
        if isinstance(value, ast.Call) and value.args:
            yield from _part(value.func, name, ast.unparse(value.args[0]))


def _part(decorator: ast.expr, attribute: str, function: str) -> Iterator[RegisteredPart]:
    match decorator:
        case ast.Call(ast.Name(kind), [ast.Constant(str(name)), *_], keywords):
            named = {each.arg: ast.unparse(each.value) for each in keywords}
            yield RegisteredPart(kind, name, attribute, function, named.get("selects", ""))
