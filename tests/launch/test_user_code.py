"""The code that a config names: to look at its pipeline runs none of it."""

import json

import pytest

from distflow import cli
from distflow.config import Config, load_config, to_dict
from distflow.config.derived_settings import code_of_workflow
from distflow.config.keys.schema import with_values
from distflow.launch.user_code import is_own_run, named_code, pipeline_code, remember_own_run

CODE = """
from pathlib import Path

Path(__file__).with_name("it ran").touch()

async def workflow(chat, row):
    return 1.0

def tool(a: int) -> int:
    '''Returns it.

    Args:
        a: The number.
    '''
    return a

def accept(acc):
    return True
"""
WORKFLOW = "actor_rollout_ref: {rollout: {workflow: NAME, workflow_kwargs: {OPTIONS}}}"
CONFIGS = {
    "workflow": ("FILE:workflow", "", "workflow: FILE:workflow"),
    "tool": ("tools", "tools: ['FILE:tool']", "workflow_kwargs.tools: FILE:tool"),
    "tool with options": (
        "tools",
        "tools: [calculator, {name: 'FILE:tool', options: {}}]",
        "workflow_kwargs.tools: FILE:tool",
    ),
    "environment": ("environment", "env: 'FILE:tool'", "workflow_kwargs.env: FILE:tool"),
    "filter": ("", "", "algorithm.filter_groups.should_accept: FILE:accept"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_runs_no_code_of_its_nodes_unless_asked(tmp_path, capsys, name):
    file = tmp_path / "own.py"
    config = tmp_path / "handed.yaml"
    file.write_text(CODE)
    workflow, options, named = (part.replace("FILE", str(file)) for part in CONFIGS[name])
    text = WORKFLOW.replace("NAME", f"'{workflow}'").replace("OPTIONS", options) if workflow else ""
    text = text or f"algorithm: {{filter_groups: {{should_accept: '{file}:accept'}}}}"
    config.write_text(f"defaults: [grpo, _self_]\n{text}\n")
    assert cli.main(["config", str(config), "--graph"]) == 2
    err = capsys.readouterr().err
    assert not (tmp_path / "it ran").exists() and named in err and "--trust-code" in err
    assert cli.main(["config", str(config), "--graph", "--trust-code"]) == 0
    assert (tmp_path / "it ran").exists() and named in capsys.readouterr().err


def test_the_code_of_a_workflow_is_named_once():
    kwargs = "{tools: [calculator, my_tools:weather, {name: my_tools:time}]}"
    rollout = "actor_rollout_ref.rollout"
    words = [
        f"{rollout}.workflow=tools",
        f"{rollout}.workflow_kwargs={kwargs}",
        "data.prompt_format=chat",
    ]
    config = load_config("grpo", words, complete=False).config
    tools = [
        f"{rollout}.workflow_kwargs.tools: {name}" for name in ("my_tools:weather", "my_tools:time")
    ]
    assert pipeline_code(config) == tools and named_code(config) == tools
    assert [name for _, name in code_of_workflow(config)] == ["my_tools:weather", "my_tools:time"]


def test_a_run_of_this_user_is_remembered_by_its_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = tmp_path / "mine.py"
    code.write_text("def compute_score(solution_str, **_):\n    return 1.0\n")
    keys = {
        "actor_rollout_ref.model.path": "builtin:tiny-arithmetic",
        "custom_reward_function.path": str(code),
    }
    config = with_values(Config(), keys)
    values = json.loads(json.dumps(to_dict(config)))
    assert not is_own_run(values)
    remember_own_run(config)
    assert is_own_run(values)
    assert not is_own_run({**values, "trainer": {**values["trainer"], "seed": 7}})
    before = code.read_text()
    code.write_text("import os\n")
    assert not is_own_run(values), "its code has changed"
    code.write_text(before)
    assert is_own_run(values)
    monkeypatch.chdir(tmp_path)
    assert not is_own_run(values)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert not is_own_run(values)
