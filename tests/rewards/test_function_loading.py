"""Calling a user's function by what it takes, and reading what it returns."""

import math

import numpy as np
import pytest
import torch

from distflow.errors import UserError
from distflow.rewards.function_calls import call, call_batched, takes_conversation
from distflow.rewards.function_loading import custom_target, find_fault, load_reward, with_options
from distflow.rewards.reward_results import Score, read_score

ARGUMENTS = {"data_source": "d", "solution_str": "s", "ground_truth": "g", "extra_info": {"k": 1}}


def load(tmp_path, source: str):
    (tmp_path / "reward.py").write_text(source)
    return load_reward(custom_target(str(tmp_path / "reward.py"), "compute_score"))


@pytest.mark.parametrize(
    ("parameters", "seen"),
    [
        ("solution_str, ground_truth", ["g", "s"]),
        ("data_source, solution_str, ground_truth, extra_info=None", [{"k": 1}, "d", "g", "s"]),
        ("extra_info, *, solution_str", [{"k": 1}, "s"]),
        ("solution_str, threshold=3", [3, "s"]),
        ("**kwargs", [ARGUMENTS]),
        (
            "solution_str, **kwargs",
            [{name: value for name, value in ARGUMENTS.items() if name != "solution_str"}, "s"],
        ),
    ],
)
def test_a_function_gets_by_name_what_it_takes(tmp_path, parameters, seen):
    function = load(
        tmp_path, f"def compute_score({parameters}):\n    return list(locals().values())\n"
    )
    assert sorted(call(function, ARGUMENTS), key=str) == sorted(seen, key=str)


def test_a_function_sees_the_turns_of_an_episode_if_it_takes_them(tmp_path):
    told = [{"owner": "prompt", "text": "1="}, {"owner": "policy", "text": "2"}]
    asked = {**ARGUMENTS, "conversation": told}
    assert takes_conversation(one := lambda solution_str, conversation=(): conversation)
    assert call(one, asked) == told and call(one, ARGUMENTS) == ()
    assert not takes_conversation(last := lambda solution_str, **others: sorted(others))
    assert "conversation" not in call(last, asked)
    assert takes_conversation(every := lambda solution_strs, conversations=(): conversations)
    assert call_batched(every, [asked, asked]) == [told, told]
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, conversation=()):\n    return 1.0\n"
    )

    with pytest.raises(UserError, match="'conversation'"):
        load_reward(
            with_options(
                custom_target(str(tmp_path / "reward.py"), "compute_score"), {"conversation": "x"}
            )
        )


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "batch",
        "solution_str, reference",
        "batch, config, **kwargs",
        "solution_strs, solution_str",
    ],
)
def test_a_function_of_another_signature_is_refused(tmp_path, parameters):
    with pytest.raises(ValueError, match="solution_str.*solution_strs"):
        load(tmp_path, f"def compute_score({parameters}): return 0.0")


def test_a_dataclass_in_the_file_finds_its_module(tmp_path):
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        "class A:\n    x: int = 1\n"
        "def compute_score(solution_str): return A().x\n"
    )
    assert call(load(tmp_path, source), ARGUMENTS) == 1


@pytest.mark.parametrize(
    "returned",
    [
        0.5,
        np.float32(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        torch.tensor([0.5]),
        {"score": np.float64(0.5)},
    ],
)
def test_numbers_of_every_library_are_scores(returned):
    assert read_score(returned) == Score(0.5)


@pytest.mark.parametrize("returned", [True, 1, np.int64(1), np.bool_(True)])
def test_whole_numbers_and_truths_too(returned):
    assert read_score(returned) == Score(1.0)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1",
        [],
        [1.0],
        (1.0, {}),
        {},
        {"score": None},
        1j,
        math.nan,
        -math.inf,
        np.array([1.0, 2.0]),
        torch.zeros(2),
    ],
)
def test_what_is_none_is_an_error(returned):
    with pytest.raises((ValueError, RuntimeError)):
        read_score(returned)


def test_arguments_that_have_no_name_are_refused_before_a_call():
    assert "remove the '/'" in find_fault(lambda solution_str, ground_truth, /: 0.0)
    assert find_fault(lambda *rest: 0.0).startswith(
        "takes (*rest): a reward function takes some of"
    )
