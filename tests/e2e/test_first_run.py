"""The first run on one's own model, data and reward file: three keys, from a bare folder."""

import json

import pytest
import yaml

from distflow.cli import main
from tests.tiny_models import write_tiny_model

GRADED = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return len(solution_str) % 3\n"
)
MODEL = "actor_rollout_ref.model.path=model"
REWARD = "custom_reward_function.path=reward.py"


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A folder with a model of 24 tokens of context, 30 rows and a reward file; we are in it."""
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model", max_position_embeddings=24)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(GRADED)
    return tmp_path


def test_three_keys_are_enough_and_the_first_lines_say_what_was_made_to_fit(bare, capsys):
    command = [
        "train",
        "grpo",
        MODEL,
        "data.train_files=rows.jsonl",
        REWARD,
        "trainer.total_training_steps=1",
    ]
    assert main(command) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("made to fit: ")]
    assert [line.split()[3].partition("=")[0] for line in told] == [
        "reward.functions",
        "actor_rollout_ref.model.dtype",
        "data.max_prompt_length",
        "data.max_response_length",
        "data.train_batch_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    ]
    assert lines.index(told[-1]) < lines.index(
        "30 prompts × 8 = 240 samples → 1 optimizer step of 240, on-policy"
    )
    kept = yaml.safe_load((bare / "runs/my_project/grpo_training/config.yaml").read_text())
    assert kept["data"]["train_batch_size"] == 30
    assert kept["data"]["max_prompt_length"] + kept["data"]["max_response_length"] == 24
    assert main(["config", *command[1:]]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == kept


REFUSED = {
    "a batch that somebody chose": (
        ("data.train_batch_size=64",),
        ("data.train_batch_size=30 or less",),
    ),
    "lengths that somebody chose": (
        ("data.max_prompt_length=16", "data.max_response_length=16"),
        ("make 32", "a context of 24", "data.max_response_length=8 or less"),
    ),
    "every path at once": (
        (
            "data.train_files=row.jsonl",
            "data.val_files=~/no_such.jsonl",
            "custom_reward_function.path=no.py",
            "a.b=1",
        ),
        ("4 problems", "'rows.jsonl'?", "no_such.jsonl", "'no.py'", "a.b"),
    ),
    "another kind of file": (("data.train_files=rows.txt",), ("did you mean 'rows.jsonl'?",)),
    "a function of another name": (
        ("custom_reward_function.name=score",),
        ("custom_reward_function.name=compute_score",),
    ),
    "an answer column that no row has": (
        ("data.answer_key=answr",),
        ("no row has the column 'answr'",),
    ),
    "a device by another name": (("trainer.device=gpu",), ("no gpu device here", "cuda")),
    "a path that is no hub id": (
        ("actor_rollout_ref.model.path=model/no",),
        ("model/no", "no such file or folder"),
    ),
    "a key as an option": (("--trainer.seed=3",), ("write trainer.seed=3",)),
    "an option of Hydra's": (
        ("--config-name=ppo_trainer", "--config-path=config"),
        ("--config-name", "docs/migrating.md"),
    ),
    "a short key as an option": (("--lr", "3"), ("actor_rollout_ref.actor.optim.lr",)),
    "no key to change": (("--allow-change", "nosuch.key"), ("nosuch.key", "no such key")),
    "no checkpoint to resume": (("--resume", "model"), ("model is not a checkpoint",)),
    "no folder to resume": (("--resume", "modle"), ("did you mean 'model'?",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_with_its_fix(name, bare, capsys):
    more, words = REFUSED[name]
    try:
        status = main(["train", "grpo", MODEL, "data.train_files=rows.jsonl", REWARD, *more])
    except SystemExit as left:  # argparse's way
        status = int(left.code or 0)

    said = capsys.readouterr().err
    assert status == 2 and all(word in said for word in words), said


ESTIMATORS = {
    "nan": (
        "wrote nan into the column 'advantages'",
        "token_level_rewards * float('nan'), token_level_rewards",
    ),
    "flat": ("expected (", "token_level_rewards.sum(-1), token_level_rewards.sum(-1)"),
    "one": ("1 values for the fields advantages, returns", "token_level_rewards"),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_an_estimator_must_not_return_is_named_with_the_function(name, bare, capsys):
    said, returned = ESTIMATORS[name]
    (bare / "mine.py").write_text(
        f"def own(token_level_rewards, response_mask):\n    return {returned}\n"
    )
    keys = ("trainer.total_training_steps=1", "algorithm.adv_estimator=mine.py:own")
    assert main(["train", "grpo", MODEL, "data.train_files=rows.jsonl", REWARD, *keys]) == 2
    told = capsys.readouterr().err
    assert said in told and "mine.py:own" in told
