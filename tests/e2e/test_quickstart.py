"""The quickstart: what the package carries for it, and its three commands with a few steps each."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distflow.config import load_config
from distflow.data.sources import BUILTIN_FOLDER
from distflow.launch.data_sets import train_sources, validation_sources
from distflow.models.loading import load_model, load_tokenizer
from distflow.rewards.text_rewards import exact_match as compute_score
from distflow.rewards.text_rewards import has_format as format_score

ROOT = Path(__file__).parents[2]


def rows(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (BUILTIN_FOLDER / f"arithmetic-{name}.jsonl").read_text().splitlines()
    ]


def solution(problem: str) -> int:
    first, second = problem.removesuffix("=").split("+")
    return int(first) + int(second)


def carries(problem: str) -> bool:
    first, second = problem.removesuffix("=").split("+")
    return int(first[-1]) + int(second[-1]) > 9


def test_no_problem_is_in_two_data_sets_or_twice_in_one() -> None:
    problems = [row["prompt"] for name in ("sft", "rl", "val") for row in rows(name)]
    assert len(problems) == len(set(problems)) > 5000


def test_worked_examples_are_right_and_careless_ones_only_where_nothing_is_carried() -> None:
    regex = {"format_regex": rows("rl")[0]["format_regex"]}
    num_worked = 0
    for row in rows("sft"):
        is_right = compute_score("", row["response"], solution(row["prompt"])) == 1.0
        is_worked = format_score("", row["response"], None, regex) == 1.0
        assert is_worked == ("####" in row["response"])
        assert is_right == (is_worked or not carries(row["prompt"])), row
        num_worked += is_worked
    assert 0.3 < num_worked / len(rows("sft")) < 0.5


def test_answers_to_train_and_validate_on_are_right_and_half_of_them_need_a_carry() -> None:
    for name in ("rl", "val"):
        assert all(int(row["answer"]) == solution(row["prompt"]) for row in rows(name))
        assert 2 * sum(carries(row["prompt"]) for row in rows(name)) == len(rows(name))


def test_the_steps_of_worked_answers_are_right() -> None:
    for row in (row for row in rows("sft") if "####" in row["response"]):
        for left, right in re.findall(r"([\d+]+)=(\d+)", row["response"]):
            assert sum(map(int, left.split("+"))) == int(right), row


def test_the_script_writes_the_data_that_are_committed(tmp_path: Path) -> None:
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


def test_the_built_in_model_is_small_and_its_tokenizer_gives_back_what_it_read() -> None:
    model = load_model("builtin:tiny-arithmetic", init="random", seed=1)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 0.9e6
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")
    for row in rows("sft")[:50]:
        text = row["prompt"] + row["response"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert max(ids) < model.config.vocab_size
    assert tokenizer("####")["input_ids"] == tokenizer.convert_tokens_to_ids(["####"])


@pytest.mark.parametrize("preset", ["quickstart_sft", "quickstart_grpo"])
def test_no_row_of_the_presets_is_too_long(preset: str, tmp_path: Path) -> None:
    config = load_config(preset).config
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")
    judged = preset == "quickstart_grpo"
    for source in (*train_sources(config, judged), *validation_sources(config, judged)):
        prompts = source.encode(source.read(tmp_path), tokenizer)
        assert len(prompts.report.lines()) == 1
        assert len(prompts) > 5 * config.data.train_batch_size


@pytest.mark.slow
def test_the_three_commands_end_with_accuracy_before_and_after(tmp_path: Path) -> None:
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
