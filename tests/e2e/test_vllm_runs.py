"""Whole runs of adapters through a real vLLM server that is killed before, in and after weight
updates."""

import asyncio
import os
import signal
from typing import Any

import pytest

from distflow.rollout.servers.vllm_engine import VllmEngine
from tests.e2e.runs import Playground
from tests.ledger_audit import verify
from tests.rollout.servers import test_vllm

pytestmark = test_vllm.pytestmark

NUM_STEPS = 5
BATCH_SIZE = 4
KILLS = {"halt_for_update": 1, "take": 2, "go_on": 3}
"""The version that the server has when it is killed in that call: before, in and after an
update."""


def kill_in(monkeypatch: pytest.MonkeyPatch, name: str, struck: list[str]) -> None:
    """Kill the server once while it handles this call."""
    call = getattr(VllmEngine, name)

    async def under_fire(engine: VllmEngine, *args: Any) -> Any:
        if name in struck or engine.version.step != KILLS[name]:
            return await call(engine, *args)

        struck.append(name)
        under_way = asyncio.create_task(call(engine, *args))
        await asyncio.sleep(0)
        assert engine._process is not None
        os.killpg(engine._process.pid, signal.SIGKILL)

        return await under_way

    monkeypatch.setattr(VllmEngine, name, under_fire)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("staleness", "kv_on_update"),
    [(0, "recompute"), (1, "recompute"), (1, "keep"), (2, "recompute"), (2, "keep")],
)
def test_kills_around_updates_cost_no_group(tmp_path, monkeypatch, staleness, kv_on_update):
    struck = list[str]()
    for name in KILLS:
        kill_in(monkeypatch, name, struck)
    ground = Playground(tmp_path, num_rows=NUM_STEPS * BATCH_SIZE, head_dim=32)
    in_flight = [f"actor_rollout_ref.rollout.kv_on_update={kv_on_update}"] if staleness else []
    run = ground.run(
        "grpo",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.python={test_vllm.PYTHON}",
        f"async.max_staleness={staleness}",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"data.train_batch_size={BATCH_SIZE}",
        "trust.canary_freq=1",
        "trust.check_freq=2",
        *in_flight,
    )
    assert sorted(struck) == sorted(KILLS) and len(run.metrics()) == NUM_STEPS
    counts = verify(run.folder / "ledger.jsonl")
    assert (counts.consumed, counts.running, dict(counts.dropped)) == (
        NUM_STEPS * BATCH_SIZE,
        0,
        {},
    )
    assert not run.notes("warning") and not run.notes("finding") and not run.notes("error")
    assert all(step["passed"] and not step["not_checked"] for step in run.checks()) and run.checks()
    same = [
        row["mismatch/same_version/max_abs"]
        for row in run.metrics()
        if "mismatch/same_version/max_abs" in row
    ]
    assert same and max(same) < 1e-4
    assert all(row["async/version_diff/max"] <= staleness for row in run.metrics() if staleness)
