"""What the report judges, in words: each finding where it applies, and its silence where it does
not."""

import re
from collections.abc import Mapping

import pytest

from distflow.observe.findings.learning_rules import (
    accuracy_counts_nothing,
    constant_reward,
    equal_groups,
    no_update,
    truncation,
)
from distflow.observe.findings.step_rules import StepRules
from distflow.observe.report.build import report_data
from distflow.observe.writing.run_folder import RunFolder

Steps = dict[int, dict[str, float]]


def steps(**columns: tuple[float, ...]) -> Steps:
    """Columns by metric, "/" written as "__"."""
    rows: Steps = {}
    for name, values in columns.items():
        for step, value in enumerate(values, 1):
            rows.setdefault(step, {})[name.replace("__", "/")] = value
    return rows


def texts(sentences: list[dict[str, str]]) -> str:
    return "\n".join(f"{sentence['text']} {sentence['advice']}" for sentence in sentences)


@pytest.mark.parametrize(
    ("shares", "tone", "words"),
    [
        ((0.97,) * 8, "bad", "97% of responses were truncated at 64 tokens, over the last 2 steps"),
        ((0.0,) * 6 + (0.2, 0.3), "flat", "25% of responses"),
        (
            (0.8, 0.6, 0.2, 0.0),
            "good",
            "80% of responses were truncated at first, 0% in the last step",
        ),
        ((0.05,) * 8, "", ""),
        ((), "", ""),
    ],
)
def test_truncation_is_judged_by_how_the_run_ended(shares, tone, words):
    found = truncation(steps(rollout__truncated=shares), {"data": {"max_response_length": 64}})
    assert (found.tone if found else "") == tone and words in (found.text if found else "")
    if tone in ("bad", "flat"):
        assert found is not None and "Raise data.max_response_length (now 64)" in found.advice


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"actor__grad_norm": (0.0,) * 3, "actor__lr": (1e-3,) * 3},
            "all 3 steps: the gradient was 0",
        ),
        (
            {"sft__grad_norm": (1.0,) * 4, "sft__lr": (0.0,) * 4},
            "all 4 steps: the learning rate was 0",
        ),
        ({"rm__grad_norm": (0.0, 0.0, 1e-9), "rm__lr": (0.0, 0.0, 1e-9)}, ""),
        ({"actor__grad_norm": (0.0,) * 2, "actor__lr": (0.0,) * 2}, ""),
        ({}, ""),
    ],
)
def test_a_run_whose_weights_never_moved(columns, words):
    found = no_update(steps(**columns), {})
    assert (found is not None) == bool(words) and words in (found.text if found else "")


def test_while_a_run_goes_on_each_obstacle_is_reported_once():
    live = StepRules({"data": {"max_response_length": 64}})
    said = dict[int, list[str]]()
    for step in range(1, 61):
        reward = {
            "reward/max": float(step > 20),
            "reward/min": 0.0,
            "actor/grad_norm": float(step > 20),
        }
        found = live.step(step, {**reward, "rollout/truncated": 0.98 if step > 30 else 0.0})
        said |= {step: [f"{each.text} {each.advice}" for each in found]} if found else {}

    constant, cut = [text for texts in said.values() for text in texts]
    assert list(said) == [10, 33], said
    assert constant.startswith("The reward was 0 for every response of all 8 steps")
    assert (
        "truncated at 64 tokens, over the last 2 steps" in cut
        and "Raise data.max_response_length" in cut
    )


def test_an_obstacle_of_the_last_steps_names_these_steps():
    live = StepRules({})
    said = list[str]()
    for step in range(1, 41):
        reward = {"reward/max": float(step <= 20), "reward/min": 0.0, "actor/grad_norm": 0.1}
        said += [each.text for each in live.step(step, reward)]

    assert said == [
        "The reward was 0 for every response of steps 21 to 28: there was nothing to learn from."
    ]


def test_a_sound_run_is_told_nothing_and_a_still_one_why():
    sound = StepRules({})
    still = StepRules({})

    said = list[str]()
    for step in range(1, 31):
        moves = {"reward/max": 1.0, "reward/min": 0.0, "rollout/truncated": 0.05, "actor/lr": 1e-5}
        assert not sound.step(step, {**moves, "actor/grad_norm": 0.1})
        said += [each.text for each in still.step(step, {**moves, "actor/grad_norm": 0.0})]

    assert len(said) == 1 and "Nothing was learned in all 8 steps: the gradient was 0." in said[0]


