"""`distflow why RUN --sample UID`: what it prints of a sample."""

import json
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.observe.writing.run_folder import RunFolder
from tests.commands.test_why import HOSTILE, write_run

SHOWN = "\\x1b]0;owned\\x07\\u202egnp"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_sample_with_its_group(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    lines = printed(capsys, "why", run_dir, "--sample", "2-1")
    assert lines[0] == f"sample 2-1 of {run_dir}: step 2, train"
    assert lines[1] == "group     row 2 of epoch 0, 2 attempts, trained"
    assert any(line.startswith("score     0.5 {'math': 1.0, ") for line in lines)
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    assert "group has 2 samples: scores 0.0, 0.5" in lines
    assert lines[lines.index("response") + 1] == f"  {SHOWN}"
    shown = json.loads("\n".join(printed(capsys, "why", run_dir, "--sample", "2-1", "--json")))
    assert (shown["step"], shown["split"], shown["group"]["attempts"]) == (2, "train", 2)
    assert shown["sample"]["response"] == HOSTILE


def test_an_episode_is_told_turn_by_turn(tmp_path, capsys):
    turns = [
        {"owner": "prompt", "text": "3 + 4?"},
        {"owner": "policy", "text": HOSTILE},
        {"owner": "environment", "text": "so?", "fork": "1.2"},
        7,
    ]
    with RunFolder(tmp_path, 0) as run:
        run.samples(1, [{"uid": "3-0", "response": "x", "conversation": turns}])
    lines = printed(capsys, "why", tmp_path, "--sample", "3-0")
    assert lines[lines.index("policy  (drawn)") + 1] == f"  {SHOWN}"
    assert lines[lines.index("environment 1.2 (given)") + 1] == "  so?"


def test_a_dropped_sample_one_of_a_run_without_a_ledger_and_none(tmp_path, capsys):
    run_dir = tmp_path / "run"
    with RunFolder(run_dir, 0) as run:
        run.samples(1, [{"uid": "3-0", "response": "x", "score": 1.0, "reward": 0.75}])
        run.samples(2, [{"uid": "4-0", "response": "x", "errors": ["odd"]}], split="dropped")

    lines = printed(capsys, "why", run_dir, "--sample", "3-0")
    assert lines[0].endswith("step 1, train")
    assert "score     1.0 , net reward 0.75, advantage None" in lines
    lines = printed(capsys, "why", run_dir, "--sample", "4-0")
    assert lines[0].endswith("step 2, dropped") and "errors    ['odd']" in lines
    assert main(["why", str(run_dir), "--sample", "5-0"]) == 2
    assert "has no sample 5-0" in capsys.readouterr().err
    assert main(["why", str(run_dir), "2", "--sample", "3-0"]) == 2
    assert "has no sample 3-0 in step 2" in capsys.readouterr().err, "not that of another step"
