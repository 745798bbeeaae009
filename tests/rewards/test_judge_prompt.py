"""What a judge is asked, and the score that its answer ends with."""

import pytest

from distflow.errors import UserError
from distflow.rewards.judge_prompt import fill_template, judge_template, score_at_end

GOOD = '{"reason": "it is {right}", "score": 0.5}'
OTHER = '{"reason": "it is wrong", "score": 0}'


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        f" {GOOD}\n",
        f"<think>{{a}} {GOOD} or</think> so\n{GOOD}",
        f"```json\n{GOOD}\n```",
        f"<think>perhaps {OTHER}</think>{GOOD}",
        f"{GOOD} or again {GOOD}",
    ],
)
def test_an_answer_ends_with_its_score(answer):
    assert score_at_end(answer) == {"reason": "it is {right}", "score": 0.5}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "fine",
        "0.5",
        f"{GOOD} {GOOD} but no",
        GOOD[:-1],
        '{"score": 1}',
        '{"reason": "x", "score": 1.5}',
        "{" * 3000,
        f"{OTHER} The response ends with {GOOD}",
        f"{GOOD}\n{OTHER}",
        f'{GOOD} {{"reason": "no score"}}',
    ],
)
def test_any_other_answer_is_no_score(answer):
    with pytest.raises(ValueError, match="the judge"):
        score_at_end(answer)


def test_a_template_is_a_text_or_a_file_and_names_the_response(tmp_path):
    assert (
        "{response}" in judge_template("")
        and judge_template("Is {response} right?") == "Is {response} right?"
    )
    (tmp_path / "file.txt").write_text("Grade {response}.")
    assert judge_template(f"{tmp_path}/file.txt") == "Grade {response}."

    for wrong, said in (
        (f"{tmp_path}/no.txt", "cannot be read"),
        ("Is {prompt} right?", "has no {response}"),
    ):
        with pytest.raises(UserError, match=said):
            judge_template(wrong)

    values = {"prompt": "p", "response": "r", "ground_truth": "g"}
    with pytest.raises(ValueError, match="level"):
        fill_template("{response} {level}", values, 100)
