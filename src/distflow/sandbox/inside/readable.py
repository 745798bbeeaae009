"""The files that Python itself needs, and no others: what a program may read."""

import glob
import os
import sys
import sysconfig

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
