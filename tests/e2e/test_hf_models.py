"""`trainer.save_hf_model`: beside each checkpoint lies its policy, as transformers loads it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distflow.errors import UserError
from distflow.launch.run_folders.export_checkpoint import NOTE, identity, write_hf_models
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from tests.e2e.runs import Playground

CHEAP = (
    "trust.check_rewards=false",
    "actor_rollout_ref.rollout.n=2",
    "trainer.save_freq=1",
    "trainer.keep_last=2",
)
EXPORTS = "trainer.save_hf_model=true"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.by_hand
@pytest.mark.slow
def test_each_kept_checkpoint_has_the_model_that_transformers_loads(tmp_path):
    ground = Playground(tmp_path)
    run = ground.run("grpo", *CHEAP, EXPORTS, "trainer.total_training_steps=3")
    plain = ground.run("grpo", *CHEAP, "trainer.total_training_steps=3", name="plain")
    models = run.folder / "huggingface"
    assert names(models) == ["step-000002", "step-000003"], "as many as checkpoints are kept"

    for step in (2, 3):
        folder = models / f"step-{step:06d}"
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        wanted = run.weights(step)
        assert all(
            torch.equal(loaded[name], tensor) for name, tensor in wanted.items() if name in loaded
        )
        assert len(AutoTokenizer.from_pretrained(folder)) > 1

    assert all(
        torch.equal(tensor, plain.weights(3)[name]) for name, tensor in run.weights(3).items()
    )

    # What a kill, or somebody else, left: gone or written again by the next start, and what is not
    # ours stays.
    shutil.rmtree(models / "step-000003")
    (models / ".step-000003.x7").mkdir()
    (models / "mine").mkdir()
    ground.run("grpo", *CHEAP, EXPORTS, "trainer.total_training_steps=3")
    assert names(models) == ["mine", "step-000002", "step-000003"]


def test_without_checkpoints_there_is_nothing_to_write(tmp_path):
    with pytest.raises(UserError, match="trainer.save_hf_model"):
        Playground(tmp_path).spec("grpo", EXPORTS, "trainer.total_training_steps=1")


def test_an_export_that_was_killed_is_made_again(tmp_path, monkeypatch):
    """A kill leaves the empty folder that the export was to replace."""
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    for step in (1, 2):
        writing = store.begin(step)
        writing.write("run", {})
        writing.commit(["run"])
        (tmp_path / "huggingface" / f"step-{step:06d}").mkdir(parents=True)

    (tmp_path / "huggingface" / "step-000001" / NOTE).write_text(
        json.dumps({"checkpoint": identity(tmp_path / "checkpoints" / "step-000001")})
    )
    commands = list[list[str]]()
    done = subprocess.CompletedProcess((), 0, "", "")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: commands.append(command) or done
    )
    write_hf_models(tmp_path, pytest.fail)
    assert [Path(command[command.index("--to") + 1]).name for command in commands] == [
        "step-000002"
    ]
