"""The kinds of parts by which the package can be extended: the folders of their files, what the files define, and where
parts are registered.

A new part is a file, and a line in the file that registers its kind. `find_unregistered` finds files without their
line. It reads them as text and imports nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
BUILTIN_NAMES = "builtin_names.py"


@dataclass(frozen=True)
class ExtensionPoint:
    """A kind of part; paths are relative to the package.

    folders: of its files. defines: pattern of a part in such a file, with the groups `attribute` and, if the file has
    it, `name`. registry: files or a folder in which it is registered. table: the place of the line there. registered:
    pattern of a registered part. line: the line to add. Both are formats of {name}, {attribute}, {module} and
    {target}, which is "module:attribute".
    """

    kind: str
    folders: tuple[str, ...]
    defines: str
    registry: str
    table: str
    registered: str
    line: str


def _entry(
    kind: str, folder: str, defines: str, table: str, entry: str, *, registered: str = '"{target}"'
) -> ExtensionPoint:
    """A kind whose parts have entries in a table of `builtin_names.py`."""
    line = f'"{{name}}": {entry}("DESCRIPTION", "{{target}}"),'
    return ExtensionPoint(kind, (folder,), defines, BUILTIN_NAMES, table, registered, line)


def _algorithm(kind: str, folder: str, ending: str, decorator: str, table: str, entry: str) -> ExtensionPoint:
    """A kind whose functions are registered by a decorator or have its names."""
    decorated = rf'{decorator}\(\s*"(?P<name>\w+)"(?=(?:.*?\ndef (?P<attribute>\w+))?)'
    named = rf"^def (?P<function>compute_(?P<stem>\w+)_{ending})\("
    return _entry(kind, folder, f"{decorated}|{named}", table, entry, registered=rf'"{{name}}": {entry}\(')


def _classes(ending: str) -> str:
    """The pattern of classes with that ending of their names, protocols and abstract ones left out."""
    return rf"^class (?P<attribute>(?P<name>\w+){ending})\b(?![^\n]*\b(?:Protocol|ABC)\b)"


_REWARDS = r"^(?:async )?def (?P<attribute>compute_score)\(|^CASES\b"
_PIPELINES = r"^def (?P<attribute>(?P<name>\w+)_pipeline)\("
EXTENSION_POINTS = (
    _algorithm(
        "advantage estimator", "algorithms/advantages", "advantage", "register_adv_est", "ESTIMATORS", "Estimator"
    ),
    _algorithm("policy loss", "algorithms/losses", "loss", "register_policy_loss", "POLICY_LOSSES", "PolicyLoss"),
    _entry("reward function", "rewards", _REWARDS, "REWARDS", "Reward", registered='"{module}:'),
    _entry("pipeline", "pipelines", _PIPELINES, "PIPELINES", "BuiltinPipeline"),
    _entry("rollout engine", "rollout", _classes("Engine"), "ROLLOUT_ENGINES", "RolloutEngineEntry"),
    _entry("train engine", "training", _classes("Engine"), "TRAIN_ENGINES", "TrainEngineEntry"),
    _entry("tracker", "observe/writing", _classes("Tracker"), "TRACKERS", "Tracker"),
    ExtensionPoint(
        "check of an audited step",
        ("audit",),
        r"^@check\((?=.*?\ndef (?P<attribute>(?P<name>\w+))\()",
        "audit/all_checks.py",
        "BEFORE or AFTER",
        r"\b{attribute}[,)]",
        "from {module} import {attribute}  # and {attribute}, in the tuple",
    ),
    ExtensionPoint(
        "config group",
        ("config/keys",),
        r"^class (?P<attribute>(?P<name>\w+)Config)\b",
        "config/keys",
        "Config (config/keys/schema.py) or the group above it",
        r"{attribute}(?:(?<=group\({attribute})\)|(?<!\w{attribute})\])",
        "{name}: {attribute} = group({attribute})",
    ),
    ExtensionPoint(
        "command",
        ("commands",),
        r"^def (?P<attribute>run_(?P<name>\w+))\(",
        "cli.py",
        "COMMANDS",
        r'"{name}": Command\(',
        '"{name}": Command("HELP", "{module}"),',
    ),
    ExtensionPoint(
        "wire of the queue or of weights",
        ("runtime/sample_queue", "runtime/weight_sync", "cluster"),
        r"^class (?P<attribute>(?P<name>\w+?)(?:SampleQueue|Weights))\b(?![^\n]*\bProtocol\b)",
        "launch,cluster,runtime/sample_queue",
        "the `Ports` that its launcher makes (launch/local_launcher.py, cluster/worker_actor.py)",
        r"{attribute}(?<!class {attribute})(?:\[\w+\])?[()]",
        "{attribute}(...)",
    ),
)


@dataclass(frozen=True)
class Unregistered:
    """A part that is defined in a file and not registered."""

    point: ExtensionPoint
    name: str
    file: str
    attribute: str
    line: str

    def __str__(self) -> str:
        where = self.point.table if "/" in self.point.table else f"{self.point.table} ({self.point.registry})"
        return (
            f"{self.file} defines the {self.point.kind} {self.attribute}, and nothing registers it: add to {where} of "
            f"the package the line\n  {self.line}"
        )


@cache
def find_unregistered(package: Path = PACKAGE) -> list[Unregistered]:
    """The parts in files of the package that are not registered, each once."""
    found = {}
    for point in EXTENSION_POINTS:
        registry = "\n".join(path.read_text("utf-8") for path in _files(package, point.registry.split(",")))
        for file, names in _defined(point, package):
            if not re.search(point.registered.format_map({k: re.escape(v) for k, v in names.items()}), registry):
                line = point.line.format_map(names)
                part = Unregistered(point, names["name"], file, names["attribute"], line)
                found[point.kind, file, part.name] = part
    return list(found.values())


def _files(package: Path, places: list[str] | tuple[str, ...]) -> list[Path]:
    """The places that are files, and the files in those that are folders."""
    return [
        path
        for place in places
        for path in (sorted((package / place).rglob("*.py")) if (package / place).is_dir() else [package / place])
        if path.is_file()
    ]


def _defined(point: ExtensionPoint, package: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(file, names for the formats) of each part."""
    pattern = re.compile(point.defines, re.MULTILINE | re.DOTALL)
    for path in _files(package, point.folders):
        file = path.relative_to(package).as_posix()
        for match in pattern.finditer(path.read_text("utf-8")):
            groups = match.groupdict()
            attribute = groups.get("attribute") or groups.get("function") or "compute_score"
            of_file = path.stem.removesuffix("_reward")
            of_file = path.parent.name if of_file == "reward" else of_file
            name = (groups.get("name") or groups.get("stem") or of_file).lower()
            module = f"distflow.{file.removesuffix('.py').replace('/', '.')}"
            target = f"{module}:{attribute}"
            yield file, {"name": name, "attribute": attribute, "module": module, "target": target}
