"""What holds the programs that a run's verifiers run is recorded, and a resume at another level is
told."""

import pytest

from distflow.observe.crash_safe_files import read_object
from distflow.observe.report.build import report_data
from distflow.observe.run_reader import read_samples
from distflow.sandbox import local_sandbox
from tests.e2e.runs import Playground

SAVED = (
    "reward.functions={default: [code, {name: custom, weight: 0.1}]}",
    "trainer.save_freq=1",
    "trust.check_rewards=false",
)


@pytest.mark.slow
def test_the_level_is_in_the_runs_folder_and_a_resume_at_another_is_told(tmp_path, monkeypatch):
    ground = Playground(tmp_path)
    rows = [{"prompt": f"{i}=", "answer": {"inputs": ["1"], "outputs": [str(i)]}} for i in range(8)]
    ground.write_rows(rows)
    run = ground.run("grpo", *SAVED, "trainer.total_training_steps=1")
    found = local_sandbox.probe().name
    assert read_object(run.folder / "run.json")["sandbox"] == found
    assert ["sandbox", found] in report_data(run.folder)["head"]
    assert {row["extra"]["code/sandbox"] for row in read_samples(run.folder, 1)} == {found}
    (*_, weakest) = local_sandbox.LEVELS
    if found == weakest:
        pytest.skip("wants more than one level of the sandbox (Debian: apt-get install bubblewrap)")
    monkeypatch.setattr(local_sandbox, "LEVELS", (weakest,))
    steps = ("trainer.total_training_steps=2",)
    run = ground.run("grpo", *SAVED, *steps)
    assert any(
        f"sandbox was {found} in the checkpoint and is {weakest} now" in note
        for note in run.notes("warning")
    )
    assert read_object(run.folder / "run.json")["sandbox"] == weakest
