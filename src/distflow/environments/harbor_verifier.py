"""The tests of a task in Harbor's format, over the place that a policy leaves behind.

Whatever the policy did to the place is its failure, and scores 0. Only tests that fail over an
untouched place too are broken, which is an error of the episode.
"""

import asyncio
import configparser
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from distflow.data.task_folders import Task
from distflow.environments.tools_in_user_code_process import bounded
from distflow.sandbox.shell import Ran, Shell
from distflow.user_values import finite_number

_REWARD_BYTES = 64 * 2**10
_SHOWN = 500
_KILLED = 128
"""Exit statuses above it are those of a shell that a signal ended."""

_LOADED_BY_TOOLS = {
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    ".coveragerc",
    ".bashrc",
}
"""Files that a tool of the tests loads where it finds them."""

_PYTEST_SECTIONS = {"pyproject.toml": "tool", "setup.cfg": "tool:pytest", "tox.ini": "pytest"}
"""Files of a package, and where in them pytest finds options, such as plugins to load."""

_MOST_BYTES_OF_OPTIONS = 2**20
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", sys.prefix, sys.base_prefix)

_SITE = """
import os, sys
from importlib.machinery import PathFinder

class InstalledFirst:
    '''Finds what is installed, before what lies in the folders of the task.'''
    installed = list(sys.path)  # Python adds the folder of the script, or the current one, later
    has_started = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if not cls.has_started:
            cls.has_started = True
            # pytest asks each folder of the path for plugins
            is_here = os.path.realpath(sys.path[0] or '.') == os.getcwd()
            if is_here and 'pytest' in sys.orig_argv:
                del sys.path[0]
        if path is None and name != 'test':  # packages of tests are called like Python's own
            return PathFinder.find_spec(name, cls.installed)

def is_of_the_model(script):
    '''Whether it is a program from before the tests, which finds its own modules first.'''
    if script in ('', '-', '-c', '-m') or not os.path.isfile(script):
        return False
    trusted = ('/tests/', '/usr/', sys.prefix + '/', sys.base_prefix + '/')
    is_old = os.stat(script).st_ctime_ns <= os.stat('/verifier/site').st_ctime_ns
    return is_old and not os.path.realpath(script).startswith(trusted)

if not is_of_the_model(sys.argv[0]):
    sys.meta_path.insert(0, InstalledFirst)
"""

_ENVIRONMENT = {
    "HOME": "/verifier/home",
    "TMPDIR": "/verifier/tmp",
    "XDG_CONFIG_HOME": "/verifier/home/.config",
    "PYTHONPATH": "/verifier/site",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # compiled code that lies beside a module need not be of that module
    "PYTHONPYCACHEPREFIX": "/verifier/home/.pycache",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
    "GIT_CONFIG_KEY_2": "core.pager",
    "GIT_CONFIG_VALUE_2": "cat",
}


class TestsFailedError(RuntimeError):
    """The tests gave no reward."""


async def verify(task: Task, shell: Shell) -> Mapping[str, float]:
    """The rewards that the task's tests write; all are 0 where the policy made that impossible.
    Raises RuntimeError if the tests write none over an untouched place. Closes the shell."""
    try:
        await asyncio.to_thread(_clean, task, shell)
        return await _run_tests(task, shell)
    except (OSError, RuntimeError):
        await asyncio.to_thread(shell.close)  # the disk may be full

    untouched = Shell(task.workdir, task.memory_mb)
    try:
        await asyncio.to_thread(copy_environment, task, untouched)
        rewards = await _run_tests(task, untouched)
    finally:
        await asyncio.to_thread(untouched.close)

    return dict.fromkeys(rewards, 0.0)


def copy_environment(task: Task, shell: Shell) -> None:
    source = task.folder / "environment"
    if source.is_dir():
        shutil.copytree(source, shell.files, symlinks=True, dirs_exist_ok=True)


