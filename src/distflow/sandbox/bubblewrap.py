"""Namespaces of users, processes, the network, mounts and the rest, by bubblewrap (`bwrap`).

The fork server itself is process 1 in there, and there is no /proc: bubblewrap's own process 1 would show what it was
started with. Programs are not process 1, which limits of the kernel cannot kill.
"""

import os
import shutil
import sys
from pathlib import Path

from distflow.sandbox.errors import SandboxFault
from distflow.sandbox.inside.readable import (
    DEVICES_READ,
    DEVICES_WRITTEN,
    PACKAGES,
    SYSTEM,
    standard_library,
)

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
