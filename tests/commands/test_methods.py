"""`distflow methods` lists methods, shows one, and says what differs between two."""

from pathlib import Path

import pytest

from distflow.cli import main
from distflow.config import load_config
from distflow.config.compose.setting_origins import method_names

MINE = '''"""Mine: as GRPO, for a test."""
from distflow import register_policy_loss
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {norm_adv_by_std_in_grpo: false}
actor_rollout_ref: {actor: {policy_loss: mine, use_kl_loss: false}}
"""
@register_policy_loss("mine")
def loss(log_probs, advantages, loss_mask, *, strength: float = 2.0):
    """strength times the gradient."""
    return -strength * log_probs * advantages, {}
'''


def said(capsys, *names):
    assert main(["methods", *names]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_are_listed_with_what_they_need(capsys):
    head, *lines = said(capsys)
    rows = {line.split()[0]: line for line in lines}
    assert head.split()[:3] == ["name", "paper", "needs"] and list(rows) == method_names()
    assert "critic, reference" in rows["ppo"] and "arXiv:2507.18071" in rows["gspo"]
    assert "greedy responses" in rows["remax"] and "tau_neg=1.05" in rows["sapo"]


def test_one_shows_each_setting_with_its_origin(capsys):
    lines = said(capsys, "gspo")
    (low,) = [line for line in lines if "clip_ratio_low=0.0003" in line]
    assert "methods/gspo.py:" in low
    (file,) = [line.split()[-1] for line in lines if line.startswith("file")]
    place = int(low.rstrip(")").rpartition(":")[2])
    assert "clip_ratio_low: 3e-4" in Path(file).read_text().splitlines()[place - 1]
    assert any("rollout.n=8" in line and "methods/grpo.py" in line for line in lines)


def test_two_are_compared_in_words(capsys):
    lines = said(capsys, "grpo", "dapo")
    assert "- needs: groups, instead of: reference, groups" in lines
    assert any("rollout.n: 16 instead of 8 (responses per prompt" in line for line in lines)
    assert not any("- loss:" in line or "experiment_name" in line for line in lines)
    assert any(line.startswith("- loss: exp(prox") for line in said(capsys, "ppo", "decoupled_ppo"))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_file_of_the_users_is_a_method(mine, capsys):
    lines = said(capsys, "grpo", "mine.py")
    assert any("- loss: strength times the gradient, instead of: max(" in line for line in lines)
    assert any("norm_adv_by_std_in_grpo: false instead of true" in line for line in lines)

    loaded = load_config("mine.py", ["trainer.imports=[json]"], complete=False)
    assert loaded.config.trainer.imports == ("json", str(mine))
    assert loaded.origin("algorithm.norm_adv_by_std_in_grpo") == "mine.py:5"


def test_a_yaml_file_builds_on_a_method_beside_it(mine):
    mine.with_name("run.yaml").write_text("defaults: [mine, _self_]\nalgorithm: {gamma: 0.9}\n")
    config = load_config("run.yaml", complete=False).config
    assert config.actor_rollout_ref.actor.policy_loss == "mine" and config.algorithm.gamma == 0.9
    assert config.trainer.imports == (str(mine),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", ("mine.py", "SETTINGS")),
        ("x = (\n", ("mine.py", "line 1")),
        ('SETTINGS = """\nalgorithm: {gama: 1}\n"""\n', ("algorithm.gama", "mine.py:2")),
        ('\n\nSETTINGS = """\na: [\n"""\n', ("mine.py", "line 5")),
    ],
)
def test_what_is_no_method_is_refused_with_its_place(text, expected, mine, capsys):
    mine.write_text(text)
    assert main(["methods", "mine.py"]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in expected), error


def test_settings_alone_are_no_method(capsys):
    assert main(["methods", "sft"]) == 2
    assert "distflow config sft" in capsys.readouterr().err
