"""Tests of a task over what a policy left behind: nothing that it did is an error or a forged
reward."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from distflow.data.task_folders import read_task_folder
from distflow.environments.harbor_verifier import copy_environment, verify
from distflow.errors import UserError
from distflow.sandbox.shell import Shell
from tests.data.test_task_folders import make

READS = """set -e
found=$(cat answer)
if [ "$found" = "$(cat /tests/right)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
IN_PYTHON = """python -c '
import json, decimal
right = open("answer").read().strip() == open("/tests/right").read().strip()
print(int(right), file=open("/logs/verifier/reward.txt", "w"))'
"""
IN_PYTEST = """
python -m pytest -q /tests/test_answer.py && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""  # noqa: E501


@pytest.fixture(autouse=True)
def needs_bubblewrap():
    shell = Shell("/app")
    try:
        shell.check()
    except UserError as error:
        pytest.skip(str(error))
    finally:
        shell.close()


def play(folder: Path, command: str, test: str, timeout_s: float = 3.0) -> Mapping[str, float]:
    task = read_task_folder(
        make(folder / "task", f"[verifier]\ntimeout_sec = {timeout_s}\n", test=test)
    )
    (task.folder / "environment" / "answer").write_text("0\n")
    (task.folder / "tests" / "right").write_text("7\n")
    (task.folder / "tests" / "test_answer.py").write_text(
        "import decimal, json\ndef test_answer():\n"
        "    assert open('answer').read().strip() == '7'\n"
    )

    async def run() -> Mapping[str, float]:
        shell = Shell(task.workdir, task.memory_mb)
        try:
            copy_environment(task, shell)
            await shell.run(("/bin/bash", "-c", command), 20, 4000, {})
            await shell.run(("/bin/bash", "-c", "true"), 20, 4000, {})  # a later command runs too
            return await verify(task, shell)
        finally:
            shell.close()
            assert not shell.files.parent.exists()

    return asyncio.run(run())


BREAKS = {
    "no permission": "chmod 000 .",
    "a file without permission": "echo 8 > answer; chmod 000 answer",
    "a pipe": "rm answer; mkfifo answer",
    "a device": "rm answer; ln -s /dev/zero answer",
    "a device through a link": "rm answer; ln -s /dev d; ln -s d/zero answer",
    "a process": "rm answer; ln -s /proc/self/mem answer",
    "a folder": "rm answer; mkdir answer",
    "a socket": (
        "rm answer; python -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer\")'"
    ),
    "links in a circle": "rm answer; ln -s answer b; ln -s b answer",
    "a large file with holes": "truncate -s 900M answer",
    "deep folders": (
        'python -c \'import os\nfor _ in range(1100): os.mkdir("d" * 9); os.chdir("d" * 9)\''
    ),
    "deep folders without permission": "mkdir -p a/b/c; chmod 000 a/b; chmod 000 a",
    "the expected answer": "rm answer; ln -s /tests/right answer",
    "the expected answer, by a link of a folder": (
        "rm answer; ln -s /usr d; ln -s d/../tests/right answer"
    ),
    "no files at all": "rm -rf * .*",
    "a name that is no text": "touch $'\\xff\\xfe'",
    "a process that stays": "(setsid sleep 100 &) ; exit",
}


@pytest.mark.parametrize("test", [READS, IN_PYTHON], ids=["bash", "python"])
@pytest.mark.parametrize("name", BREAKS)
def test_what_a_policy_did_to_the_place_scores_0(name, test, tmp_path):
    assert play(tmp_path, BREAKS[name], test)["score"] == 0.0


RIGHT = "echo 7 > answer"
FORGES = {
    "sitecustomize": "sitecustomize.py",
    "a module of Python": "json.py",
    "a module of Python that is loaded late": "decimal.py",
    "pytest": "pytest.py",
    "conftest": "conftest.py",
    "a package": "json/__init__.py",
}
CODE = "open('/logs/verifier/reward.txt', 'w').write('1'); import os; os._exit(0)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "test", [IN_PYTHON, IN_PYTEST, f"cp /tests/*.py .; {IN_PYTEST}"], ids=["c", "pytest", "copied"]
)
@pytest.mark.parametrize("name", FORGES)
def test_code_that_a_policy_left_is_not_imported(name, test, tmp_path):
    file = FORGES[name]
    home = "$HOME/.local/lib/python3.11/site-packages"
    command = (
        f'mkdir -p json {home}; for f in {file} {home}/usercustomize.py; do echo "{CODE}" > $f; '
        "done; echo 8 > answer"
    )
    assert play(tmp_path, command, test, 30.0)["score"] == 0.0


def test_a_plugin_that_a_policy_left_is_not_loaded(tmp_path):
    command = (
        f'echo "{CODE}" > evil.py; mkdir evil-1.dist-info; printf "[pytest11]\\nevil = evil\\n" > '
        "evil-1.dist-info/entry_points.txt; printf 'Name: evil\\nVersion: 1\\n' > "
        "evil-1.dist-info/METADATA"
    )
    assert play(tmp_path, command, IN_PYTEST, 30.0)["score"] == 0.0


OPTIONS = {
    "pyproject.toml": "[tool.pytest.ini_options]\\naddopts = '-p evil'\\npythonpath = ['.']",
    "setup.cfg": "[tool:pytest]\\naddopts = -p evil\\npythonpath = .",
    "tox.ini": "[pytest]\\naddopts = -p evil\\npythonpath = .",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_a_policy_gives_pytest_are_not_read(name, tmp_path):
    command = f'echo "{CODE}" > evil.py; printf "{OPTIONS[name]}" > {name}; echo 8 > answer'
    test = f"cp /tests/*.py .; {IN_PYTEST.replace('/tests/', '')}"
    assert play(tmp_path, command, test, 30.0)["score"] == 0.0


def test_other_options_of_a_package_stay(tmp_path):
    command = f"echo '[tool.x]' > pyproject.toml; printf '[metadata]\n' > setup.cfg; {RIGHT}"
    test = f"set -e; [ -s pyproject.toml ]; [ -s setup.cfg ]; {READS}"
    assert play(tmp_path, command, test)["score"] == 1.0


COMPILES = f"""cat > make.py <<'END'
import importlib._bootstrap_external as external, importlib.util, os
os.makedirs("__pycache__")
compiled = external._code_to_hash_pyc(compile({CODE!r}, "x", "exec"), b"unchecks", False)
open(importlib.util.cache_from_source("test_answer.py"), "wb").write(compiled)
END
python make.py
"""
IN_A_COPY = """
cp /tests/test_answer.py .; {}; [ -s /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
"""  # noqa: E501


@pytest.mark.parametrize(
    ("command", "test"),
    [
        (f'echo "{CODE}" > decimal.py', "python test_answer.py"),
        (f'echo "{CODE}" > decimal.py', "python -u ./test_answer.py"),
        (COMPILES, "python -c 'import test_answer'"),
        (COMPILES, "python -m unittest test_answer"),
    ],
    ids=["script", "script with an option", "compiled", "compiled, by unittest"],
)
def test_a_copy_of_the_tests_is_what_runs(command, test, tmp_path):
    assert play(tmp_path, command, IN_A_COPY.format(test))["score"] == 0.0


def test_hooks_of_git_do_not_run(tmp_path):
    command = (
        "git init -q .; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > h; chmod +x "
        "h; "
        "git config core.fsmonitor /app/h; git config core.hooksPath /app; cp h pre-commit"
    )
    assert (
        play(tmp_path, command, "git status; git diff; echo ${X:-0} >> /logs/verifier/reward.txt")[
            "score"
        ]
        == 0.0
    )


def test_tests_that_a_program_kills_are_not_believed(tmp_path):
    command = "printf 'echo 1 > /logs/verifier/reward.txt; kill -9 $PPID\\n' > answer"
    assert (
        play(tmp_path, command, "bash answer || true; echo 0 > /logs/verifier/reward.txt")["score"]
        == 0.0
    )


@pytest.mark.parametrize("test", [READS, IN_PYTHON, IN_PYTEST], ids=["bash", "python", "pytest"])
def test_a_right_answer_scores_1(test, tmp_path):
    command = (
        f"{RIGHT}; chmod 444 answer; echo x > /tmp/other; ln -s answer link; ln -s /usr/bin/env env"
    )
    assert play(tmp_path, command, test, 30.0)["score"] == 1.0


def test_a_program_of_the_policy_finds_its_own_modules(tmp_path):
    command = "echo 'import part; print(part.x)' > main.py; echo 'x = 7' > part.py"
    test = (
        "set -e; python main.py > out; python -m main; [ $(cat out) = 7 ] && echo 1 > "
        "/logs/verifier/reward.txt"
    )
    assert play(tmp_path, command, test)["score"] == 1.0


@pytest.mark.parametrize(
    "test", ["exit 1", "echo nan > /logs/verifier/reward.txt", "kill -9 $$", "sleep 60"]
)
def test_broken_tests_are_an_error(test, tmp_path):
    with pytest.raises(RuntimeError, match="test.sh"):
        play(tmp_path, "chmod 000 .", test, 1.0)
