"""The notes of a start, on settings that are valid but probably mistakes."""

from pathlib import Path

from distflow.config import load_config
from distflow.launch.read_config import fitted_to_files, read_config
from distflow.launch.startup_messages import startup_lines


def test_reward_functions_of_a_domain_without_rows_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2", "data_source": "sums"}\n')
    keys = [
        "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
        "actor_rollout_ref.model.init=random",
        f"data.train_files={rows}",
        "reward.functions={sums: [exact_match], smus: [math]}",
    ]
    loaded = load_config("grpo", keys)
    lines = [*startup_lines(*fitted_to_files(read_config(loaded)))]
    named = (
        "note: reward.functions has settings of 'smus', but no row is in that domain; did you mean "
        "'sums'?"
    )
    assert [line for line in lines if "reward.functions has" in line] == [named]
