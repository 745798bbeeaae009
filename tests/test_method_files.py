"""The methods of papers, one file each, as they are read without being imported."""

import ast
import subprocess
import sys

import pytest

from distflow.algorithms.registry import find_adv_est, find_policy_loss
from distflow.builtin_names import ESTIMATORS, POLICY_LOSSES
from distflow.config import load_config
from distflow.config.compose.setting_origins import method_names, preset_files
from distflow.method_files import METHODS, MethodFile

OF_OURS = ("grpo_turns",)
"""Without a paper."""


@pytest.mark.parametrize("name", method_names())
def test_a_method_has_a_title_settings_and_a_run_of_its_own(name):
    method = MethodFile.of(preset_files()[name])
    assert method.title.endswith(".") and bool(method.paper) == (name not in OF_OURS)
    assert load_config(name, complete=False).config.trainer.experiment_name == f"{name}_training"


def test_a_method_runs_the_parts_that_its_file_registers():
    for name in method_names():
        config = load_config(name, complete=False).config
        chosen = {config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss}
        own = {part.name for part in MethodFile.of(preset_files()[name]).parts}
        assert own <= chosen, name


@pytest.mark.parametrize("table", [ESTIMATORS, POLICY_LOSSES], ids=["estimators", "losses"])
def test_what_is_read_is_what_is_registered(table):
    for name, entry in table.items():
        found = find_adv_est(name) if table is ESTIMATORS else find_policy_loss(name)
        options = {**found.options, **getattr(found, "selection_options", {})}
        read = {key: ast.literal_eval(value) for key, value in entry.options.items()}
        assert read == options, name


def test_requirements_follow_from_parameters():
    def names(has):
        return {name for name, entry in ESTIMATORS.items() if getattr(entry, has)}

    assert names("needs_critic") == {"gae", "gae_marft"}
    assert names("needs_greedy") == {"remax"} and names("reads_parts") == {"gdpo"}
    assert names("is_over_turns") == {"gae_marft", "grpo_turns"}
    alone = {"gae", "gae_marft", "reinforce", "reinforce_plus_plus", "remax"}
    assert names("needs_group") == ESTIMATORS.keys() - alone

    clips = {name for name, entry in POLICY_LOSSES.items() if entry.clips_ratio}
    unclipped = {"gpg", "topr", "sapo", "dro", "kl_cov", "dppo_tv", "dppo_kl"}
    assert not clips & unclipped and {"vanilla", "gspo", "clip_cov", "decoupled"} <= clips


def test_no_command_imports_a_method_for_its_name():
    code = (
        "import sys; from distflow.cli import main; main(['methods', 'gspo']); "
        "print([m for m in sys.modules if m == 'torch' or '.algorithms' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_part_is_found_by_decorator_and_by_call():
    file = MethodFile(
        '"""One\nline.\n\nMore."""\nPAPER = "x"\nSETTINGS = """\na: 1\n"""\n'
        '@register_policy_loss("mine", selects=choose)\ndef loss(): ...\n'
        'other = register_adv_est("theirs")(compute)\n'
        "@cached\ndef neither(): ...\n"
    )
    assert (file.title, file.paper) == ("One line.", "x")
    assert file.settings is not None and file.settings.splitlines()[6] == "a: 1"
    found = [(part.name, part.attribute, part.function, part.selects) for part in file.parts]
    assert found == [("mine", "loss", "loss", "choose"), ("theirs", "other", "compute", "")]


def test_the_methods_are_there():
    assert {path.stem for path in METHODS.glob("*.py")} - {"__init__"} == set(method_names())
    assert {"grpo", "dr_grpo", "dapo", "ppo", "gspo", "decoupled_ppo"} <= set(method_names())
