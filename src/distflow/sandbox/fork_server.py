"""Namespaces of users, processes, the network, mounts and the rest, by bubblewrap (`bwrap`).

The fork server itself is process 1 in there, and there is no /proc: bubblewrap's own process 1 would show what it was
started with. Programs are not process 1, which limits of the kernel cannot kill.

The fork server's process, seen from its owner: started with nothing of the owner's, and ended with it.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import distflow
from distflow.sandbox.inside.isolation import DEVICES_READ, DEVICES_WRITTEN, PACKAGES, SYSTEM, standard_library
from distflow.sandbox.inside.program import REQUEST, Request
from distflow.sandbox.inside.server import MAX_MESSAGE_BYTES
from distflow.sandbox.limits import SandboxFault

SOURCE = "/distflow-source"
"""Where the modules of `inside` are, in there."""


def command(package: Path) -> list[str]:
    """What stands before the fork server's own command. package: the folder of distflow. Raises SandboxFault."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxFault("bubblewrap is not installed (its program is 'bwrap')")
    words = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--as-pid-1", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    words += ["--cap-drop", "ALL", "--chdir", "/"]
    for path in SYSTEM:
        words += _link_or_bind(path)
    library = standard_library()
    for path in (os.path.realpath(sys.executable), os.path.join(sys.base_prefix, "lib"), library):
        words += ["--ro-bind", path, path]
    for name in PACKAGES:
        if os.path.isdir(os.path.join(library, name)):
            words += ["--tmpfs", os.path.join(library, name)]
    for device in (*DEVICES_READ, *DEVICES_WRITTEN):
        words += ["--dev-bind-try", device, device]
    for name in ("__init__.py", "sandbox"):
        words += ["--ro-bind", str(package / name), f"{SOURCE}/distflow/{name}"]
    return [*words, "--remount-ro", "/", "--"]


def _link_or_bind(path: str) -> list[str]:
    if os.path.islink(path) and not path.startswith("/etc"):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind-try", path, path]


LevelName = Literal["namespaces", "floor"]
START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_PACKAGE = Path(distflow.__file__).parent
_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from distflow.sandbox.inside.server import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}
"""Sets have one order, so that a program always behaves the same; functions of libraries are looked up once, and not by
each program. Programs find no environment at all."""
# Where memory runs short, the kernel ends what runs here before anything else.
_SHELL = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'


class ServerGone(Exception):
    """It was killed, or it ended."""


class ForkServer:
    """One process, and in namespaces bubblewrap's beside it. Used by one thread at a time."""

    def __init__(self, level: LevelName) -> None:
        """Raises SandboxFault where it does not start."""
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
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, request: Request, descriptors: list[int]) -> None:
        """Fork a process for it; the descriptors are those of `server.DESCRIPTORS`. Raises ServerGone."""
        try:
            socket.send_fds(self.control, [REQUEST.pack(*request)], descriptors)
        except OSError as error:
            raise ServerGone(str(error)) from None

    def close(self) -> None:
        """End it, and all programs with it. Idempotent."""
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
            source, launch = SOURCE, command(_PACKAGE)
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
        told = json.loads(message) if message else {"failed": self._last_words()}
        if "failed" in told:
            raise SandboxFault(told["failed"])

    def _last_words(self) -> str:
        assert self._popen.stderr
        said = self._popen.stderr.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else f"it ended with exit status {self._popen.wait()}"
