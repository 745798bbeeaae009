"""`distflow diff`: what it prints of runs, and how well noise is told from a difference."""

import json
import random
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.observe.writing.run_folder import RunFolder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def compared_run(folder: Path, seed: int, reward: float = 0.0, response: str = "same") -> Path:
    draw = random.Random(seed)
    with RunFolder(folder, 0) as run:
        facts = {"torch": "2", "device": "cpu", "data_fingerprint": str(seed)}
        run.write_json("run.json", facts)
        run.write_text("config.yaml", f"data: {{seed: {seed}}}\ntrainer: {{x: [1, 2]}}\n")

        for step in range(1, 61):
            values = {
                "reward/mean_score": 0.5 + reward + 0.02 * draw.gauss(0, 1),
                "actor/entropy": draw.random(),
            }
            run.metrics(step, "train", values | ({"only": 1.0} if seed else {}))

        run.samples(1, [{"uid": "0-0", "response": "same"}, {"uid": "0-1", "response": response}])

    return folder


def test_the_config_the_first_difference_and_what_noise_explains(tmp_path, capsys):
    a = compared_run(tmp_path / "a", 0)
    b = compared_run(tmp_path / "b", 1, reward=0.2, response="samx")
    lines = printed(capsys, "diff", a, b)
    assert "config, different: 1 key" in lines
    assert "  data.seed: 0 -> 1" in lines
    assert "same: torch, device" in lines and "different: data_fingerprint" in lines
    assert "first difference: step 1: the responses of sample 0-1 differ from character 3" in lines
    (reward,) = (line for line in lines if line.startswith("reward/mean_score"))
    (entropy,) = (line for line in lines if line.startswith("actor/entropy"))
    assert reward.endswith("yes, in this pair") and entropy.endswith("  no")
    found = json.loads("\n".join(printed(capsys, "diff", a, b, "--json")))
    assert [each["metric"] for each in found["metrics"]] == ["actor/entropy", "reward/mean_score"]
    assert found["metrics"][1]["low"] < 0.2 < found["metrics"][1]["high"]


def test_a_folder_that_is_no_run_is_not_compared(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    assert main(["diff", str(compared_run(tmp_path / "a", 0)), str(tmp_path / "other")]) == 2
    assert (
        "other is not a run's folder: it has no file events.jsonl; if a run is starting"
        in capsys.readouterr().err
    )


def test_a_run_equals_itself(tmp_path, capsys):
    a = compared_run(tmp_path / "a", 0)
    lines = printed(capsys, "diff", a, a)
    assert "config, different: 0 keys" in lines
    assert "first difference: none in the samples that both have" in lines
    assert not any(line.endswith("yes, in this pair") for line in lines)
