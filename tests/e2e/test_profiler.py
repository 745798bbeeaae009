"""Runs that record the kernels of some steps."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from tests.e2e.runs import Playground


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return Playground(tmp_path_factory.mktemp("profiled"))


def names(file: Path) -> set[str]:
    return {
        event["name"]
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        if "name" in event
    }


def test_chosen_steps_are_recorded_and_the_run_is_the_same(ground):
    keys = ("trainer.total_training_steps=3", "trainer.save_freq=3")
    plain = ground.run("grpo", *keys, name="plain")
    run = ground.run(
        "grpo", *keys, "profiler.enable=true", "profiler.steps=[1,3,7]", name="profiled"
    )
    files = sorted((run.folder / "profiles").iterdir())
    assert [file.name for file in files] == ["step-000001.json.gz", "step-000003.json.gz"]
    assert all({"aten::mm", "Optimizer.step#AdamW.step"} <= names(file) for file in files)
    assert [note for note in run.notes("info") if "the kernels of step 3 are in " in note]
    assert all(torch.equal(value, run.weights(3)[name]) for name, value in plain.weights(3).items())
    assert not (plain.folder / "profiles").exists()
    assert all(step["timing_s/profile"] > 0 for step in run.metrics()), (
        "the second has the end of the first's record"
    )
    assert not any("timing_s/profile" in step for step in plain.metrics())


@pytest.mark.slow
def test_each_worker_records_its_own(ground):
    keys = ("trainer.total_training_steps=2", "trainer.n_gpus_per_node=2", "profiler.enable=true")
    assert main(["train", "grpo", *ground.overrides("two", *keys)]) == 0
    files = sorted(file.name for file in (ground.folder / "two" / "profiles").iterdir())
    assert files == ["step-000002-1.json.gz", "step-000002.json.gz"]
