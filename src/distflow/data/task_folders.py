"""Tasks in folders, in the format of Harbor: `task.toml`, `instruction.md`, `environment/`,
`tests/test.sh`.

They run with this machine's software, without a container and without a network. A task that names
an image, has a Dockerfile, or needs anything else that is missing is a bad row, with that reason.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from distflow.data.dataset_columns import FileRow
from distflow.untrusted_files import MAX_SOURCE_BYTES, read_file

HARBOR = "harbor"
"""The column with the `folder` of the task."""
_WORKDIR = "/app"
_TAKEN = ("usr", "bin", "sbin", "lib", "lib64", "proc", "dev", "etc", "tmp", "logs", "tests")
_CONTAINER = (
    "{} is a container image, and containers are not supported: remove it, install here what the "
    "task needs, and "
    "put the files that the task begins with into environment/"
)
_IMAGES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", "compose.yaml")
_UNSUPPORTED: dict[str, str] = {
    "steps": "has several steps",
    "environment.docker_image": _CONTAINER.format("environment.docker_image"),
    "environment.gpus": "wants a GPU",
    "environment.tpu": "wants a TPU",
    "environment.mcp_servers": "has MCP servers",
    "environment.healthcheck": "has services, with a health check",
    "environment.skills_dir": "has skills for agents",
    "environment.allow_internet": "wants a network",
    "agent.user": "names a user of its image",
    "verifier.user": "names a user of its image",
    "verifier.environment": "has a container of its own for the tests",
    "verifier.collect": "has commands for several containers",
}
"""Unsupported settings that change a task, by their names in `task.toml`."""


class Task(NamedTuple):
    """workdir: where commands start, with the files of `environment/`. agent_s, verifier_s: time
    limits. memory_mb: of each process; None for the sandbox's."""

    folder: Path
    instruction: str
    workdir: str
    env: dict[str, str]
    verifier_env: dict[str, str]
    agent_s: float
    verifier_s: float
    memory_mb: int | None


def has_tasks(folder: Path) -> bool:
    return next(folder.glob("*/task.toml"), None) is not None


def read_task_folders(folder: Path) -> Iterator[FileRow]:
    """A row for each task folder, in the order of names."""
    for file in sorted(folder.absolute().glob("*/task.toml")):
        try:
            task = read_task_folder(file.parent)
        except (ValueError, OSError, RecursionError) as error:
            yield str(file.parent), " ".join(str(error).split())
        else:
            place = {"folder": str(file.parent)}
            yield str(file.parent), {"prompt": task.instruction, HARBOR: place}


def read_task_folder(folder: Path) -> Task:
    """Read a task. Raises ValueError, OSError or RecursionError if it cannot be run."""
    config = tomllib.loads(_text(folder, "task.toml"))
    tables = {name: config.get(name, {}) for name in ("environment", "agent", "verifier")}
    if wrong := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise ValueError(f"task.toml: {wrong[0]} is no table")
    environment, agent, verifier = tables.values()
    for name, why in _UNSUPPORTED.items():
        table, _, key = name.rpartition(".")
        if (tables[table] if table else config).get(key):
            raise ValueError(
                "task.toml: "
                f"{why if table and 'image' in key else f'{name}: the task {why}, which is not supported'}"  # noqa: E501
            )
    if image := next((name for name in _IMAGES if (folder / "environment" / name).exists()), None):
        raise ValueError(_CONTAINER.format(f"environment/{image}"))
    if (
        environment.get("os", "linux") != "linux"
        or verifier.get("environment_mode", "shared") != "shared"
    ):
        raise ValueError(
            "task.toml: the task needs another system than Linux, or a separate container for "
            "tests: unsupported"
        )
    if any(table.get("network_mode", "no-network") != "no-network" for table in tables.values()):
        raise ValueError("task.toml: network_mode: the task wants a network")
    instruction = _text(folder, "instruction.md").strip()
    if not instruction or not (folder / "tests" / "test.sh").is_file():
        raise ValueError(
            "instruction.md is empty" if not instruction else "tests/test.sh is missing"
        )
    memory = environment.get("memory_mb")
    if memory is not None and (type(memory) is not int or memory < 1):
        raise ValueError(f"task.toml: environment.memory_mb={memory!r}: write a number of MiB")
    own = _variables(environment, "environment")
    return Task(
        folder,
        instruction,
        _workdir(environment.get("workdir") or _WORKDIR),
        own,
        {**own, **_variables(verifier, "verifier")},
        _seconds(agent, "agent"),
        _seconds(verifier, "verifier"),
        memory,
    )


def _text(folder: Path, name: str) -> str:
    return read_file(folder / name, folder, MAX_SOURCE_BYTES).decode()


def _workdir(found: object) -> str:
    path = PurePosixPath(str(found))
    if (
        not path.is_absolute()
        or ".." in path.parts
        or len(path.parts) < 2
        or path.parts[1] in _TAKEN
    ):
        raise ValueError(
            f"task.toml: environment.workdir={found!r}: write an absolute path outside "
            f"/{', /'.join(_TAKEN)}"
        )
    return str(path)


def _seconds(table: Mapping[str, Any], name: str) -> float:
    found = table.get("timeout_sec", 600.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"task.toml: {name}.timeout_sec={found!r}: write a number of seconds")
    return float(found)


def _variables(table: Mapping[str, Any], name: str) -> dict[str, str]:
    found = table.get("env", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"task.toml: {name}.env must be a table of strings")
    if asked := [key for key, value in found.items() if "${" in value]:
        raise ValueError(
            f"task.toml: {name}.env.{asked[0]} wants a variable of this machine, which tasks do "
            "not get"
        )
    return dict(found)
