"""Rows by a function of the user's: what it knows, what it may return, and that a resumed run draws
the same rows."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from distflow.errors import UserError
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.group_states import PromptGroup
from distflow.scheduling.row_sampler import RowSampler, try_sampler

ROWS = 6
CODE = """
import numpy as np

def by_score(history, count, generator):
    return np.where(np.isnan(history.mean_score), 1.0, 1.0 - history.mean_score + 0.1)

def in_order(history, count, generator):
    return np.argsort(history.times_drawn, kind="stable")[:count]

def known(history, count, generator):
    print(history.times_drawn.tolist(), history.mean_score.tolist(), history.last_score.tolist(),
          history.last_step.tolist())
    return [0, 0]

def returns(value):
    return lambda history, count, generator: value

short = returns([1.0] * 5)
nan = returns([1.0, float("nan"), 1.0, 1.0, 1.0, 1.0])
negative = returns([1.0, 1.0, -0.5, 1.0, 1.0, 1.0])
zero = returns([0.0] * 6)
outside = returns([0, 6])
empty = returns(np.array([], int))
words = returns(["a"])
nothing = returns(None)

def later(history, count, generator):
    return np.nan_to_num(history.mean_score, nan=1.0) - 0.5

def raises(history, count, generator):
    raise KeyError("row")
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "sampler.py"
    file.write_text(CODE)
    return str(file)


def score_of(group: PromptGroup) -> float:
    return (group.row * 7 + group.epoch) % 4 / 4


def run_steps(coordinator: Coordinator, steps: range) -> list[tuple[int, int, int]]:
    """Group id, epoch and row of each group; every fourth group is dropped."""
    issued = []
    for step in steps:
        while coordinator.ready(step) is None:
            groups = coordinator.issue_groups()
            # the order in which groups end must not matter
            for group in reversed(groups):
                issued.append((group.group_id, group.epoch, group.row))
                if group.group_id % 4 == 3:
                    coordinator.drop(group.group_id, "filtered", score_of(group))
                else:
                    coordinator.complete(group.group_id, 1, score=score_of(group))
        coordinator.release(step)
    return sorted(issued)


def plan_of(sampler: str, seed: int = 3) -> DataPlan:
    return DataPlan(ROWS, 4, 2, None, 12, seed=seed, sampler=sampler)


@pytest.mark.parametrize("name", ["by_score", "in_order"])
def test_a_resumed_run_draws_the_same_rows(code: str, name: str) -> None:
    plan = plan_of(f"{code}:{name}")
    whole = run_steps(Coordinator(plan), range(12))

    first = Coordinator(plan)
    before = run_steps(first, range(5))
    first.issue_groups()  # of a step that is lost
    snapshot = json.loads(json.dumps(first.snapshot()))
    after = run_steps(Coordinator(plan, None, snapshot), range(5, 12))
    assert before + after == whole

    other = run_steps(Coordinator(plan_of(f"{code}:{name}", seed=4)), range(12))
    assert (other == whole) == (name == "in_order"), "only its own generator depends on the seed"


def test_each_draw_of_a_row_is_another_epoch(code: str) -> None:
    issued = run_steps(Coordinator(plan_of(f"{code}:by_score")), range(12))
    places = Counter((row, epoch) for _, epoch, row in issued)
    assert set(places.values()) == {1}
    for row in range(ROWS):
        epochs = sorted(epoch for _, epoch, drawn in issued if drawn == row)
        assert epochs == list(range(len(epochs)))


def test_a_sampler_knows_the_scores_of_ended_steps(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = RowSampler(f"{code}:known", 2, seed=1)
    assert sampler.draw(2) == [(0, 0), (1, 0)]
    sampler.note(1, 0, 0.5)
    sampler.note(0, 0, 1.0)
    sampler.note(5, 1, None)
    sampler.note(6, 2, 1.0)  # offered by the user's loop
    sampler.draw(1)
    sampler.end_step(3)
    sampler.draw(2)
    assert capsys.readouterr().out.splitlines() == [
        "[0, 0] [nan, nan] [nan, nan] [0, 0]",
        "[2, 0] [nan, nan] [nan, nan] [0, 0]",
        "[3, 0] [0.75, nan] [0.5, nan] [3, 0]",
    ]


def test_rows_are_drawn_in_proportion_to_their_weights(tmp_path: Path) -> None:
    file = tmp_path / "weights.py"
    file.write_text("def fixed(history, count, generator):\n    return [1.0, 0.0, 3.0]\n")
    sampler = RowSampler(f"{file}:fixed", 3, seed=1)
    drawn = Counter[int]()
    for _ in range(4000):
        drawn.update(row for _, row in sampler.draw(1))
    assert drawn[1] == 0
    error = np.sqrt(0.25 * 0.75 / 4000)
    assert abs(drawn[0] / 4000 - 0.25) < 5 * error

    # without repeats, as long as enough rows have a weight
    assert all({row for _, row in sampler.draw(2)} == {0, 2} for _ in range(20))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "5 weights for 6 rows"),
        ("nan", "nan for row 1"),
        ("negative", "-0.5 for row 2"),
        ("zero", "only weights of 0"),
        ("outside", "row 6, and rows are 0 to 5"),
        ("empty", "no row"),
        ("words", "type <U1"),
        ("nothing", r"shape \(\)"),
        ("raises", "KeyError"),
        ("later", "-0.5 for row"),
        ("missing", "has no 'missing'"),
    ],
)
def test_a_trial_names_what_is_wrong(code: str, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        try_sampler(f"{code}:{name}", ROWS, 4)
    assert f"sampler.py:{name}" in str(raised.value)


def test_a_checkpoint_of_another_order_is_refused(code: str) -> None:
    snapshot = Coordinator(plan_of(f"{code}:by_score")).snapshot()
    with pytest.raises(UserError, match=r"data\.sampler"):
        Coordinator(plan_of(f"{code}:in_order"), None, snapshot)
    with pytest.raises(UserError, match=r"data\.sampler"):
        Coordinator(DataPlan(ROWS, 4, 2, None, 12, seed=3), None, snapshot)
