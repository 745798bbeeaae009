"""What is installed with distflow: licences of the core, upper bounds, and the lock."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
LOCK = PROJECT.with_name("requirements.lock")
LOCKED = re.compile(
    r"^([\w.-]+)==([\w.+!-]+)[^\\\n]*((?:\\\n    --hash=sha256:[0-9a-f]{64} ?)*)$", re.MULTILINE
)
"""A name, its version and its hashes."""


def core() -> dict[str, importlib.metadata.Distribution]:
    """The packages that `pip install distflow` brings, by name, with those that they need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(tomllib.loads(PROJECT.read_text())["project"]["dependencies"])
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
        if name in found or "extra ==" in requirement:
            continue

        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another system or Python
            continue

        waiting += found[name].requires or []

    return found


def declared(extra: str) -> list[Requirement]:
    """What the core and an extra ask for, with what the extra takes from others."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    asked = [Requirement(each) for each in project["dependencies"]]
    waiting = [extra]
    while waiting:
        for requirement in map(Requirement, project["optional-dependencies"][waiting.pop()]):
            if requirement.name == project["name"]:
                waiting += requirement.extras
            else:
                asked.append(requirement)

    return asked


def test_the_lock_fits_what_the_project_asks_for():
    text = LOCK.read_text()
    entries = LOCKED.findall(text)
    assert len(entries) > 100 and all(hashes for *_, hashes in entries)

    # nothing but versions with their hashes
    assert len(re.findall(r"^\S", text, re.MULTILINE)) == len(entries)
    assert not re.search(r"://|^(torch|triton|nvidia|cuda)\b", text, re.MULTILINE)
    missing = {
        str(requirement)
        for requirement in declared("dev")
        if requirement.name != "torch"  # each machine has a build of its own
        and not [
            version
            for name, version, _ in entries
            if name == canonicalize_name(requirement.name) and version in requirement.specifier
        ]
    }
    assert not missing, "make lock"
