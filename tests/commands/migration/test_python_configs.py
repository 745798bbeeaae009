"""Literal arguments of a script's configs and trainers, read without evaluating anything."""

from pathlib import Path

import pytest

from distflow.commands.migration.python_configs import read_script
from distflow.commands.migration.settings import Unread
from distflow.errors import UserError


def test_literals_are_read_and_other_arguments_are_named_with_their_text() -> None:
    found = read_script(
        "import trl\nn = 4\nargs = trl.SFTConfig('out', learning_rate=1e-5, max_steps=n, "
        "betas=(0.9, 0.99), **more)\n"
        "peft = LoraConfig(r=4, task_type='CAUSAL_LM')\n"
        "SFTTrainer('m', args=args, train_dataset=rows).train()\n"
    )
    assert (found.system, found.method) == ("TRL", "sft")
    assert {key: value for key, value in found.values.items() if not isinstance(value, Unread)} == {
        **{"learning_rate": 1e-5, "betas": [0.9, 0.99], "lora_r": 4, "lora_alpha": 8},
        **{"task_type": "CAUSAL_LM", "model": "m"},
    }
    unread = {key: value.why for key, value in found.values.items() if isinstance(value, Unread)}
    assert [*unread] == ["max_steps", "**more", "train_dataset"]
    assert unread["max_steps"].endswith(": n") and found.lines["max_steps"] == 3
    assert any("line 3" in line and "'out'" in line for line in found.remarks)


def test_names_of_reward_functions_are_read() -> None:
    found = read_script(
        "RLOOTrainer(model='m', reward_funcs=[accuracy_reward, 'r/m'], args=RLOOConfig())\n"
    )
    assert found.method == "rloo" and found.values["reward_funcs"] == ["accuracy_reward", "r/m"]


def test_a_config_of_another_trainer_is_not_read() -> None:
    found = read_script("a = SFTConfig(seed=1)\nb = GRPOConfig(seed=2)\nGRPOTrainer('m', args=b)\n")
    assert found.values == {"seed": 2, "model": "m"}


@pytest.mark.parametrize("text", ["x = 1\n", "DPOTrainer('m')\n", "def f(:\n", "x = " + "(" * 5000])
def test_a_script_that_trains_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        read_script(text)


@pytest.mark.parametrize(
    "value", ["'a' * 10**10", "9**9**9", "[0] * 9**9", "f(f(f(1)))", "-" * 500 + "1"]
)
def test_nothing_is_evaluated(value: str, tmp_path: Path) -> None:
    found = read_script(f"GRPOConfig(output_dir={value})\n")
    assert isinstance(found.values["output_dir"], Unread)
