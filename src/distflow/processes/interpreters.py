"""Commands that call `main` of a module of ours in a new interpreter. Imports only the standard
library."""

import os
import sys
from pathlib import Path

_SOURCE = str(Path(__file__).parents[2])
_BARE = """
import sys
sys.path.insert(0, sys.argv[1])
from {module} import main
main(*sys.argv[2:])
"""


def bare_command(module: str, *arguments: object) -> list[str]:
    """With the arguments as texts, of a module that imports only the standard library."""
    code = _BARE.format(module=module)
    return [sys.executable, "-I", "-S", "-c", code, _SOURCE, *map(str, arguments)]


def python_command(module: str, *arguments: object) -> list[str]:
    """With the arguments in `sys.argv`. The module is not Python's main module, which processes
    that are spawned below would import again."""
    return [sys.executable, "-P", "-c", f"from {module} import main; main()", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    """That of this process, for a `python_command`. variables: further ones."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, **variables}
