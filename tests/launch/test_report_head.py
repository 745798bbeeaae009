"""What a config says differently from the preset that it builds on."""

import pytest

from distflow.config import load_config, preset_config
from distflow.config.compose.setting_origins import preset_names
from distflow.launch.report_head import changes


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_as_it_is_has_no_changes(name):
    """Which holds only where the presets are read as Hydra composes them."""
    assert changes(load_config(name, complete=False)) == (name, [])


def test_what_was_set_is_told_with_what_was_before_and_where(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart_grpo, _self_]\ntrainer:\n  seed: 4\n  project_name: mine\n"
    )
    rate = preset_config("quickstart_grpo").actor_rollout_ref.actor.optim.lr
    loaded = load_config(
        str(tmp_path / "mine.yaml"),
        ["actor_rollout_ref.actor.optim.lr=1e-5", "trainer.test_freq=10"],
    )
    preset, found = changes(loaded)
    assert preset == "quickstart_grpo"
    assert [(change["key"], change["before"], change["now"]) for change in found] == [
        ("actor_rollout_ref.actor.optim.lr", str(rate), "1e-05"),
        ("trainer.project_name", "'quickstart'", "'mine'"),
        ("trainer.seed", "1", "4"),
    ]
    assert [
        change["where"].endswith(end)
        for change, end in zip(found, ("line", ":4", ":3"), strict=True)
    ] == [True] * 3


def test_a_file_without_a_preset_changes_that_which_it_builds_on(tmp_path):
    (tmp_path / "bare.yaml").write_text("trainer:\n  seed: 4\n")
    preset, found = changes(load_config(str(tmp_path / "bare.yaml"), complete=False))
    assert preset == "grpo" and [(change["key"], change["now"]) for change in found] == [
        ("trainer.seed", "4")
    ]
