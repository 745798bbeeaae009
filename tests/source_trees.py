"""The syntax trees of the package's files, each parsed and walked once a process, for the tests
that read code."""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "distflow"


@cache
def modules() -> dict[str, Path]:
    """By dotted name, relative to the package."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
        for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, as `ast.walk` yields them."""
    return tuple(ast.walk(tree_of(path)))
