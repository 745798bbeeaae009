"""The dtype follows the device; memory that was freed costs no page fault when it is wanted
again."""

import platform
import subprocess
import sys

import pytest

from distflow.config import load_config
from distflow.launch.devices import follow_device

DTYPE = "actor_rollout_ref.model.dtype"


@pytest.mark.parametrize("preset", ["grpo", "ppo", "sft", "rm", "async_grpo"])
def test_the_dtype_is_that_of_the_device_unless_it_is_chosen(preset):
    """A Slurm job has GPUs, whatever this machine has."""
    for keys, dtype in (
        (("trainer.device=cpu",), "float32"),
        (("trainer.launcher=slurm",), "bfloat16"),
        (("trainer.launcher=slurm", "trainer.device=cpu"), "float32"),
    ):
        found = follow_device(load_config(preset, keys, complete=False))
        assert found.config.actor_rollout_ref.model.dtype == dtype
        assert f"{DTYPE}='{dtype}' instead of 'auto': the run is on a " in str(found.fitted[-1])
        chosen = load_config(preset, [*keys, f"{DTYPE}=bfloat16"], complete=False)
        assert follow_device(chosen) is chosen


TWICE = """
import resource
import sys

from distflow.launch.threads import keep_freed_memory

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
def test_what_is_wanted_again_costs_no_page_faults():
    faults = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", TWICE, how], capture_output=True, check=True
            ).stdout
        )
        for how in ("kept", "as it is")
    }
    assert faults["kept"] < 1000 < 50_000 < faults["as it is"], faults
