"""Nodes of episodes in simulators: their columns, and rewards on the tokens of actions."""

from typing import Any

import pytest
import torch

from distflow.acting import episode_columns


def test_columns_of_episodes():
    parts = [
        {"success": 1.0, "env_steps": 7.0, "episode_len": 2.0},
        {},
        {"success": 0.0, "env_steps": 2.0},
    ]
    found: Any = episode_columns.simulator_columns(
        parts, [{"instruction": "put/it\nthere"}, {}, {"instruction": "go"}]
    )
    assert {name: column.tolist() for name, column in found.batch.items()} == {
        "success": [True, False, False],
        "env_steps": [7, 0, 2],
        "finish_step": [7, 0, 2],
        "episode_len": [2, 0, 0],
    }
    assert found.metrics == {
        "acting/env_steps": 9.0,
        "acting/success/put it there": 1.0,
        "acting/success/go": 0.0,
    }


@pytest.mark.parametrize(
    ("dim", "wanted"),
    [
        (
            2,
            [
                [0.0, 0.5, 0.0, 0.25, 0.0, 0.0, 0.25, 1.0, 0.0],
                [0.0, 0.0, 0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            ],
        ),
        (
            None,
            [
                [0.0, 0.0, 0.0, 0.75, 0.0, 0.0, 0.0, 1.25, 0.0],
                [0.0, 0.0, 0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            ],
        ),
    ],
)
def test_rewards_are_on_the_last_token_of_each_action_or_chunk(dim, wanted):
    """Two actions and one; a token that is no action, which ended the first episode; one without a
    score, whose columns are padded with zeros."""
    turns = torch.tensor([[0, 0, 0, 0, -1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1, 0, 1, 1, 1, 0], [1.0, 1, 1, 1, 0, 0, 0, 0, 0]])
    extra = [{"step_rewards": [[0.5, 0.25], [0.25]]}, {}]
    found = episode_columns.reward_steps(torch.tensor([2.0, -3.0]), extra, turns, mask, dim=dim)
    assert found.tolist() == wanted


def test_equal_scores_stay_equal_where_their_parts_are_not_exact():
    turns = torch.tensor([[0] * 6] * 2)
    extra = [{"step_rewards": [[0.1, 0.2, 0.3]]}, {"step_rewards": [[0.3, 0.1, 0.2]]}]
    found = episode_columns.reward_steps(
        torch.tensor([0.6, 0.6]), extra, turns, torch.ones(2, 6), dim=2
    ).double()
    first, second = found.sum(dim=1).tolist()
    assert first == second == pytest.approx(0.6, abs=1e-6)
