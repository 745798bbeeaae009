"""The notes of a start, on settings that are valid but probably mistakes."""

from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.launch.read_config import fitted_to_files, read_config
from distflow.launch.startup_messages import startup_lines


def lines_of(rows: Path, *keys: str) -> list[str]:
    fixed = (
        "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
        "actor_rollout_ref.model.init=random",
        f"data.train_files={rows}",
    )
    loaded = load_config("grpo", [*fixed, *keys])
    return [*startup_lines(*fitted_to_files(read_config(loaded)))]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2", "data_source": "sums"}\n')
    return path


def test_reward_functions_of_a_domain_without_rows_are_named(rows):
    lines = lines_of(rows, "reward.functions={sums: [exact_match], smus: [math]}")
    named = (
        "note: reward.functions has settings of 'smus', but no row is in that domain; did you mean "
        "'sums'?"
    )
    assert [line for line in lines if "reward.functions has" in line] == [named]


def test_a_run_that_validates_on_its_training_file_names_both_and_its_advantages(rows):
    starts = [line.partition(":")[0] for line in lines_of(rows, f"data.val_files={rows}")]
    assert {"train data", "validation data", "advantages"} <= {*starts}


def test_a_learning_rate_of_0_is_noted():
    rows = Path("builtin:arithmetic-rl")
    zero = ("actor_rollout_ref.actor.optim.lr=0", "critic.optim.lr=0")
    lines = lines_of(rows, "dag.pipeline=ppo", "algorithm.adv_estimator=gae", *zero)
    assert [line for line in lines if "lr=0" in line] == [
        f"note: {key}: its updates change no weight" for key in zero
    ]
    assert not any("lr=0" in line for line in lines_of(rows))


def test_a_likely_column_of_answers_is_named_to_a_reward_of_the_users(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "solution": "2", "level": "easy"}\n')
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(solution_str, ground_truth):\n    return 1.0\n")
    lines = lines_of(rows, f"custom_reward_function.path={reward}")
    (note,) = (line for line in lines if "ground_truth=None" in line)
    assert note.endswith("did you mean data.answer_key=solution?")
