"""A shell in folders of its own: what commands can see and change, and that nothing of them is
left."""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import UserError
from distflow.sandbox.shell import Ran, Shell


@pytest.fixture
def shell():
    shell = Shell("/app")
    try:
        shell.check()
    except UserError as error:
        shell.close()
        pytest.skip(str(error))

    yield shell
    shell.close()


def run(
    shell: Shell, command: str, timeout_s: float = 20.0, max_bytes: int = 5000, **more: Any
) -> Ran:
    return asyncio.run(
        shell.run(("/bin/bash", "-c", command), timeout_s, max_bytes, more.pop("env", {}), **more)
    )


def test_files_stay_for_later_commands_and_go_with_the_shell(shell):
    assert run(shell, "pwd; echo 1 > a; echo 2 > /tmp/b") == Ran(0, "/app\n")
    assert run(shell, "cat a /tmp/b; exit 3") == Ran(3, "1\n2\n")
    root = shell.files.parent
    shell.close()
    assert not root.exists()


def test_a_folder_that_a_command_made_unreadable_is_removed():
    """A link in it is not followed. Root may read everything, so this is tried as another user."""
    user = os.geteuid()
    os.seteuid(user or 65_534)

    try:
        shell = Shell("/app")
        with tempfile.TemporaryDirectory() as outside:
            os.chmod(outside, 0o500)
            (shell.files / "closed").mkdir()
            (shell.files / "closed" / "file").touch()
            (shell.files / "closed" / "link").symlink_to(outside)
            (shell.files / "closed").chmod(0)
            shell.files.chmod(0o500)
            shell.close()
            assert os.stat(outside).st_mode & 0o777 == 0o500
            os.chmod(outside, 0o700)

        assert not shell.files.parent.exists()
    finally:
        os.seteuid(user)


def test_it_has_the_programs_of_this_machine_and_the_variables_that_it_is_given(shell):
    assert run(shell, "python -c 'print(6 * 7)' && ls --version > /dev/null").output == "42\n"
    assert run(shell, 'echo "$NAME"; env | grep -c TOKEN', env={"NAME": "a b"}).output == "a b\n0\n"


def test_nothing_else_of_this_machine_is_seen_or_changed(shell, tmp_path):
    (tmp_path / "secret").write_text("secret")
    said = run(
        shell,
        f"cat {tmp_path}/secret /etc/passwd; ls /root /home; touch /usr/x /x /dev/x /bin/x; "
        f"kill -0 {os.getpid()}; python -c 'import socket; "
        'socket.create_connection(("127.0.0.1", 1), 1)\'',
    ).output
    assert "secret\n" not in said and said.count("Read-only file system") == 4, said
    assert "No such process" in said
    assert not (tmp_path / "x").exists()


def test_a_loopback_of_its_own_reaches_no_server_of_this_machine(shell):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert run(shell, f'python -c "{code}"').exit_code == 1


def test_a_command_that_hangs_is_killed_with_all_that_it_started(shell):
    started = time.monotonic()
    assert run(shell, "echo begun; (setsid sleep 4242.5 &); sleep 4242.5", timeout_s=1.0) == Ran(
        None, "begun\n"
    )
    assert time.monotonic() - started < 15
    assert run(shell, "(setsid sleep 4242.5 &) ; echo done") == Ran(0, "done\n")
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"4242.5" in line for line in lines)


def test_output_is_cut_and_its_rest_is_read(shell):
    assert run(shell, "yes | head -c 3000000; echo end >&2; exit 4", max_bytes=10) == Ran(
        4, "y\n" * 5
    )


def test_a_file_and_a_process_have_limits(shell):
    assert run(shell, "head -c 2G /dev/zero > big").exit_code != 0
    assert shell.files.joinpath("big").stat().st_size <= 2**30
    assert "MemoryError" in run(shell, "python -c 'bytearray(5 * 2**30)'").output


def test_a_mount_is_there_for_one_command(shell, tmp_path):
    (tmp_path / "a").write_text("1")
    mounted = run(shell, "cat /tests/a; touch /tests/b", mounts=[("--ro-bind", tmp_path, "/tests")])
    assert mounted.output.startswith("1") and "Read-only" in mounted.output
    assert run(shell, "ls /tests").exit_code == 2


def test_without_bubblewrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    shell = Shell("/app")
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        shell.check()
    shell.close()
