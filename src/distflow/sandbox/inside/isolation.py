"""The files that Python itself needs, and no others: what a program may read.

What a process does to itself, for good, before it runs a program that nobody trusts.
"""

import ctypes
import glob
import os
import platform
import resource
import signal
import sys
import sysconfig
from typing import NamedTuple

from distflow.sandbox.inside import landlock, seccomp
from distflow.sandbox.inside.libc import ARCHITECTURES, CAPSET, prctl, syscall

DEVICES_READ = ("/dev/zero", "/dev/random", "/dev/urandom")
DEVICES_WRITTEN = ("/dev/null",)
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
PACKAGES = ("site-packages", "dist-packages")
"""Below the standard library, and no part of it."""


def standard_library() -> str:
    return sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})


def shared_libraries() -> list[str]:
    """Those that came with this Python, such as libpython."""
    return glob.glob(os.path.join(glob.escape(sys.base_prefix), "lib", "*.so*"))


def readable_paths() -> list[str]:
    library = standard_library()
    entries = [os.path.join(library, name) for name in os.listdir(library) if name not in PACKAGES]
    return [*entries, *shared_libraries(), *SYSTEM, *DEVICES_READ]


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = int(signal.SIGKILL)
_CAPABILITY_VERSION = 0x20080522
_ALWAYS = (
    (resource.RLIMIT_STACK, 64 * 2**20),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
)
_LIMITS = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)


class Walls(NamedTuple):
    """Made once, stood behind by every program: the filter of system calls, and the descriptor of the files' rules."""

    machine: str
    filter_: bytes
    ruleset: int


def make_walls() -> Walls:
    """And give up what privileges this process has. Raises OSError where this kernel cannot."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"no filter of system calls for {machine}: there is one for {', '.join(ARCHITECTURES)}")
    give_up_privileges(machine)
    ruleset = landlock.make_ruleset(readable_paths(), DEVICES_WRITTEN)
    return Walls(machine, seccomp.make_filter(machine), ruleset)


def die_with(parent: int) -> None:
    """Be killed when the process that forked this one ends."""
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def give_up_privileges(machine: str) -> None:
    """None of those there are, and no new ones, for this process and its children. Raises OSError."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    syscall(CAPSET[machine], ctypes.addressof(header), ctypes.addressof(none))
    for limit, value in _ALWAYS:
        resource.setrlimit(limit, (value, value))


def restrict_files(walls: Walls) -> None:
    """None but Python's own. Raises OSError."""
    landlock.restrict_self(walls.ruleset)


def restrict_use(cpu_s: int, memory_bytes: int, open_files: int) -> None:
    """Limits of the kernel, which nobody can raise again. Raises OSError."""
    # Not readable for others of the same user, and never dumped, whatever the machine does with cores.
    prctl(_PR_SET_DUMPABLE, 0)
    # Soft and hard at once: of the processor's time the first signal is the one that cannot be caught.
    for limit, value in zip(_LIMITS, (cpu_s, memory_bytes, open_files, 0), strict=True):
        resource.setrlimit(limit, (value, value))


def restrict_calls(walls: Walls) -> None:
    """No system calls but those that are listed. Raises OSError."""
    seccomp.install(walls.filter_, walls.machine)
