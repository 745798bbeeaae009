"""What a plan takes from a config and its files alone."""

import json

import pytest

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.plans.run_planner import RunPlanner, num_rows

TINY = [
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
]


@pytest.fixture
def files(tmp_path):
    """Files by their number of rows."""
    found = {}
    for number in (12, 30):
        found[str(number)] = file = tmp_path / f"{number}.jsonl"
        file.write_text(
            "".join(
                json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n"
                for i in range(number)
            )
        )

    return found


def test_the_rows_are_those_that_the_run_trains_on(files):
    def rows_of(*keys: str) -> int | None:
        return num_rows(load_config("grpo", keys, complete=False).config)

    both = f"data.train_files=[{files['12']},{files['30']}]"
    assert rows_of(both) == 42
    assert rows_of(both, "data.train_max_samples=20") == 20, "of both files together"
    domains = (
        f"a: {{train_files: {files['12']}, reward: math}}, b: {{train_files: {files['30']}, "
        "reward: math"
    )
    assert rows_of(f"data.domains={{{domains}}}}}") == 42
    assert rows_of(f"data.domains={{{domains}, train_max_samples: 5}}}}") == 17
    assert rows_of(f"data.domains={{{domains}, weight: 0, val_files: {files['12']}}}}}") == 12
    assert rows_of("data.train_files=no-such-file.jsonl") is None


def test_the_length_of_a_run_counts_the_rows_that_it_uses(files):
    keys = [
        *TINY,
        f"data.train_files={files['30']}",
        "data.train_max_samples=8",
        "data.train_batch_size=4",
    ]
    keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_epochs=3"]
    assert RunPlanner("grpo", keys, "cpu").run.steps == 6


def test_a_model_without_a_config_is_named_by_its_own_key(tmp_path):
    (tmp_path / "empty").mkdir()
    others = {
        "reward_model.model.path": "grpo",
        "reward_model.models.helpful.path": "grpo",
        "critic.model.path": "ppo",
    }
    for key, preset in others.items():
        models = f"reward_model.models={{helpful: {{path: {tmp_path}/empty}}}}"
        keys = [*TINY, "data.train_files=builtin:arithmetic-rl"]
        keys += [models if ".models." in key else f"{key}={tmp_path}/empty"]
        with pytest.raises(UserError, match=f"^{key}: "):
            _ = RunPlanner(preset, keys, "cpu").shapes


def test_a_pipeline_without_a_model_has_no_plan():
    keys = [
        *TINY,
        "data.train_files=builtin:arithmetic-rl",
        "dag.pipeline=[{id: rows, type: DATA_LOAD}]",
    ]
    with pytest.raises(UserError, match="'yaml_pipeline' .* model"):
        _ = RunPlanner("grpo", keys, "cpu").run