def test_episodes_that_ran_out_of_time_are_not_truncated():
    rollout = {"workflow": "simulator"}
    late = steps(rollout__truncated=(0.9,) * 8)
    assert truncation(late, {"actor_rollout_ref": {"rollout": rollout}}) is None


def test_truncation_of_a_run_without_its_config_names_the_key_alone():
    found = truncation(steps(rollout__truncated=(1.0,)), {})
    assert found is not None and "Raise data.max_response_length, or" in found.advice


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (
            (0.0, 0.0),
            (0.0, 0.0),
            r"The reward was 0 for every response of all 2 steps: .* \(my\.py\) does not rec",
        ),
        (
            (0.5,),
            (0.5,),
            r"The reward was 0\.5 for every response of 1 step: .*It does not distinguish better",
        ),
        ((0.1 + 0.2,), (0.3,), r"The reward was 0\.3 "),
        ((-1.0, -1.0), (-1.0, -1.0), r"The reward was -1 "),
        ((0.0, 0.0), (0.0, 1.0), ""),
        ((0.0, 1.0), (0.0, 1.0), ""),
        ((), (), ""),
    ],
)
def test_a_reward_that_never_moved(low, high, words):
    found = constant_reward(
        steps(reward__min=low, reward__max=high),
        {"custom_reward_function": {"path": "my.py", "name": "f"}},
    )
    assert (found is not None) == bool(words)
    assert found is None or (
        found.hinders and found.tone == "bad" and re.search(words, f"{found.text} {found.advice}")
    )


@pytest.mark.parametrize(
    ("reward", "advice"), [(0.9, "harder prompts"), (0.1, "easier prompts, or more responses")]
)
def test_groups_that_teach_nothing_are_counted_and_an_advice_given(reward, advice):
    spread = {
        "reward__min": (0.0,) * 4,
        "reward__max": (1.0,) * 4,
        "reward__mean_score": (reward,) * 4,
        "reward__accuracy": (reward,) * 4,
    }
    found = equal_groups(steps(reward__frac_reward_zero_std=(0.1, 0.2, 0.3, 0.78), **spread), {})
    assert found is not None and "In 78% of the groups" in found.text and advice in found.advice
    assert (
        equal_groups(steps(reward__frac_reward_zero_std=(0.9, 0.9, 0.9, 0.3), **spread), {}) is None
    )
    assert (
        equal_groups(
            steps(reward__frac_reward_zero_std=(1.0,), reward__min=(0.0,), reward__max=(0.0,)), {}
        )
        is None
    )


def test_an_accuracy_that_cannot_count_is_not_called_0():
    found = accuracy_counts_nothing(
        steps(**{"val_correct__all__mean": (0.0, 0.0), "reward__max": (0.5, 0.86)})
    )
    assert found is not None and "the highest was 0.86" in found.text
    assert (
        accuracy_counts_nothing(steps(**{"val_correct__all__mean": (0.0,), "reward__max": (1.0,)}))
        is None
    )
    assert (
        accuracy_counts_nothing(steps(**{"val_correct__all__mean": (0.1,), "reward__max": (0.5,)}))
        is None
    )


def row(uid: str, **values: object) -> Mapping[str, object]:
    return {"uid": uid, "prompt": "p", "response": "r", "score": 0.0, "acc": 0.0, **values}


def test_reward_errors_are_shown_with_their_exception(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for step in (1, 2):
            run.metrics(
                step,
                "train",
                {"reward/calls": 100.0, "reward/error_rate": 0.03, "reward/errors": 2.0},
            )
            errors = [
                row(f"0-{i}", errors="custom: KeyError: 'answer' (at r.py:3)" if i < 2 else None)
                for i in (0, 1, 2)
            ]
            run.samples(step, errors)

        run.metrics(2, "val", {"val/errors": 1.0, "val_correct/all/mean": 0.0})
        run.samples(2, [row("0-0", errors="custom: ValueError: no")], "val")

    said = texts(report_data(tmp_path)["sentences"])
    assert (
        "The reward function failed on 6 of 200 responses in training, which are left out and "
        "on 1 validation response"
    ) in said
    assert "“custom: KeyError: 'answer' (at r.py:3)” (4 times in the samples)" in said
