"""What a data set's own solutions and tests, and a reward's points, are worth is told before the
first step."""

from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.make_spec import make_spec
from distflow.observe.run_reader import read_events
from tests.e2e.runs import NO_WORK, Playground

RIGHT = "def f(x):\n    return x + 1\n"
WRONG = "def f(x):\n    return x\n"
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
def test_a_solution_that_fails_is_listed_and_a_row_with_broken_tests_left_out(
    tmp_path: Path,
) -> None:
    ground = playground(tmp_path, [RIGHT] * 5 + [WRONG], broken=2)
    run = ground.run("grpo", *CODE)
    events = [(event.kind, event.message) for event in read_events(run.folder)]
    told = next(
        i for i, (_, message) in enumerate(events) if "1 of 6 reference solutions" in message
    )
    assert (
        events[told][0] == "warning"
        and "rows.jsonl:6: code: 0, assert f(1) == 2" in events[told][1]
    )
    assert len(run.metrics()) == 1
    assert "6 prompts, 2 left out, with broken tests" in (run.folder / "run.json").read_text()
    lines: list[str] = []
    make_spec(load_config("grpo", ground.overrides("another", *CODE)), say=lines.append)
    left_out = next(line for line in lines if line.startswith("left out"))
    assert (
        "2 training rows whose tests are broken" in left_out
        and "rows.jsonl:7: the tests are broken" in left_out
    )


def test_broken_tests_are_an_error_where_asked_or_where_most_rows_have_them(tmp_path: Path) -> None:
    ground = playground(tmp_path, [RIGHT] * 3, broken=1)
    with pytest.raises(
        UserError, match="(?s)1 row whose tests are broken.*rows.jsonl:4.*data.broken_tests=skip"
    ):
        ground.spec("grpo", *CODE, "data.broken_tests=error")
    ground = playground(tmp_path, [RIGHT], broken=3)
    with pytest.raises(UserError, match="(?s)3 rows whose tests are broken.*data.answer_key"):
        ground.spec("grpo", *CODE)


@pytest.mark.slow
def test_a_column_of_solutions_may_be_named_and_most_of_them_must_pass(tmp_path: Path) -> None:
    ground = playground(tmp_path, [WRONG] * 3 + [RIGHT], column="mine")
    assert not ground.run("grpo", *CODE, name="unnamed").notes("warning")
    with pytest.raises(
        UserError, match=r"3 of 4 reference solutions of domain 'default' \(column 'mine'\) fail"
    ):
        ground.run("grpo", *CODE, "data.solution_key=mine", name="named")


def test_points_for_no_work_are_a_warning_that_changes_no_number(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    ground.write_reward(
        "import random\ncalls = []\ndef compute_score(solution_str, ground_truth):\n"
        "    calls.append(1)\n"
        "    return 1.0 + random.random() + len(calls)\n"
    )
    ground.write_rows([{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)])
    settings = (*ONE_STEP, "reward.functions={default: [custom]}", "reward.num_workers=1")
    tried = ground.run("grpo", *settings, "trust.check_rewards=true", name="tried")
    alone = ground.run("grpo", *settings, "trust.check_rewards=false", name="alone")
    (told,) = [event.message for event in read_events(tried.folder) if NO_WORK in event.message]
    assert (
        "reward function 'custom' (domain 'default')" in told
        and "rows.jsonl:1: empty response, '', got" in told
    )
    scores = [
        [run.metrics()[0][name] for name in ("reward/mean_score", "actor/grad_norm")]
        for run in (tried, alone)
    ]
    assert scores[0] == scores[1]
