"""Folders of tasks in Harbor's format, as rows."""

import os
from pathlib import Path

import pytest

from distflow.data.dataset_columns import Columns
from distflow.data.sources import load_rows
from distflow.data.task_folders import HARBOR, read_task_folder
from distflow.errors import UserError

PLAIN = (
    '[metadata]\nauthor_name = "a"\n[verifier]\ntimeout_sec = 900.0\n[agent]\ntimeout_sec = 30\n'
)


def make(
    folder: Path, config: str = PLAIN, instruction: str = "Write 7 into answer.", test: str = "true"
) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text(test)
    return folder


def test_a_folder_of_tasks_is_a_row_for_each(tmp_path: Path) -> None:
    make(tmp_path / "b"), make(tmp_path / "a", instruction="First.\n")
    (tmp_path / "notes").mkdir()
    rows, _ = load_rows(str(tmp_path), Columns(answer_required=False))
    assert [row.prompt for row in rows] == ["First.", "Write 7 into answer."]
    assert [row.extra_info[HARBOR] for row in rows] == [
        {"folder": str(tmp_path / name)} for name in "ab"
    ]


def test_what_a_task_says_of_itself(tmp_path: Path) -> None:
    config = (
        'agent.timeout_sec = 0.5\nverifier.env = {B = "2"}\n'
        '[environment]\nworkdir = "/work"\nmemory_mb = 100\n'
        'env = {A = "1"}\n'
    )
    task = read_task_folder(make(tmp_path / "a", config))
    assert (task.workdir, task.memory_mb, task.agent_s, task.verifier_s) == (
        "/work",
        100,
        0.5,
        600.0,
    )
    assert task.env == {"A": "1"} and task.verifier_env == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            '[environment]\ndocker_image = "ubuntu"',
            "environment.docker_image is not supported",
        ),
        ("[environment]\ngpus = 1", "environment.gpus is not supported"),
        ("[environment]\nallow_internet = true", "environment.allow_internet is not supported"),
        ('[environment]\nnetwork_mode = "public"', "environment.network_mode must be 'no-network'"),
        ('[environment]\nos = "windows"', "environment.os must be 'linux'"),
        (
            '[environment]\nworkdir = "/usr/x"',
            "workdir='/usr/x': write an absolute path outside /usr",
        ),
        ('[environment]\nworkdir = "/a/../usr"', "write an absolute path"),
        (
            '[environment]\nenv = {KEY = "${OPENAI_API_KEY}"}',
            "environment.env.KEY wants a variable of this machine",
        ),
        ("[environment]\nmemory_mb = 0", "memory_mb=0"),
        ('[[steps]]\nname = "one"', "steps is not supported"),
        ("[verifier]\ntimeout_sec = nan", "timeout_sec=nan"),
        ("[agent]\ntimeout_sec = 0", "timeout_sec=0"),
        ('environment = "x"', "environment is no table"),
        ("[environment", "Expected ']'"),
    ],
)
def test_one_that_cannot_be_run_says_why_before_the_run(
    tmp_path: Path, config: str, said: str
) -> None:
    make(tmp_path / "good"), make(tmp_path / "wrong", config)
    with pytest.raises(UserError) as raised:
        load_rows(str(tmp_path), Columns(answer_required=False))
    assert f"{tmp_path}/wrong: " in str(raised.value) and said in str(raised.value)
    rows, bad = load_rows(str(tmp_path), Columns(answer_required=False), bad_rows="skip")
    assert len(rows) == len(bad.reasons) == 1


def test_files_that_are_missing_or_want_a_container_are_named(tmp_path: Path) -> None:
    (make(tmp_path / "a") / "environment" / "Dockerfile").write_text("FROM ubuntu")
    (make(tmp_path / "b") / "tests" / "test.sh").unlink()
    make(tmp_path / "c", instruction=" ")
    (make(tmp_path / "d") / "instruction.md").unlink()
    (make(tmp_path / "e") / "task.toml").write_bytes(b"\xff")
    with pytest.raises(UserError) as raised:
        load_rows(str(tmp_path), Columns(answer_required=False))

    reasons = [line for line in str(raised.value).splitlines() if line.startswith(f"  {tmp_path}")]
    for reason, said in zip(
        reasons,
        (
            "environment/Dockerfile is not supported",
            "test.sh is missing",
            "is empty",
            "No such file",
            "utf-8",
        ),
        strict=True,
    ):
        assert said in reason


def test_files_that_are_none_and_nested_tables_are_named(tmp_path: Path) -> None:
    (make(tmp_path / "a") / "task.toml").unlink()
    os.mkfifo(tmp_path / "a" / "task.toml")
    (make(tmp_path / "b") / "instruction.md").unlink()
    (tmp_path / "b" / "instruction.md").symlink_to("/dev/zero")
    make(tmp_path / "c", "a = " + "[" * 50_000)
    with pytest.raises(UserError) as raised:
        load_rows(str(tmp_path), Columns(answer_required=False))

    reasons = [line for line in str(raised.value).splitlines() if line.startswith(f"  {tmp_path}")]
    for reason, said in zip(
        reasons, ("no regular file", "no regular file", "recursion"), strict=True
    ):
        assert said in reason
