"""Peak memory by phase: a phase has its own, and nothing of another's."""

from distflow.runtime.memory_peaks import MemoryPeaks
from tests.e2e.runs import Playground

MIB = 2**20


def hold(num_bytes: int) -> None:
    """Resident for a moment: every page is written."""
    block = bytearray(num_bytes)
    block[::4096] = b"x" * len(block[::4096])


def test_a_phase_has_its_own_peak_and_the_process_that_of_all():
    peaks = MemoryPeaks()
    peaks.charge("other")
    hold(300 * MIB)
    peaks.charge("rollout")
    hold(100 * MIB)
    peaks.charge("save")
    hold(200 * MIB)
    peaks.charge("save")
    found = peaks.finish_step()
    base = found["memory/process/other"]
    assert 290 * MIB < found["memory/process/rollout"] - base < 340 * MIB
    assert 190 * MIB < found["memory/process/save"] - base < 240 * MIB
    assert found["memory/process/peak"] >= found["memory/process/rollout"]
    peaks.charge("rollout")
    again = peaks.finish_step()
    assert set(again) == {"memory/process/rollout", "memory/process/peak"}
    assert again["memory/process/rollout"] < found["memory/process/rollout"] - 200 * MIB
    assert again["memory/process/peak"] == found["memory/process/peak"]


def test_a_run_records_the_phases_of_each_step(tmp_path):
    run = Playground(tmp_path, num_rows=8).run(
        "grpo", "trust.check_rewards=false", "trainer.total_epochs=1"
    )
    for metrics in run.metrics():
        phases = {
            name.removeprefix("timing_s/") for name in metrics if name.startswith("timing_s/")
        } - {"step"}
        measured = {
            name.removeprefix("memory/process/")
            for name in metrics
            if name.startswith("memory/process/")
        }
        assert (
            measured == phases | {"peak"} and {"rollout", "train_step", "update_weights"} <= phases
        )
        assert all(
            0 < metrics[f"memory/process/{phase}"] <= metrics["memory/process/peak"]
            for phase in phases
        )
