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
_IMAGES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", "compose.yaml")
_UNSUPPORTED = (
    "steps",
    "environment.docker_image",
    "environment.gpus",
    "environment.tpu",
    "environment.mcp_servers",
    "environment.healthcheck",
    "environment.skills_dir",
    "environment.allow_internet",
    "agent.user",
    "verifier.user",
    "verifier.environment",
    "verifier.collect",
)
"""Settings that change a task, by their names in `task.toml`."""
_ONLY = {
    "environment.os": "linux",
    "environment.network_mode": "no-network",
    "agent.network_mode": "no-network",
    "verifier.network_mode": "no-network",
    "verifier.environment_mode": "shared",
}
"""Settings of which one value is supported, the default."""


class Task(NamedTuple):
    """A task that can be run."""

    folder: Path
    instruction: str
    workdir: str
    """Where commands start, with the files of `environment/`."""
    env: dict[str, str]
    verifier_env: dict[str, str]
    agent_s: float
    """The agent's time limit."""
    verifier_s: float
    """The tests' time limit."""
    memory_mb: int | None
    """Of each process; None for the sandbox's."""


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
    _refuse_unsupported(folder, config)
    instruction = _text(folder, "instruction.md").strip()
    if not instruction:
        raise ValueError("instruction.md is empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise ValueError("tests/test.sh is missing")

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


def _refuse_unsupported(folder: Path, config: Mapping[str, Any]) -> None:
    here = "tasks run with this machine's software, without a container or a network"
    for image in _IMAGES:
        if (folder / "environment" / image).exists():
            raise ValueError(f"environment/{image} is not supported: {here}")

    for name in _UNSUPPORTED:
        if _setting(config, name):
            raise ValueError(f"task.toml: {name} is not supported: {here}")

    for name, only in _ONLY.items():
        if (_setting(config, name) or only) != only:
            raise ValueError(f"task.toml: {name} must be {only!r}: {here}")


def _setting(config: Mapping[str, Any], name: str) -> object:
    """The value of a dotted name, or None."""
    table, _, key = name.rpartition(".")
    return (config.get(table, {}) if table else config).get(key)


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
