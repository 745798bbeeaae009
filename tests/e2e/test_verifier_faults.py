"""Verifiers that hang, crash, exit, or run out of memory inside a run: masked, counted, and the run goes on."""

import json
from pathlib import Path

import pytest

from distflow import cli
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import Playground

# One in four answers meets the fault, by their text: the same whatever the timing.
FAULTY = """
import os, signal, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(map(ord, solution_str))
    if number % 4 == 0:
        {fault}
    return number % 7 / 6
"""
FAULTS = {
    "hang": ("import re; re.match(r'(a+)+$', 'a' * 60 + 'b')", "timeouts"),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "errors"),
    "exit 0": ("os._exit(0)", "errors"),
    "memory": ("hoard = bytearray(2**40)", "errors"),
    "raise": ("raise KeyError('now and then')", "errors"),
    "NaN": ("return float('nan')", "errors"),
    "garbage": ("return 'very good'", "errors"),
}


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    return Playground(tmp_path, num_rows=8)


def train(ground: Playground, *overrides: str, preset: str = "grpo") -> int:
    cheap = ("trust.certify_rewards=false", "trainer.total_epochs=1", "reward.timeout_s=0.3", "reward.num_workers=2")
    return cli.main(["train", preset, *ground.overrides("run", *cheap, *overrides)])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_verdict(ground: Playground, fault: str) -> None:
    code, counted = FAULTS[fault]
    ground.write_reward(FAULTY.format(fault=code))
    assert train(ground) == 0
    records = [record for record in read_metrics(ground.folder / "run") if record.kind == "train"]
    assert [record.step for record in records] == [1, 2]
    samples = [row for record in records for row in read_samples(ground.folder / "run", record.step)]
    hit = [row for row in samples if sum(map(ord, row["response"])) % 4 == 0]
    assert 0 < len(hit) < len(samples)
    for row in samples:
        assert (row["errors"] is not None) == (row in hit)
        if row in hit:  # no verdict: nothing is learned from it, and its group's mean does not know it
            assert row["advantage"] == 0.0 and row["reward_parts"] == {}
        else:
            assert row["score"] == pytest.approx(sum(map(ord, row["response"])) % 7 / 6)
    assert sum(record.values[f"reward/{counted}"] for record in records) >= len(hit)
    assert sum(record.values[f"reward/{counted}/custom"] for record in records) >= len(hit)
    scored = [row["score"] for row in samples if row["errors"] is None]
    assert min(record.values["reward/min"] for record in records) == pytest.approx(min(scored))


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_a_reward_that_always_fails_ends_the_run_with_its_own_words(
    ground: Playground, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where groups of one sample are trained masked and nothing would be dropped."""
    ground.write_reward(FAULTY.format(fault="pass").replace("number % 7 / 6", "solution_str.no_such_method()"))
    size = "actor_rollout_ref.rollout.n=1" if preset == "ppo" else "actor_rollout_ref.rollout.n=4"
    assert train(ground, size, "trainer.total_epochs=4", preset=preset) == 2
    err = capsys.readouterr().err
    assert "custom: AttributeError: 'str' object has no attribute 'no_such_method' (at reward.py:" in err
    assert "custom_reward_function.path" in err and "Traceback" not in err
    events = [json.loads(line) for line in (ground.folder / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events][-2:] == ["error", "end"] and events[-1]["status"] == "failed"
