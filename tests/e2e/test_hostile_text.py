"""Hostile text in answers, prompts, names, parts and errors: nothing that a run prints or writes
lets it act."""

import io

import pytest

from distflow import cli
from distflow.observe.run_reader import read_samples
from distflow.observe.writing.terminal_lines import TerminalLines
from tests.e2e.hostile import CANARY, HOSTILE_CHARACTERS, assert_harmless, speak_hostile, text_files
from tests.e2e.runs import Playground

REWARD = """
import sys
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print(solution_str, file=sys.stderr)
    if len(solution_str) % 3 == 0:
        raise ValueError("cannot read " + solution_str + CANARY)
    return {"score": len(solution_str) % 2, CANARY: 0.5}
"""
FORGED = "val_correct/all/mean: 1.0000"
BESIDES = ("trust.check_rewards=false", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=2",
           "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_epochs=1")  # fmt: skip


def quoted(key: str, value: str) -> str:
    """An override of Hydra's grammar."""
    return f'{key}="{value}"'


@pytest.fixture
def ground(tmp_path):
    ground = Playground(tmp_path)
    speak_hostile(tmp_path / "model")
    ground.write_rows(
        [
            {"prompt": f"{CANARY}{i}", "answer": CANARY, "data_source": f"{CANARY}\n{FORGED}"}
            for i in range(4)
        ]
    )
    ground.write_reward(f"CANARY = {CANARY!r}\n{REWARD}")

    return ground


def test_a_run_with_such_text_everywhere(ground, capfd, tmp_path):
    folder = f"run {CANARY.replace('/', '|')}"
    names = [quoted("trainer.project_name", CANARY), quoted("trainer.experiment_name", CANARY)]
    where = quoted("trainer.default_local_dir", str(tmp_path / folder))
    overrides = [*ground.overrides("run", *BESIDES, "data.max_prompt_length=400"), *names, where]
    overrides += [
        f"data.val_files={ground.folder}/rows.jsonl",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
    ]
    assert cli.main(["train", "grpo", *overrides]) == 0, capfd.readouterr()
    run = tmp_path / folder
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["export", str(run), "--to", str(tmp_path / f"out {folder}")]) == 0
    assert cli.main(["eval", "grpo", *overrides]) == 0
    assert cli.main(["config", "grpo", *overrides]) == 0
    assert cli.main(["config", "grpo", *overrides, "--explain", "trainer.project_name"]) == 0
    out, err = capfd.readouterr()
    assert_harmless(out, "stdout")
    assert_harmless(err, "stderr")
    assert "\\x1b[2J" in out, "it is shown, as what it is"
    assert FORGED in out and not any(line.startswith(FORGED) for line in out.splitlines())
    for path, text in text_files(run):
        assert_harmless(text, path)
    said = "".join(str(row["response"]) for row in read_samples(run, 1))
    assert set(said) & set(HOSTILE_CHARACTERS), (
        "the model did say such things, and they are read back as they were"
    )
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<script>document" not in page and page.count("<script") == 3


def test_what_a_run_prints():
    out = io.StringIO()
    view = TerminalLines(3, file=out)
    view.note("warning", CANARY)
    view.reward_failed(CANARY)
    view.log(1, {"reward/mean_score": 1.0, "reward/calls": 2.0, "reward/error_rate": 0.5})
    view.close()
    shown = out.getvalue()
    assert "reward errors 1 (" in shown
    assert "\\x1b[2J" in shown and "[red]boo" in shown

    for acting in (
        "\x1b[2J\x1b]52",
        "\x1b]8",
        "\x1b]52",
        "\x07",
        "\x9b",
        "\x9d",
        "\u202e",
        "\u2066",
        "\u200b",
        "\x08",
    ):
        assert acting not in shown, repr(acting)
