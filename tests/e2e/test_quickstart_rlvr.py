"""Sums and small functions that the package carries: no task is in two data sets, and the tests say
what is right."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distflow.config import load_config
from distflow.data.sources import BUILTIN_FOLDER
from distflow.launch.data_sets import train_sources, validation_sources
from distflow.models.loading import load_tokenizer
from distflow.rewards.code.reward import compute_score

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_functions.py"
NAMES = ("sft", "rl", "val", "long")


def rows(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (BUILTIN_FOLDER / f"functions-{name}.jsonl").read_text().splitlines()
    ]


def chain(prompt: str) -> tuple[str, ...]:
    return tuple(re.findall(r"//|[-+*%]", prompt))


def one_after_the_other(prompt: str) -> Callable[[int], int]:
    """By parentheses around each step of the prompt's text."""
    whole = "x"
    for step in prompt.removesuffix(":").split()[1:]:
        whole = f"({whole}{step})"
    return eval(f"lambda x: {whole}")  # type: ignore[no-any-return]


def as_python_reads_it(prompt: str) -> Callable[[int], int]:
    return eval(f"lambda x: {prompt.removesuffix(':').replace(' ', '')}")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_functions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_script_writes_the_data_that_are_committed(script: ModuleType, tmp_path: Path) -> None:
    script.write_data(tmp_path)
    for name in NAMES:
        file = f"functions-{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (BUILTIN_FOLDER / file).read_bytes()


def test_no_task_is_twice_and_no_chain_that_is_held_out_was_seen() -> None:
    prompts = [row["prompt"] for name in NAMES for row in rows(name)]
    assert len(prompts) == len(set(prompts)) == 4700
    chains = {name: {chain(row["prompt"]) for row in rows(name)} for name in NAMES}
    assert not chains["val"] & (chains["sft"] | chains["rl"])
    assert {len(each) for each in chains["long"]} == {4} and {
        len(each) for each in chains["rl"]
    } == {2, 3}


def test_tests_of_a_task_are_what_its_steps_give_and_tell_a_careless_answer_from_a_right_one() -> (
    None
):
    num_bent = 0
    for row in (row for name in ("rl", "val", "long") for row in rows(name)):
        prompt = row["prompt"]
        answer = row["answer"]
        inputs = [x for (x,) in answer["inputs"]]
        assert len(set(inputs)) == 10 >= 8
        right = one_after_the_other(prompt)
        quick = as_python_reads_it(prompt)
        assert answer["outputs"] == [right(x) for x in inputs]
        is_same = all(quick(x) == right(x) for x in range(-40, 41))
        assert (answer["outputs"] == [quick(x) for x in inputs]) == is_same, prompt
        num_bent += not is_same
    assert 0.65 < num_bent / 1700 < 0.72


def test_worked_examples_are_right_and_careless_ones_are_what_python_makes_of_the_prompt() -> None:
    num_worked = 0
    for row in rows("sft"):
        space: dict[str, Any] = {}
        exec(row["response"], space)
        is_worked = row["response"].count("\n") > 0
        num_worked += is_worked
        wanted = (one_after_the_other if is_worked else as_python_reads_it)(row["prompt"])
        assert all(space["f"](x) == wanted(x) for x in (-7, 0, 12)), row
    assert num_worked / 3000 == 0.4


def test_the_verifier_tells_them_apart(script: ModuleType) -> None:
    bent = next(row for row in rows("val") if chain(row["prompt"]) == ("+", "%", "*"))
    task = tuple(
        (sign, int(number)) for sign, number in re.findall(r"(//|[-+*%])(\d)", bent["prompt"])
    )
    assert compute_score("", script.worked(task), bent["answer"])["score"] == 1.0
    reward_result = compute_score("", script.careless(task), bent["answer"])
    assert reward_result["score"] == 0.0 and reward_result["failed"]


@pytest.mark.parametrize("preset", ["quickstart_rlvr_sft", "quickstart_rlvr"])
def test_no_row_of_the_presets_is_too_long(preset: str, tmp_path: Path) -> None:
    config = load_config(preset).config
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")
    judged = preset == "quickstart_rlvr"
    sources = [*train_sources(config, judged), *validation_sources(config, judged)]
    assert len(sources) == (5 if judged else 1)
    for source in sources:
        assert len(source.encode(source.read(tmp_path), tokenizer).report.lines()) == 1
