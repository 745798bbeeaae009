"""Programs that attack: each ends as it should, gets nothing, leaves nothing, and the next one
never notices."""

import os
import sysconfig
from pathlib import Path
from subprocess import Popen

import pytest

import distflow
from distflow.sandbox.local_sandbox import Sandbox
from tests.sandbox.attacks import FILES, PRELUDE, PROCESSES, USE
from tests.sandbox.conftest import LIMITS

SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/", "/usr/lib")
MADE = "made-by-a-program"


@pytest.fixture(scope="module")
def victim():
    """A process of the same user that an attack might reach."""
    with Popen(["sleep", "1000"], env={"SECRET": "of another process"}) as process:
        yield process
        assert process.poll() is None, "a program ended another process"
        process.kill()


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    path.write_text("expected: 42\n")
    return path


def family(pid: int) -> set[int]:
    """The processes below one."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child, *family(child)}
    return found


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def state(sandbox: Sandbox) -> tuple[object, ...]:
    server = sandbox._server.pid
    everyone = {server, *family(server)}
    made = [folder for folder in SHARED if os.path.exists(os.path.join(folder, MADE))]
    shared = [
        Path(f"/proc/sysvipc/{kind}").read_text().count("\n") for kind in ("shm", "sem", "msg")
    ]
    return everyone, [open_files(pid) for pid in sorted(everyone)], made, shared


@pytest.mark.parametrize("attack", [*PROCESSES, *FILES, *USE], ids=lambda attack: attack.name)
def test_nothing_passes_and_nothing_stays(sandbox, attack, victim, secret):
    known = {
        "VICTIM": victim.pid,
        "SECRET": str(secret),
        "PACKAGE": os.path.dirname(distflow.__file__),
        "SITE_PACKAGES": sysconfig.get_path("purelib"),
    }
    sandbox.limits = LIMITS._replace(wall_s=0.25) if "time" in attack.statuses else LIMITS
    before = state(sandbox)
    ours = open_files(os.getpid())
    ran = sandbox.run(
        "".join(f"{name} = {value!r}\n" for name, value in known.items()) + PRELUDE + attack.code
    )
    assert "got" not in ran.stdout or ran.status == "output", ran.stdout
    assert ran.status in attack.statuses, ran
    assert state(sandbox) == before
    assert open_files(os.getpid()) <= ours  # what tests before left is collected now or then
    assert sandbox.run("print(6 * 7)").stdout == "42\n"
    assert secret.read_text() == "expected: 42\n"
