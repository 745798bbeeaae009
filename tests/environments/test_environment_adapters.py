"""A registered environment of the package gymnasium, unchanged, by its id."""

import pytest

from distflow.environments.environment_workflow import EnvironmentWorkflow
from distflow.errors import UserError
from tests.environments.test_environment_workflow import given, play

pytestmark = pytest.mark.slow
pytest.importorskip("gymnasium", reason="wants gymnasium: make test-slow")

SHORTEST = ("1", "down: 1", "2", "1", "2", "2")
"""Moves over the frozen lake of 4 × 4 that miss its holes: 1 is down, 2 is right."""


@pytest.mark.parametrize(
    ("moves", "score", "turns"),
    [(SHORTEST, 1.0, 6), (("2", "1"), 0.0, 2), (("nine", "2", "1"), 0.0, 3)],
)
def test_the_frozen_lake_is_crossed_or_not(moves, score, turns):
    workflow = EnvironmentWorkflow(
        env="FrozenLake-v1", env_kwargs={"is_slippery": False, "render_mode": None}
    )
    found, chat = play(workflow, moves, seed=0)
    assert (found, chat.turns, chat.finish_reason) == (score, turns, "stop")

    if moves[0] == "nine":
        assert "That is no action. Write a number from 0 to 3." in given(chat)[1]
    else:
        assert ("4" if moves[0] == "1" else "1") in given(chat)[1], "the number of the field"


def test_a_module_that_registers_environments_at_its_import_is_named_before_the_id(
    tmp_path, monkeypatch
):
    lake = "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv"
    text = (
        f"import gymnasium\ngymnasium.register('Lake-v0', {lake!r}, kwargs={{'is_slippery': "
        f"False}})\n"
    )
    (tmp_path / "own_lakes.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found, chat = play(EnvironmentWorkflow(env="own_lakes:Lake-v0"), SHORTEST, seed=0)
    assert (found, chat.turns) == (1.0, 6)
    with pytest.raises(UserError, match="package:ID"):
        EnvironmentWorkflow(env="Lake-v0")
