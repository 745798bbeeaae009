"""Memory that was freed costs no page fault when it is wanted again."""

import platform
import subprocess
import sys

import pytest

TWICE = """
import resource
import sys

from distflow.launch.hardware import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * 2**20 for _ in range(256)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="wants glibc")
def test_what_is_wanted_again_costs_no_page_faults() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", TWICE, how], capture_output=True, check=True).stdout)
        for how in ("kept", "as it is")
    }
    assert faults["kept"] < 1000 < 50_000 < faults["as it is"], faults
