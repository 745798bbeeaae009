"""`distflow new` writes what trains as it is; every command's help."""

from statistics import mean

import pytest

from distflow.cli import main
from distflow.config import load_config
from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
from distflow.observe.run_reader import read_metrics


@pytest.mark.slow
def test_what_it_writes_trains_and_passes_the_reward_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "first run"]) == 0
    assert (
        main(
            [
                "reward",
                "check",
                "first run/reward.py",
                "--data",
                "first run/problems.jsonl",
                "--rows",
                "20",
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "train",
                "first run/config.yaml",
                "trainer.total_training_steps=60",
                "data.val_max_samples=10",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["runs"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("runs/first run/first") and "finished, step 60, reward" in line

    records = read_metrics(tmp_path / "runs" / "first run" / "first", max_bytes=None)
    name = "reward/mean_score"
    rewards = [each.values[name] for each in records if name in each.values]
    assert rewards[0] < 0.1
    assert mean(rewards[-10:]) > 0.25

    for taken in (["new", "first run"], ["eval", "first run/config.yaml", "--to", "first run"]):
        assert main(taken) == 2
        assert "'first run' exists" in capsys.readouterr().err


def test_a_place_that_cannot_be_is_named_and_spaces_are_quoted(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["new", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be made" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "a b")]) == 0
    assert f"distflow train '{tmp_path}/a b/config.yaml'" in capsys.readouterr().out


def test_a_folder_with_signs_of_yaml_is_written_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("run #1", "a: b", "[x]", "- ä"):
        assert main(["new", f"./{name}"]) == 0
        config = load_config(f"{name}/config.yaml", needed=NEEDED_TO_TRAIN).config
        assert config.data.train_files == (f"{name}/problems.jsonl",)
        assert (config.custom_reward_function.path, config.trainer.project_name) == (
            f"{name}/reward.py",
            name,
        )

    capsys.readouterr()
