"""What no run calls is not built: a public function whose name nothing else in `src` mentions has
no caller."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.source_trees import SOURCE, modules, tree_of

CALLED_FROM_OUTSIDE = {
    "cluster/peer.py": ("_Pickler.reducer_override",),  # pickle
    # workflows of users
    "environments/areal_workflows.py": ("ModelResponse.*", "Engine.get_version"),
    # users, for demonstrations (examples/acting.py)
    "acting/gridreach.py": ("GridReach.shortest",),
    "user_files.py": ("_Loader.path_stats",),  # importlib
    "errors.py": ("UserError._render_traceback_",),  # IPython
    "cli.py": ("_Help._get_help_string",),  # argparse
    "commands/*.py": ("add_*_arguments", "run_*"),  # by the command's name
    "algorithms/*/*.py": ("compute_*_loss", "compute_*_advantage"),  # by their names
    "api/load_run.py": ("Table.to_pandas",),  # users
    # users
    "api/own_training_loop.py": ("Rollouts.stats", "Rollouts.rollout_batch", "Rollouts.agenerate"),
    "config/keys/schema.py": ("register_config_group",),  # users, by `distflow.`
    "observe/sanitized_output.py": ("TerminalOutput.writable",),  # io
    "observe/findings/step_rules.py": ("_*",),  # rules of the doctor, by their decorator
    "http_guard.py": ("Door.*",),  # socketserver and asyncio, as of a socket that listens
    "rewards/code/assertion_process.py": ("Guard.visit_*",),  # ast
    "runtime/checkpoint/files.py": ("_Files.ls",),  # fsspec
    # socketserver and http.server
    "rewards/code/score_server.py": ("ScoreServer.*", "_Handler.*"),
}
"""Names by file, and in a comment who calls them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Mentions:
    """Names that the package's code loads, reads as attributes or spells as strings, and all words
    of its other files."""

    def __init__(self) -> None:
        self._anywhere = Counter[str]()
        self._variables = Counter[str]()
        self._within_itself = Counter[tuple[Path, str]]()
        self._variables_of = Counter[tuple[Path, str]]()

        for path in SOURCE.rglob("*"):
            if path.suffix == ".py":
                self._read(path, tree_of(path), frozenset())
            elif path.suffix in (".yaml", ".toml", ".js", ".html"):
                self._anywhere.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))

    def _read(self, path: Path, node: ast.AST, within: frozenset[str]) -> None:
        """within: the functions around the node."""
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.Name)
                and isinstance(child.ctx, ast.Load)
                and child.id not in within
            ):
                self._variables[child.id] += 1
                self._variables_of[path, child.id] += 1

            for name in words_of(child):
                self._anywhere[name] += 1
                self._within_itself[path, name] += name in within

            self._read(
                path, child, within | {child.name} if isinstance(child, Function) else within
            )

    def are_there(self, path: Path, full: str, name: str) -> bool:
        """Of a function of the file, besides those within itself. A method is no variable of
        another file."""
        variables = self._variables_of[path, name] if "." in full else self._variables[name]
        return self._anywhere[name] + variables > self._within_itself[path, name]


def words_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[\w.:/-]{,79}", node.value)
    ):
        return re.findall(r"\w+", node.value)

    return []


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Each function of a module, and each method of its classes, as (name with its class, name)."""
    for node in tree_of(path).body:
        if isinstance(node, Function):
            yield node.name, node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.name
            yield from (
                (f"{node.name}.{n.name}", n.name) for n in node.body if isinstance(n, Function)
            )


def is_called_from_outside(file: str, name: str) -> bool:
    return any(
        fnmatch(file, pattern) and any(fnmatch(name, each) for each in names)
        for pattern, names in CALLED_FROM_OUTSIDE.items()
    )


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def test_every_function_has_a_caller() -> None:
    mentions = Mentions()
    without = []
    for path in modules().values():
        file = str(path.relative_to(SOURCE))
        for full, name in functions(path):
            if not (
                is_dunder(name)
                or is_called_from_outside(file, full)
                or mentions.are_there(path, full, name)
            ):
                without.append(f"{file}: {full}")

    assert not without, "nothing in src calls these; give each a caller or take it out"


def test_each_exception_stands_for_a_function() -> None:
    found = {
        (str(path.relative_to(SOURCE)), full)
        for path in modules().values()
        for full, _ in functions(path)
    }

    for pattern, names in CALLED_FROM_OUTSIDE.items():
        for each in names:
            assert any(fnmatch(file, pattern) and fnmatch(full, each) for file, full in found), (
                f"{pattern}: {each}"
            )