async def _run_tests(task: Task, shell: Shell) -> Mapping[str, float]:
    logs = shell.folder()
    own = shell.folder()
    for name in ("home", "tmp", "site"):
        (own / name).mkdir()
    (own / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    mounts = (
        ("--ro-bind", task.folder / "tests", "/tests"),
        ("--bind", logs, "/logs/verifier"),
        ("--bind", own, "/verifier"),
        ("--ro-bind", own / "site", "/verifier/site"),
    )
    env = {**_ENVIRONMENT, **task.verifier_env}

    ran = await shell.run(
        ("/bin/bash", "/tests/test.sh"), task.verifier_s, _REWARD_BYTES, env, mounts
    )
    if ran.exit_code is None:
        raise TestsFailedError(
            f"tests/test.sh of {task.folder} did not end within {task.verifier_s:g} s"
        )
    if ran.exit_code > _KILLED:
        raise TestsFailedError(f"tests/test.sh of {task.folder} was killed: {_end(ran)}")

    for name in ("reward.json", "reward.txt"):
        if (text := _written(logs / name)) is not None:
            return _rewards(text, name, task, ran)

    raise TestsFailedError(
        f"tests/test.sh of {task.folder} wrote no /logs/verifier/reward.txt: {_end(ran)}"
    )


def _clean(task: Task, shell: Shell) -> None:
    """Leave folders and plain files that can be read, and links between them."""
    roots = [(shell.files, task.workdir), (shell.temporary, "/tmp")]
    environment = task.folder / "environment"

    folders = [(root, PurePosixPath(place)) for root, place in roots]
    while folders:
        folder, place = folders.pop()
        try:
            os.chmod(folder, 0o700)
            entries = list(os.scandir(folder))
        except OSError:  # such as a path of more than 4,096 bytes
            _remove(folder)
            continue

        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append((Path(entry.path), place / entry.name))
            elif entry.is_symlink():
                if not _stays_inside(os.readlink(entry.path), place, task.workdir):
                    os.unlink(entry.path)
            elif not entry.is_file(follow_symlinks=False) or _is_loaded(
                Path(entry.path), shell.files, environment
            ):
                os.unlink(entry.path)
            else:
                os.chmod(
                    entry.path, stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode) | 0o600
                )


def _is_loaded(file: Path, files: Path, environment: Path) -> bool:
    """Whether tools load a file by its name that the task does not begin with."""
    original = None
    if file.is_relative_to(files):
        original = environment / file.relative_to(files)

    if file.name in _PYTEST_SECTIONS:
        if original and original.is_file():
            begun_with = _pytest_options(original)
        else:
            begun_with = {}
        return _pytest_options(file) != begun_with
    if file.name not in _LOADED_BY_TOOLS and file.suffix != ".pth":
        return False

    return original is None or not original.is_file() or original.read_bytes() != file.read_bytes()


def _pytest_options(file: Path) -> Mapping[str, Any] | None:
    """What a file tells pytest; None if that cannot be read."""
    if file.stat().st_size > _MOST_BYTES_OF_OPTIONS:
        return None

    text = file.read_text(encoding="utf-8", errors="replace")
    section = _PYTEST_SECTIONS[file.name]
    try:
        if file.suffix == ".toml":
            options = tomllib.loads(text).get(section, {}).get("pytest", {})
            return {"pytest": options} if options else {}
        parser = configparser.RawConfigParser(allow_no_value=True, strict=False)
        parser.read_string(text)
        return dict(parser[section]) if section in parser else {}
    except (ValueError, AttributeError, RecursionError, configparser.Error):
        return None


def _stays_inside(target: str, place: PurePosixPath, workdir: str) -> bool:
    """Whether a link leads to a place of the episode or to a program, and not to tests, devices or
    processes. After a name there is no `..`, which would go up from wherever that name leads."""
    parts = PurePosixPath(target).parts
    names = [part for part in parts if part not in ("..", "/")]
    if list(parts[len(parts) - len(names) :]) != names:
        return False
    path = PurePosixPath(os.path.normpath(place / target))
    return any(path.is_relative_to(root) for root in (workdir, "/tmp", *_PROGRAMS))


def _remove(folder: Path) -> None:
    """Whatever is in it, at any depth."""
    subprocess.run(
        ["/bin/rm", "-rf", "--", folder],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _written(file: Path) -> str | None:
    """The content; None unless it is a plain file, since code that runs with the tests may have
    made it a link or pipe."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None

    with open(descriptor, "rb") as opened:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_file:
            return opened.read(_REWARD_BYTES).decode("utf-8", "replace")
        return None


def _rewards(text: str, name: str, task: Task, ran: Ran) -> Mapping[str, float]:
    """Rewards by name; the score is the one called reward, or else the sum. Raises
    TestsFailedError."""
    try:
        found = json.loads(text) if name == "reward.json" else {"reward": float(text)}

        rewards = {
            str(key): finite_number(float(value), "it wrote") for key, value in found.items()
        }
        if not rewards:
            raise ValueError("there is no number")
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise TestsFailedError(
            f"tests/test.sh of {task.folder} wrote no reward into {name} ({error}): {_end(ran)}"
        ) from None

    return {**rewards, "score": rewards.get("reward", math.fsum(rewards.values()))}


def _end(ran: Ran) -> str:
    return (
        f"it ended with exit status {ran.exit_code}, and printed "
        f"{bounded(ran.output[-_SHOWN:], _SHOWN).text.strip()!r}"
    )
