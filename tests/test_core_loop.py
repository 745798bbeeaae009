"""docs/core_loop.md: its script and the command below it give the same samples and weights."""

import asyncio
import runpy
import shlex
from pathlib import Path

import torch
from safetensors.torch import load_file

import distflow
from distflow.cli import main
from tests.test_docs import ROOT, blocks, save_if_file

RUN = Path("runs/my_project/core_loop")


def test_the_script_equals_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, _, command = blocks(ROOT / "docs" / "core_loop.md")
    save_if_file(script, tmp_path)
    model, batches = asyncio.run(runpy.run_path("core_loop.py")["train"]())
    assert main(shlex.split(command.code)[1:]) == 0
    run = distflow.load_run(RUN)

    for step, batch in enumerate(batches, start=1):
        rows = run.samples(step=step, split="train")
        assert [row["response"] for row in rows] == batch["responses"]
        assert [row["score"] for row in rows] == batch["scores"].tolist()

    trained = load_file(Path(run.export(tmp_path / "trained")) / "model.safetensors")
    weights = dict(model.named_parameters())
    assert trained.keys() == weights.keys() - {"lm_head.weight"}
    for name, weight in trained.items():
        assert torch.equal(weight, weights[name]), name
