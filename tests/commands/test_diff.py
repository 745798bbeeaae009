"""`distflow diff`: what it prints of runs, and how well noise is told from a difference."""

import json
import random
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from distflow.data.batch import Batch
from distflow.observe.writing.run_folder import RunFolder
from distflow.runtime.run_recorder import keep_groups


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def compared_run(folder: Path, seed: int, reward: float = 0.0, response: str = "same") -> Path:
    draw = random.Random(seed)
    with RunFolder(folder, 0) as run:
        changed = [{"key": "data.seed", "where": "command line"}] if seed else []
        run.write_json(
            "run.json",
            {"torch": "2", "device": "cpu", "data_fingerprint": str(seed), "changed": changed},
        )
        run.write_text("config.yaml", f"data: {{seed: {seed}}}\ntrainer: {{x: [1, 2]}}\n")
        for step in range(1, 61):
            values = {
                "reward/mean_score": 0.5 + reward + 0.02 * draw.gauss(0, 1),
                "actor/entropy": draw.random(),
            }
            run.metrics(step, "train", values | ({"only": 1.0} if seed else {}))
        run.samples(1, [{"uid": "0-0", "response": "same"}, {"uid": "0-1", "response": response}])
    return folder


def test_the_config_the_first_difference_and_what_noise_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = compared_run(tmp_path / "a", 0)
    b = compared_run(tmp_path / "b", 1, reward=0.2, response="samx")
    lines = printed(capsys, "diff", a, b)
    assert "config, different: 1 key" in lines
    assert "  data.seed: 0 (preset or default) -> 1 (command line)" in lines
    assert "same: torch, device" in lines and "different: data_fingerprint" in lines
    assert "first difference: step 1: the responses of sample 0-1 differ from character 3" in lines
    (reward,) = (line for line in lines if line.startswith("reward/mean_score"))
    (entropy,) = (line for line in lines if line.startswith("actor/entropy"))
    assert reward.endswith("yes, in this pair") and entropy.endswith("  no")
    found = json.loads("\n".join(printed(capsys, "diff", a, b, "--json")))
    assert [each["metric"] for each in found["metrics"]] == ["actor/entropy", "reward/mean_score"]
    assert found["metrics"][1]["low"] < 0.2 < found["metrics"][1]["high"]


def test_a_folder_that_is_no_run_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    assert main(["diff", str(compared_run(tmp_path / "a", 0)), str(tmp_path / "other")]) == 2
    assert (
        "other is not a run's folder: it has no file events.jsonl; if a run is starting"
        in capsys.readouterr().err
    )


def test_the_first_group_and_token_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = compared_run(tmp_path / "a", 0)
    b = compared_run(tmp_path / "b", 0)
    compared_samples = {a: "yes", b: "yet"}
    for token, (run_dir, text) in enumerate(compared_samples.items()):
        with RunFolder(run_dir, 0) as run:
            run.samples(2, [{"uid": "0-0", "response": text}])
        batch = Batch(torch.tensor([1]), torch.tensor([2]))
        batch["uid"] = ["0-0"]
        batch["group_index"] = torch.tensor([0])
        batch["response_ids"] = torch.tensor([[5, token]])
        batch["rollout_log_probs"] = torch.tensor([[-1.0, -2.0]])
        keep_groups(run_dir, 2, batch)
    text = (
        "step 2: the responses of sample 0-0 differ from character 2: token 1 is 0 (log-prob -2.0) "
        "in A, 1 (-2.0) in B"
    )
    assert f"first difference: {text}" in printed(capsys, "diff", a, b)
    for run_dir, row in ((a, 7), (b, 9)):
        issued = {
            "t": 1,
            "restart": 0,
            "kind": "issued",
            "group_id": 0,
            "epoch": 0,
            "row": row,
            "version": 0,
        }
        (run_dir / "ledger.jsonl").write_text(json.dumps(issued) + "\n")
    assert "first difference: group 0 holds row 7 in A, 9 in B" in printed(capsys, "diff", a, b)


def test_a_run_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = compared_run(tmp_path / "a", 0)
    lines = printed(capsys, "diff", a, a)
    assert "config, different: 0 keys" in lines
    assert "first difference: none in the groups and responses that both have" in lines
    assert not any(line.endswith("yes, in this pair") for line in lines)
