"""How much the tests notice: small faults are put into the source one at a time, and default tests
run on each.

    python scripts/mutants.py algorithms training --number 40 --seed 1
    python scripts/mutants.py algorithms --line kl.py:43
    python scripts/mutants.py runtime --tests tests/runtime tests/data

A mutant is killed if a test fails or the time runs out. Each process has a copy of the project, so
the checkout is not touched. What survives is not tested, or changes nothing that can be seen: such
lines are in `unseen_mutants.toml`, each with its reason, and are not drawn. Often such a line can
go.
"""

import argparse
import ast
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/distflow")
UNSEEN = ROOT / "scripts" / "unseen_mutants.toml"

OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
PAIRS = (
    ("min", "max"),
    ("amin", "amax"),
    ("minimum", "maximum"),
    ("sum", "mean"),
    ("any", "all"),
    ("exp", "expm1"),
    ("log", "log1p"),
    ("floor", "ceil"),
    ("logical_and", "logical_or"),
    ("std", "var"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("cumsum", "cumprod"),
    ("append", "extend"),
)
CALLS = {**dict(PAIRS), **{second: first for first, second in PAIRS}}
DROPPED = {"detach", "clamp", "abs", "neg", "float", "double"}
"""Methods of tensors that a mutant leaves out."""
SILENT = {"error", "warning", "warn", "info", "debug", "note", "say", "print"}
"""Calls that only speak."""
PLAIN_KEYWORDS = {"strict", "total", "set_to_none", "repr", "slots", "frozen"}
"""Keywords whose change can mostly not be seen."""


class Mutant(NamedTuple):
    """A part of a file and what takes its place."""

    file: Path
    """Relative to the project."""
    line: int
    kind: str
    start: int
    """In bytes, as `end`."""
    end: int
    new: str

    def text(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


class Finder(ast.NodeVisitor):
    """Collects the mutants of a file. What only speaks or describes has none: messages, raises,
    assertions, annotations, decorators."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.source = (ROOT / file).read_bytes()
        self.found: list[Mutant] = []
        self._starts = [0]
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)

        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in PLAIN_KEYWORDS:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = str(getattr(node.func, "attr", getattr(node.func, "id", "")))
        if name in SILENT or name.endswith(("Error", "Warning")):
            return

        end = self._place(node.func)[1]
        if name in CALLS:
            self._add(node, f"{name} becomes {CALLS[name]}", end - len(name), end, CALLS[name])

        if name in DROPPED and isinstance(node.func, ast.Attribute):
            start = self._place(node.func.value)[1]
            self._add(node, f"without {name}", start, self._place(node)[1], "")

        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
        if type(node.op) in OPERATORS and not is_text:
            self._between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, operator)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            start, end = self._place(node.operand)
            operand = self.source[start:end].decode()
            self._replace(node, f"without {type(node.op).__name__}", f"({operand})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, f"{node.value} becomes {not node.value}", str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, f"{node.value} becomes {node.value + 1}", str(node.value + 1))
        elif isinstance(node.value, float):
            new = node.value * 2 or 1.0
            self._replace(node, f"{node.value} becomes {new}", repr(new))

    def visit_If(self, node: ast.If) -> None:
        if not all(isinstance(statement, ast.Raise) for statement in node.body):
            self._replace(node.test, "condition always true", "True")
            self._replace(node.test, "condition always false", "False")
        self.generic_visit(node)

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """The operator that stands between two operands."""
        old, new = OPERATORS[type(operator)]
        start = self._place(left)[1]
        at = self.source[start : self._place(right)[0]].find(old.encode())
        if at >= 0:
            self._add(right, f"{old} becomes {new}", start + at, start + at + len(old), new)

    def _replace(self, node: ast.expr, kind: str, new: str) -> None:
        self._add(node, kind, *self._place(node), new)

    def _add(self, node: ast.expr, kind: str, start: int, end: int, new: str) -> None:
        self.found.append(Mutant(self.file, node.lineno, kind, start, end, new))

    def _place(self, node: ast.expr) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset


def mutants_of(rooms: list[str]) -> Iterator[Mutant]:
    """Those that parse to something else, and are not listed as unseen."""
    unseen = {
        (each["file"], each["line"], each["kind"])
        for each in tomllib.loads(UNSEEN.read_text("utf-8")).get("unseen", [])
    }

    for room in rooms:
        place = ROOT / SOURCE / room
        for path in sorted(place.rglob("*.py")) or [place]:
            file = path.relative_to(ROOT)
            finder = Finder(file)
            tree = ast.parse(finder.source)
            finder.visit(tree)
            lines = finder.source.decode().splitlines()

            for mutant in finder.found:
                text = lines[mutant.line - 1].strip()
                if (str(file.relative_to(SOURCE)), text, mutant.kind) in unseen:
                    continue
                if differs(mutant, finder.source, tree):
                    yield mutant


def differs(mutant: Mutant, source: bytes, tree: ast.Module) -> bool:
    try:
        return ast.dump(ast.parse(mutant.text(source))) != ast.dump(tree)
    except (SyntaxError, ValueError):
        return False


def outcome(place: Path, tests: list[str], timeout_s: float) -> str:
    """What killed the source in that copy of the project; "" if its tests pass. Raises RuntimeError
    if they could not run."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(place / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        # A test that a mutant fails does not run again, as CI's options ask.
        "PYTEST_ADDOPTS": "",
    }
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]

    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        ended = subprocess.run(
            command,
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"more than {timeout_s:g} s"

    if ended.returncode == 0:
        return ""
    if ended.returncode > 2:
        raise RuntimeError((ended.stdout + ended.stderr)[-2000:])

    for line in reversed(ended.stdout.splitlines()):
        if line.startswith(("FAILED", "ERROR")):
            return line[:160]

    return "the tests could not be collected"


def copies(folder: Path, number: int) -> list[Path]:
    places = [folder / str(each) for each in range(number)]
    for place in places:
        left_out = shutil.ignore_patterns(".*", "runs", "build", "__pycache__")
        shutil.copytree(ROOT, place, symlinks=True, ignore=left_out)
    return places


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="+", help="folders or files of src/distflow")
    parser.add_argument("--tests", nargs="+", help="by default the rooms' own")
    parser.add_argument("--number", type=int, default=40, help="of mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--line", help="FILE:LINE, whose mutants are all tried")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout_s", type=float, default=200.0, help="of a mutant's tests")
    options = parser.parse_args()

    chosen = list(mutants_of(options.rooms))
    if options.line:
        chosen = [each for each in chosen if f"{each.file}:{each.line}".endswith(options.line)]
    else:
        random.Random(options.seed).shuffle(chosen)
        chosen = chosen[: options.number]

    tests = options.tests or [f"tests/{room}" for room in options.rooms]

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for place in copies(Path(folder), options.processes):
            free.put(place)

        def tried(mutant: Mutant) -> tuple[str, float]:
            place = free.get()
            file = place / mutant.file
            source = file.read_bytes()
            file.write_bytes(mutant.text(source))

            began = time.monotonic()
            try:
                return outcome(place, tests, options.timeout_s), time.monotonic() - began
            finally:
                file.write_bytes(source)
                free.put(place)

        place = free.get()
        if failure := outcome(place, tests, options.timeout_s):
            print(f"the tests fail without a mutant: {failure}", file=sys.stderr)
            return 2

        free.put(place)

        num_killed = 0
        with ThreadPoolExecutor(options.processes) as threads:
            for mutant, (killer, took_s) in zip(chosen, threads.map(tried, chosen), strict=True):
                num_killed += bool(killer)
                mark = "killed" if killer else "SURVIVED"
                print(
                    f"{mark:8} {took_s:5.1f} s  {mutant.file}:{mutant.line}  {mutant.kind}  "
                    f"{killer}",
                    flush=True,
                )

    print(f"{num_killed} of {len(chosen)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
