"""The kinds of parts that extend the package: the folders of their files, what the files define,
and where parts are registered.

A new part is a file, and a line in the registry of its kind. `find_unregistered` finds files
without that line; it reads them as text and imports nothing.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
BUILTIN_NAMES = "builtin_names.toml"


@dataclass(frozen=True)
class ExtensionPoint:
    """A kind of part; paths are relative to the package.

    folders: of its files. defines: pattern of a part in such a file, with the groups `attribute`
    and, if the file has it, `name`. table: the place for the line that registers a part. registry:
    the files or folder that hold the table. registered: pattern of a registered part. line: the
    line to add. Both are formats of {name}, {attribute}, {module}, {stem} (the file's) and
    {target}, which is "module:attribute".
    """

    kind: str
    folders: list[str]
    defines: str
    table: str
    registry: str = BUILTIN_NAMES
    registered: str = '"{target}"'
    line: str = '{name} = {{ description = "DESCRIPTION", target = "{target}" }}'


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
EXTENSION_POINTS = tuple(ExtensionPoint(**entry) for entry in _TABLE["points"])


@dataclass(frozen=True)
class Unregistered:
    point: ExtensionPoint
    name: str
    file: str
    attribute: str
    line: str

    def __str__(self) -> str:
        where = (
            self.point.table
            if "/" in self.point.table
            else f"{self.point.table} ({self.point.registry})"
        )
        return (
            f"{self.file} defines the {self.point.kind} {self.attribute}, but nothing registers "
            "it: add this line "
            f"to {where} of the package:\n  {self.line}"
        )


@cache
def find_unregistered(package: Path = PACKAGE) -> list[Unregistered]:
    """The parts in files of the package that are not registered, each once."""
    found = {}
    for point in EXTENSION_POINTS:
        registry = "\n".join(
            path.read_text("utf-8") for path in _files(package, point.registry.split(","))
        )
        for file, names in _defined(point, package):
            if not re.search(
                point.registered.format_map({k: re.escape(v) for k, v in names.items()}), registry
            ):
                line = point.line.format_map(names)
                part = Unregistered(point, names["name"], file, names["attribute"], line)
                found[point.kind, file, part.name] = part
    return list(found.values())


def _files(package: Path, places: list[str]) -> list[Path]:
    """The places that are files, and the files inside those that are folders."""
    found: list[Path] = []
    for place in places:
        for path in (
            sorted((package / place).rglob("*.py"))
            if (package / place).is_dir()
            else [package / place]
        ):
            if path.is_file():
                found.append(path)
    return found


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
            yield (
                file,
                {
                    "name": name,
                    "attribute": attribute,
                    "module": module,
                    "stem": path.stem,
                    "target": target,
                },
            )
