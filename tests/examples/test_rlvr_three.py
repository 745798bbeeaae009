"""Three domains with their verifiers live, and recorded solutions through everything behind the
rollout."""

from collections import Counter
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.data.batch import Batch
from distflow.observe.run_reader import read_events, read_metrics, read_samples
from tests.e2e import three_domains
from tests.ledger_audit import verify
from tests.user_code import forgotten

FILES = {
    "math": "gsm8k_test.jsonl",
    "code": "examples/mbpp.py:rows",
    "instructions": "ifeval.jsonl",
}
PARTS = {"math": "math", "code": "code", "instructions": "ifeval_share"}
STEPS = 3


SPOILED = '[row["code"], row["code"].replace("return ", "return 1, ")]'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    three_domains.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with forgotten("examples"):
        yield tmp_path


@pytest.mark.slow
def test_recorded_solutions_are_right_and_every_second_that_is_spoiled_is_not(folder):
    reader = folder / "examples" / "mbpp.py"
    reader.write_text(
        reader.read_text().replace('"recorded": row["code"]', f'"recorded": {SPOILED}')
    )
    held_out = [f"data.domains.{name}.val_files={file}" for name, file in FILES.items()]
    keys = [
        "trainer.save_groups=all",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=true",
    ]
    keys += ["trust.check_freq=1", *held_out]
    assert (
        main(
            [
                "train",
                "examples/recorded_responses.yaml",
                *three_domains.small(folder / "run", *keys),
            ]
        )
        == 0
    )
    validated, *trained = read_metrics(folder / "run")
    assert {validated.values[f"val_correct/{name}/mean"] for name in ("all", *FILES)} == {1.0}
    assert validated.values["val/errors"] == 0
    assert len(trained) == STEPS

    for record in trained:
        assert {record.values[f"reward/{name}/{part}"] for name, part in PARTS.items()} == {0.5}
        assert record.values["reward/errors"] == 0

    check_samples(folder / "run")
    assert three_domains.shares(folder / "run") == [Counter(math=2, code=1, instructions=1)] * STEPS
    verify(folder / "run" / "ledger.jsonl")
    page = (folder / "run" / "report.html").read_text()
    assert all(f"val_correct/{name}/mean" in page or f"reward/{name}" in page for name in FILES)
    told = [
        event.message for event in read_events(folder / "run") if event.kind in ("warning", "error")
    ]
    assert all("validation prompts are trained on" in message for message in told), (
        "which the small files see to"
    )


def check_samples(run_dir: Path) -> None:
    """Right, wrong, right, wrong; of 1, 0, 1, 0 the mean is 1/2 and the unbiased deviation
    1/sqrt(3), which leaves +-0.866 (of instructions: over the batch, whose only group it is)."""
    for step in range(1, STEPS + 1):
        batch = Batch.load(run_dir / "tokens" / f"{step:06d}.safetensors")
        assert batch["acc"].tolist() == [1.0, 0.0] * 8
        first = batch["advantages"][:, 0].tolist()
        assert first == pytest.approx([3**0.5 / 2, -(3**0.5) / 2] * 8, abs=1e-4)

        for row in read_samples(run_dir, step):
            assert row["errors"] is None
            if row["domain"] == "code":
                assert bool(row["extra"]["code/failed"]) == (row["acc"] == 0), (
                    "which case failed is kept beside it"
                )


def test_it_is_a_config_as_it_stands(folder, capsys):
    assert main(["config", "examples/rlvr_three.yaml", "--graph"]) == 0
    assert "reward_norm" in capsys.readouterr().out
