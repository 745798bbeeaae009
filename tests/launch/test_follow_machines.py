"""Workers that ask for GPUs which are not there are refused; a single one computes on the CPU."""

import pytest
import torch

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.devices import follow_machines

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="wants a machine without a GPU"
)
SEVERAL = ["trainer.n_gpus_per_node=8", "trainer.allocation='embedded:d2|fsdp:d2'"]


@pytest.mark.parametrize("asked", SEVERAL)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_are_not_there_are_not_replaced_by_processes(asked, device):
    loaded = load_config("grpo", [asked, f"trainer.device={device}"], complete=False)
    with pytest.raises(UserError, match=r"GPU\(s\) on 1 machine\(s\); torch .*trainer\.device=cpu"):
        follow_machines(loaded)


@pytest.mark.parametrize("asked", SEVERAL)
def test_processes_on_the_cpu_are_asked_for(asked):
    assert follow_machines(load_config("grpo", [asked, "trainer.device=cpu"], complete=False))
    assert follow_machines(load_config("grpo", complete=False)).config.trainer.device == "auto", (
        "one process"
    )
