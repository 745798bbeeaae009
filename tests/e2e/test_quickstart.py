"""The quickstart: what the package carries for it, and its three commands with a few steps each."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.data.sources import BUILTIN_FOLDER
from distflow.launch.data_sources import train_sources, validation_sources
from distflow.models.loading import load_tokenizer

ROOT = Path(__file__).parents[2]


def carries(problem: str) -> bool:
    first, second = problem.removesuffix("=").split("+")
    return int(first[-1]) + int(second[-1]) > 9


def test_the_script_writes_the_data_that_are_committed(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "make_quickstart", ROOT / "scripts" / "make_quickstart.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_data(tmp_path)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (BUILTIN_FOLDER / made.name).read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("preset", ["quickstart_sft", "quickstart_grpo"])
def test_no_row_of_the_presets_is_too_long(preset, tmp_path):
    config = load_config(preset).config
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")

    judged = preset == "quickstart_grpo"
    for source in (*train_sources(config, judged), *validation_sources(config, judged)):
        prompts = source.encode(source.read(tmp_path), tokenizer)
        assert len(prompts.report.lines()) == 1
        assert len(prompts) > 5 * config.data.train_batch_size


@pytest.mark.slow
def test_the_three_commands_end_with_accuracy_before_and_after(tmp_path):
    distflow(tmp_path, "sft", "quickstart_sft", "trainer.total_training_steps=4")
    distflow(tmp_path, "export", "runs/quickstart/sft", "--to", "runs/quickstart/model")
    lines = distflow(
        tmp_path,
        "train",
        "quickstart_grpo",
        "trainer.total_training_steps=2",
        "data.val_max_samples=40",
    )
    before, after, report = lines[-3:]
    assert re.fullmatch(r"accuracy before RL: [01]\.\d\d", before)
    assert re.fullmatch(r"accuracy after RL: [01]\.\d\d", after)
    page = (tmp_path / report.removeprefix("report: ")).read_text()
    assert "finished" in page and "no end yet" not in page


def distflow(folder: Path, *arguments: str) -> list[str]:
    """What the command printed, by lines; it must succeed."""
    command = [sys.executable, "-m", "distflow", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()
