"""The configs that a command line of `distflow train` names, and which overrides are whose."""

import pytest

from distflow.cli import main
from distflow.commands.train import split_configs
from distflow.errors import UserError
from tests.e2e.cli_runs import CliRun


def test_overrides_are_for_all_configs_or_for_the_one_that_they_name():
    words = ["trainer.seed=1", "math.yaml", "code:trainer.seed=2", "math:~data.val_files"]
    assert split_configs("runs/code.yaml", words) == {
        "code": ["runs/code.yaml", "trainer.seed=1", "trainer.seed=2"],
        "math": ["math.yaml", "trainer.seed=1", "~data.val_files"],
    }


def test_a_colon_in_a_value_names_no_config():
    found = split_configs("grpo", ["ppo", "trainer.allocation=embedded:d1|torch:d1"])
    assert found == {
        name: [name, "trainer.allocation=embedded:d1|torch:d1"] for name in ("grpo", "ppo")
    }


def test_one_file_twice_is_numbered():
    assert split_configs("grpo", ["grpo", "sft", "grpo-2:trainer.seed=2"]) == {
        "grpo-1": ["grpo"],
        "grpo-2": ["grpo", "trainer.seed=2"],
        "sft-3": ["sft"],
    }


def test_words_of_one_config_are_left_as_they_are():
    assert split_configs("grpo", ["code:trainer.seed=2", "nonsense"]) == {
        "grpo": ["grpo", "code:trainer.seed=2", "nonsense"]
    }


def test_an_override_of_a_config_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"'cod:trainer\.seed=2' .*'cod'; .*'code'"):
        split_configs("code.yaml", ["math.yaml", "cod:trainer.seed=2"])


def test_a_checkpoint_cannot_be_that_of_all(tmp_path):
    run = CliRun(tmp_path / "log", ["train", "grpo", "ppo", "--resume", "somewhere"])
    assert run.status() == 2 and "write NAME:trainer.resume_mode=PATH" in run.said()


@pytest.mark.parametrize("words", [["a.yaml", "b.yaml"], ["trainer.seed=2", "a.yaml"]])
def test_supervised_fine_tuning_takes_one_config(words, capsys):
    """Several would be trained by `train`, and one that names no preset then as grpo."""
    assert main(["sft", *words]) == 2
    said = capsys.readouterr().err
    assert "distflow sft takes one config" in said and "distflow train" in said
