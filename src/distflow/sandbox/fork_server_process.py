"""The fork server's process, seen from its owner: it gets nothing of the owner's environment, and ends with it.

At the level "namespaces" bubblewrap (`bwrap`) starts it in namespaces for users, processes, network, mounts and others.
The fork server is process 1 in there and there is no /proc, since bubblewrap's own process 1 would show its command
line. Programs are not process 1, which resource limits cannot kill.
"""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import distflow
from distflow.sandbox.inside.isolation import DEVICES_READ, DEVICES_WRITTEN, PACKAGES, SYSTEM, standard_library
from distflow.sandbox.inside.program import REQUEST, Request
from distflow.sandbox.inside.server import MAX_MESSAGE_BYTES, READY
from distflow.sandbox.interface import SandboxFault

LevelName = Literal["namespaces", "floor"]
START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_BOUND_SOURCE = "/distflow-source"  # the folder of distflow's source inside the namespaces
_PACKAGE = Path(distflow.__file__).parent
_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from distflow.sandbox.inside.server import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}
"""A fixed order of sets makes programs behave the same each time; LD_BIND_NOW resolves functions of libraries once, and
not in each program. Programs themselves have no environment."""
# When memory runs short, the kernel kills these processes first.
_SHELL = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'


class ServerGone(Exception):
    """The fork server was killed, or it ended."""


class ForkServer:
    """One process, and with namespaces bubblewrap's beside it. Used by one thread at a time."""

    def __init__(self, level: LevelName) -> None:
        """Raises SandboxFault if it does not start."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.pidfd_open(os.getpid())
        try:
            self._popen = self._start(level, theirs.fileno(), owner)
        except OSError as error:
            self.control.close()
            raise SandboxFault(str(error)) from None
        finally:
            theirs.close()
            os.close(owner)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._wait_until_ready()
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, request: Request, descriptors: list[int]) -> None:
        """Fork a process for the request; descriptors: see `server.DESCRIPTORS`. Raises ServerGone."""
        try:
            socket.send_fds(self.control, [REQUEST.pack(*request)], descriptors)
        except OSError as error:
            raise ServerGone(str(error)) from None

    def close(self) -> None:
        """End the server and all its programs. Idempotent."""
        self.control.close()
        try:
            self._popen.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stderr:
            self._popen.stderr.close()

    def _start(self, level: LevelName, control: int, owner: int) -> "subprocess.Popen[bytes]":
        source, launch = str(_PACKAGE.parent), list[str]()
        if level == "namespaces":
            source, launch = _BOUND_SOURCE, _bubblewrap()
        python = os.path.realpath(sys.executable)
        launch += [python, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _CODE, source, str(control), str(owner)]
        return subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, "sh", *launch],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(control, owner),
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    def _wait_until_ready(self) -> None:
        self.control.settimeout(START_TIMEOUT_S)
        try:
            message = self.control.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise SandboxFault(f"it was not ready after {START_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise SandboxFault(f"it did not start: {error}") from None
        self.control.settimeout(None)
        if not message:
            assert self._popen.stderr
            lines = self._popen.stderr.read().decode(errors="replace").strip().splitlines()
            raise SandboxFault(lines[-1] if lines else f"it ended with exit status {self._popen.wait()}")
        if message != READY:
            raise SandboxFault(message.decode())


def _bubblewrap() -> list[str]:
    """bubblewrap's command line, to be followed by that of the fork server. Raises SandboxFault."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxFault("bubblewrap is not installed (its program is 'bwrap')")
    words = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--as-pid-1", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    words += ["--cap-drop", "ALL", "--chdir", "/"]
    for path in SYSTEM:
        is_link = os.path.islink(path) and not path.startswith("/etc")
        words += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind-try", path, path]
    library = standard_library()
    for path in (os.path.realpath(sys.executable), os.path.join(sys.base_prefix, "lib"), library):
        words += ["--ro-bind", path, path]
    for name in PACKAGES:
        if os.path.isdir(os.path.join(library, name)):
            words += ["--tmpfs", os.path.join(library, name)]
    for device in (*DEVICES_READ, *DEVICES_WRITTEN):
        words += ["--dev-bind-try", device, device]
    for name in ("__init__.py", "sandbox"):
        words += ["--ro-bind", str(_PACKAGE / name), f"{_BOUND_SOURCE}/distflow/{name}"]
    return [*words, "--remount-ro", "/", "--"]
