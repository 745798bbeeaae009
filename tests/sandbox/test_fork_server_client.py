"""The fork server: what it starts with, what ends it, and what ends with it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.sandbox import fork_server_client
from distflow.sandbox.inside import isolation
from distflow.sandbox.inside.isolation import (
    ALLOWED,
    CAPSET,
    CLONE3,
    FCNTL,
    IOCTL,
    PRLIMIT64,
    SECCOMP,
)
from distflow.sandbox.interface import Broken, SandboxFault
from distflow.sandbox.local_sandbox import LEVELS, Sandbox, probe
from tests.sandbox.conftest import LIMITS
from tests.sandbox.test_attacks import family

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
OWNER = """
import sys, time
from distflow.sandbox.local_sandbox import Sandbox
sandbox = Sandbox(level=sys.argv[1])
session = sandbox.open("import time\\ndef f(): time.sleep(100)")
print(sandbox._server.pid, flush=True)
session.call("f")
"""


def lives(pid: int) -> bool:
    """A process that ended, and that the machine's first process has not asked for yet, does
    not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: set[int], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(lives, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_it_has_nothing_of_its_owner(sandbox):
    """Neither environment nor descriptors; what it runs on is what came with Python."""
    for pid in {sandbox._server.pid, *family(sandbox._server.pid)}:
        assert set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) <= {
            b"",
            b"PYTHONHASHSEED=0",
            b"LD_BIND_NOW=1",
            b"PWD=/",
            b"OLDPWD=/",
        }
        likely = Path(f"/proc/{pid}/oom_score_adj").read_text()
        assert likely == "1000\n" or pid == sandbox._server.pid, (
            "memory that runs short ends it first"
        )
        links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        allowed = r"/dev/null|pipe:.*|socket:.*|anon_inode:\[?(pidfd|landlock-ruleset|signalfd)\]?|/memfd:.*|pidfd:.*|/"  # noqa: E501
        assert all(re.fullmatch(allowed, link) for link in links), links

    said = sandbox.run(
        "import os, sys\nprint(dict(os.environ), sys.path, [m for m in sys.modules if 'distflow' "
        "in m])"
    )
    assert (
        "site-packages" not in said.stdout
        and said.stdout.startswith("{} [")
        and said.stdout.endswith("] []\n")
    )


@pytest.mark.parametrize("name", LEVELS)
def test_it_ends_with_its_owner(name):
    """Also where the owner had no time for a word, and its programs hang."""
    if name in probe().missing:
        pytest.skip(f"wants {name}: {probe().missing[name]}")

    with subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        server = int(owner.stdout.readline())
        pids = {server, *family(server)}
        assert len(pids) == (4 if name == "namespaces" else 3), "with the keeper"
        owner.kill()

    assert gone(pids)


def test_one_that_was_killed_is_made_again(sandbox):
    session = sandbox.open("import time\ndef f(): time.sleep(100)")
    dead = sandbox._server.pid
    programs = family(sandbox._server.pid)
    os.kill(dead, signal.SIGKILL)
    with pytest.raises((SandboxFault, Broken)):
        session.call("f")
    session.close()
    assert sandbox.run("print(1)").stdout == "1\n"
    assert gone({dead, *programs})
    assert sandbox._server.pid != dead


def test_closing_leaves_nothing(sandbox):
    before = len(os.listdir("/proc/self/fd"))
    with Sandbox(LIMITS, sandbox.level.name) as other:
        session = other.open("def f(): return 1")
        pids = {other._server.pid, *family(other._server.pid)}

    assert gone(pids)
    session.close()
    session.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SandboxFault, match="closed"):
        other.run("")


def test_a_thread_that_started_it_may_end():
    """Linux kills a child with the thread that started it, where it is asked to: this is not
    that."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        sandbox = threads.submit(Sandbox).result()
    pid = sandbox._server.pid
    assert sandbox.run("print(1)").stdout == "1\n" and sandbox._server.pid == pid
    sandbox.close()


def test_without_bubblewrap_there_is_the_floor(monkeypatch):
    monkeypatch.setattr(fork_server_client.shutil, "which", lambda _: None)
    found = probe()
    assert found.name == "floor" and "not installed" in found.missing["namespaces"]
    assert str(found).startswith("floor; no namespaces: bubblewrap is not installed")
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        Sandbox(level="namespaces")


def test_bubblewrap_that_may_make_no_namespaces(tmp_path, monkeypatch):
    refusing = tmp_path / "bwrap"
    refusing.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setattr(fork_server_client.shutil, "which", lambda _: str(refusing))
    assert "No permissions" in probe().missing["namespaces"]


@pytest.mark.parametrize("layer", ["landlock", "seccomp", "files"])
def test_a_missing_isolation_layer_is_found(tmp_path, layer, monkeypatch):
    """The server of a distflow that lacks it: neither level is there, and nothing runs."""
    copy = tmp_path / "distflow"
    (copy / "sandbox").mkdir(parents=True)
    (copy / "__init__.py").touch()
    subprocess.run(
        ["cp", "-r", f"{Path(fork_server_client.__file__).parent}/.", str(copy / "sandbox")],
        check=True,
    )
    call, instead = {
        "landlock": (
            "version = _syscall(_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)",
            "raise OSError('no Landlock')",
        ),
        "seccomp": (
            "_syscall(SECCOMP[isolation.machine], _SET_MODE_FILTER, 0, ctypes.addressof(program))",
            "pass",
        ),
        "files": ("_syscall(_RESTRICT_SELF, isolation.ruleset, 0)", "pass"),
    }[layer]
    code = Path(isolation.__file__).read_text()
    assert call in code
    (copy / "sandbox" / "inside" / "isolation.py").write_text(code.replace(call, instead))
    monkeypatch.setattr(fork_server_client, "_PACKAGE", copy)
    reason = {
        "landlock": "no Landlock",
        "seccomp": "open a socket",
        "files": "read /etc/passwd, read /proc/self/environ",
    }
    with pytest.raises(UserError, match=f"isolated .*{reason[layer]}"):
        Sandbox(level="floor")
    if layer != "files":  # which namespaces keep out by themselves
        assert probe().name == "none"


def test_no_such_level():
    with pytest.raises(UserError, match="'ceiling'"):
        Sandbox(level="ceiling")


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_calls_are_the_kernels(machine):
    if not HEADERS[machine].exists():
        pytest.skip(
            f"wants the headers of the kernel, {HEADERS[machine]} (Debian: apt-get install "
            "linux-libc-dev)"
        )

    text = HEADERS[machine].read_text()
    known = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", text, re.M)
    }
    known["newfstatat"] = known.get("newfstatat", known.get("fstatat", -1))
    others = {
        "capset": CAPSET,
        "clone3": CLONE3,
        "fcntl": FCNTL,
        "ioctl": IOCTL,
        "prlimit64": PRLIMIT64,
    }
    wanted = ALLOWED[machine] | {
        name: table[machine] for name, table in (others | {"seccomp": SECCOMP}).items()
    }
    assert wanted == {name: known[name] for name in wanted}
