"""A reference that called the package would agree with it, whatever it computes."""

import ast
from pathlib import Path

import pytest

RUNNERS = ("faults", "plant_faults")
"""What plants faults into the package, and is no reference."""
FILES = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem not in RUNNERS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_reference_imports_nothing_of_the_package(path: Path) -> None:
    names = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]

    assert not [name for name in names if name.startswith("distflow")]
