"""The arrows of the design: imports go one way through the rooms, and the light ones load neither
torch nor Ray."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.source_trees import SOURCE, modules, nodes_of, tree_of

# From the command line down. Rooms of one layer never import each other.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"api"},
    {"commands"},
    {"cluster"},
    {"launch"},
    {"acting"},
    {"pipelines", "checks", "tinker"},
    {"runtime"},
    {"rollout", "training", "rewards", "environments"},
    {"models", "sandbox", "algorithms", "planning"},
    {"scheduling", "data"},
    {"graph", "config", "observe"},
    {"import_target"},
    {"untrusted_files"},
    {"processes", "user_files"},
    {
        "builtin_names",
        "device_transfer",
        "hub_id_or_local_path",
        "http_guard",
        "user_values",
    },
    {"errors", "method_files"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
WITHOUT_TORCH = ("graph", "config", "scheduling", "planning", "observe")


def room_of(module: str) -> str:
    return module.split(".")[0]


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The modules of distflow that a file imports, relative to the package, wherever in the
    file."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module.startswith("distflow"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue

        yield from (
            name.removeprefix("distflow.") for name in names if name.startswith("distflow.")
        )


def test_imports_go_down_only() -> None:
    # the package itself names what users import
    rooms = {room_of(module) for module in modules()} - {"__init__"}
    assert rooms <= set(LEVEL), "no room of the design: add it to LAYERS or move the file"
    upward = [
        f"{module} imports {name}"
        for module in modules()
        for name in imports(modules()[module])
        if module != "__init__" and room_of(name) in LEVEL and room_of(name) != room_of(module)
        if LEVEL[room_of(module)] >= LEVEL[room_of(name)]
    ]
    assert not upward


def test_no_run_of_text_imports_what_acts() -> None:
    code = (
        "import sys, distflow.cli, distflow.launch.one_process_launcher, "
        "distflow.checks.all_checks, "
        "distflow.launch.make_spec, distflow.pipelines.grpo, "
        "distflow.environments.workflows\n"
        "print([m for m in sys.modules if m.startswith('distflow.acting')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_cycle_of_modules() -> None:
    known = modules()
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        found = {
            name if name in known else name.rpartition(".")[0] for name in _at_import_time(path)
        }
        graph[module] = {name for name in found if name in known and name != module}

    TopologicalSorter(graph).prepare()


def _at_import_time(path: Path) -> Iterator[str]:
    """Names that a module imports at its top, also those for the type checker alone."""
    body = [*tree_of(path).body]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distflow."):
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix("distflow.")
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("distflow.")
                for a in node.names
                if a.name.startswith("distflow.")
            )
        elif isinstance(node, ast.If):
            body.extend(node.body)


@pytest.mark.parametrize("room", ["", *(f".{name}" for name in WITHOUT_TORCH)])
def test_light_rooms_load_neither_torch_nor_ray(room: str) -> None:
    code = (
        f"import sys, distflow{room}; print([m for m in ('torch', 'ray', 'transformers') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["scheduling", "planning", "graph", "config"])
def test_they_name_neither_torch_nor_ray_anywhere(room: str) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        for node in nodes_of(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("torch", "ray") for name in names), path
