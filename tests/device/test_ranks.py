"""Two ranks on devices of the rehearsal, over a backend that copies through the host: sharded
weights and gradients and layers divided over ranks, leave what one process leaves on a CPU."""

import pytest

from distflow import cli
from tests.device.rehearsal import on_device
from tests.device.test_runs import ALIKE, ROLLOUT, STEPS, close, exported, run_on, same_metrics
from tests.e2e.runs import Playground, Run
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = [pytest.mark.slow, pytest.mark.alone]
FSDP = "actor_rollout_ref.actor.strategy=fsdp"
LAYOUTS = {
    "tensor parallel": ("trainer.allocation='embedded:d2|fsdp:d1t2'", FSDP),
    "data parallel": (),
    "fsdp": (FSDP,),
    "fsdp offloaded": (FSDP, "actor_rollout_ref.actor.fsdp_config.offload_policy=true"),
}


@pytest.mark.parametrize("name", one_fast_in(4, LAYOUTS, others=BY_HAND))
@on_device
def test_two_ranks_leave_what_one_process_does(tmp_path, name, monkeypatch):
    monkeypatch.setenv("REHEARSAL_DEVICES", "2")
    ground = Playground(tmp_path, num_rows=8)
    keys = (
        *LAYOUTS[name],
        "trainer.n_gpus_per_node=2",
        "trainer.device=rehearsal",
        "trust.check_freq=1",
    )
    assert (
        cli.main(
            [
                "train",
                "grpo",
                *ground.overrides("two", STEPS, *ALIKE, f"{ROLLOUT}.name=embedded", *keys),
            ]
        )
        == 0
    )
    one = run_on("cpu", ground, "grpo", "trust.check_freq=0")
    two = Run(tmp_path / "two", one.config, one.outcome)
    assert not two.notes("warning"), two.notes("warning")
    same_metrics(one, two)
    close(exported(one), exported(two))
