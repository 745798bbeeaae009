"""What `train` refuses before it loads weights, `config` and `plan` refuse with the same
message."""

import json
from pathlib import Path

import pytest

from distflow.cli import main

RUN = [
    "quickstart_grpo",
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
]
ACTOR = "actor_rollout_ref.actor"
BAD = {
    "an unknown key": ["data.no_such_key=1"],
    "a value of another system": [f"{ACTOR}.policy_loss=ppo"],
    "a key that nothing reads": ["critic.optim.lr=1e-3"],
    "a missing data file": ["data.train_files=missing.jsonl"],
    "a missing reward file": [
        "reward.functions={default: [custom]}",
        "custom_reward_function.path=missing.py",
    ],
    "a missing loss": [f"{ACTOR}.policy_loss=missing.py:loss"],
    "rows without prompts": ["data.train_files={folder}/rows.jsonl"],
    "a column that no row has": ["data.answer_key=no_such_column"],
    "a model without a chat template": ["data.prompt_format=chat"],
    "a context that is too small": ["data.max_response_length=100000"],
    "a metric that nothing measures": ["trainer.stop_when='val_correct/other/mean > 0.5'"],
    "GPUs that are not there": ["trainer.n_gpus_per_node=64"],
    "offloading on a CPU": [f"{ACTOR}.fsdp_config.optimizer_offload=true"],
}


def refusal(
    command: str, overrides: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    run_dir = [f"trainer.default_local_dir={folder / command}"]
    status = main(
        [command, *RUN, *(each.replace("{folder}", str(folder)) for each in overrides), *run_dir]
    )
    error = capsys.readouterr().err
    assert status == 2, (command, error)
    assert "Traceback" not in error
    assert not list(folder.glob(f"{command}/checkpoints"))

    return error[error.index("distflow: ") :]


@pytest.mark.parametrize("fault", BAD)
def test_three_commands_refuse_the_same_runs(fault, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    said = {
        command: refusal(command, BAD[fault], tmp_path, capsys)
        for command in ("train", "config", "plan")
    }
    assert said["config"] == said["train"]
    assert said["plan"] == said["train"]


def test_what_may_be_elsewhere_is_not_refused(capsys):
    assert main(["config", "quickstart_grpo", "actor_rollout_ref.model.path=runs/not/there"]) == 0
    assert main(["config", "grpo", "--explain", "data.train_files"]) == 0
    assert main(["plan", *RUN, "--device", "h100", "trainer.n_gpus_per_node=64"]) == 0
    assert main(
        ["plan", "grpo", "actor_rollout_ref.model.path=qwen2.5-7b", "--device", "h200"]
    ) in (0, 2)
    assert "no config.json" not in capsys.readouterr().err
