"""Rows with broken tests are found before the first step."""

from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.make_spec import make_spec
from tests.e2e.runs import Playground

RIGHT = "def f(x):\n    return x + 1\n"
ONE_STEP = ("trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=2", "trust.check_freq=0")
CODE = (
    "reward.functions={default: [code, {name: custom, weight: 0}]}",
    "data.answer_key=test_list",
    "trust.check_rewards=true",
    *ONE_STEP,
)


def playground(
    folder: Path, solutions: list[str], broken: int = 0, column: str = "code"
) -> Playground:
    made = Playground(folder)
    tests = [["assert f(1) == 2"]] * len(solutions) + [["assert f(1) =="]] * broken
    rows = [
        {"prompt": f"p{i}=", "test_list": test, column: solution}
        for i, (test, solution) in enumerate(
            zip(tests, [*solutions, *[RIGHT] * broken], strict=True)
        )
    ]
    made.write_rows(rows)

    return made


@pytest.mark.slow
def test_a_row_with_broken_tests_is_left_out(tmp_path):
    ground = playground(tmp_path, [RIGHT] * 6, broken=2)
    run = ground.run("grpo", *CODE)
    assert len(run.metrics()) == 1
    assert "6 prompts, 2 left out, with broken tests" in (run.folder / "run.json").read_text()
    lines: list[str] = []
    make_spec(load_config("grpo", ground.overrides("another", *CODE)), say=lines.append)
    left_out = next(line for line in lines if line.startswith("left out"))
    assert (
        "2 training rows whose tests are broken" in left_out
        and "rows.jsonl:7: the tests are broken" in left_out
    )


def test_broken_tests_are_an_error_where_asked_or_where_most_rows_have_them(tmp_path):
    ground = playground(tmp_path, [RIGHT] * 3, broken=1)
    with pytest.raises(UserError, match=r"(?s)1 row .*rows\.jsonl:4.*data\.broken_tests=skip"):
        ground.spec("grpo", *CODE, "data.broken_tests=error")

    ground = playground(tmp_path, [RIGHT], broken=3)
    with pytest.raises(UserError, match=r"(?s)3 rows .*data\.answer_key"):
        ground.spec("grpo", *CODE)
