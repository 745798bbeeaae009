"""What every launcher does around a run: what is refused before its folder has a run and its models
are loaded."""

import json
from dataclasses import replace

import pytest

from distflow.builtin_names import TRACKERS
from distflow.errors import UserError
from distflow.launch.check_disk import checkpoint_bytes
from distflow.launch.configured_models import model_sizes
from tests.e2e.runs import Playground


def test_a_tracker_whose_package_is_missing_is_told_before_a_run_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "mlflow", replace(TRACKERS["mlflow"], package="no_such_package"))
    playground = Playground(tmp_path)

    with pytest.raises(
        UserError,
        match=r"no_such_package .*pip install 'distflow\[mlflow\]'",
    ):
        playground.run("grpo", "trainer.logger=[console,mlflow]", name="tracked")

    assert not (tmp_path / "tracked" / "events.jsonl").exists()


def test_a_disk_without_room_for_the_checkpoints_is_told_before_the_models_are_loaded(tmp_path):
    playground = Playground(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 10**13}))
    steps = (
        "trainer.total_training_steps=6",
        "trainer.keep_last=1",
        "actor_rollout_ref.rollout.name=hf",
    )

    with pytest.raises(UserError, match=r" 2 checkpoints .*trainer\.keep_last=1"):
        playground.run("grpo", *steps, "trainer.save_freq=2")

    with pytest.raises(UserError, match=r" 1 checkpoint .*trainer\.keep_last="):
        playground.run("grpo", *steps, "trainer.save_freq=99")


@pytest.mark.parametrize(
    ("keys", "of_a_weight"), [((), 12), (("actor_rollout_ref.actor.optim.optimizer=sgd",), 4)]
)
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(keys, of_a_weight, tmp_path):
    run = Playground(tmp_path).run(
        "grpo", "trainer.total_training_steps=1", "trainer.save_freq=1", *keys
    )
    written = sum(
        file.stat().st_size for file in (run.folder / "checkpoints").glob("*/*.safetensors")
    )
    assert checkpoint_bytes(run.config, ["actor", "rollout"]) == pytest.approx(written, rel=0.1)
    assert (
        checkpoint_bytes(run.config, ["actor"])
        == of_a_weight * model_sizes(run.config, ["actor"])["actor"]
    )
