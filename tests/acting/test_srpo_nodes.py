"""Nodes of SRPO: the success filter, embeddings, rewards."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch

from distflow.acting import srpo_nodes
from distflow.acting.embodied_srpo import embodied_srpo_pipeline
from distflow.config import Config, preset_config
from distflow.config.keys.algorithm import EmbodiedSamplingConfig
from distflow.config.keys.schema import with_values
from distflow.data.images import keep_pixels
from distflow.errors import UserError
from distflow.graph import Drop
from distflow.training.engine import OneRank
from tests.acting.srpo_ranks import NUMBER, episodes, shaped
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("won", "valid", "changes", "reason"),
    [
        ([1, 0, 0, 0], [1, 1, 1, 1], {}, None),
        ([1, 1, 1, 0], [1, 1, 1, 1], {}, None),
        ([0, 0, 0, 0], [1, 1, 1, 1], {}, srpo_nodes.TOO_HARD),
        ([1, 1, 1, 1], [1, 1, 1, 1], {}, srpo_nodes.TOO_EASY),
        ([1, 1, 1, 0], [1, 1, 1, 0], {}, srpo_nodes.TOO_EASY),
        ([0, 0, 0, 0], [1, 1, 1, 1], {"filter_accuracy": False}, None),
        ([1, 1, 1, 1], [1, 1, 1, 1], {"filter_accuracy": False}, None),
        ([1, 0, 0, 0], [1, 1, 1, 1], {"filter_truncated": True}, srpo_nodes.TRUNCATED),
        ([1, 0, 0, 0], [1, 1, 1, 0], {"filter_truncated": True}, None),
    ],
)
def test_groups_are_kept_by_their_share_of_successes(won, valid, changes, reason):
    truncated = torch.tensor([False, False, False, True])
    options = {"filter_accuracy": True, "filter_truncated": False, **changes}
    sampling = EmbodiedSamplingConfig(
        accuracy_lower_bound=0.25, accuracy_upper_bound=0.75, **options
    )
    keep_group: Any = srpo_nodes.embodied_sampling(Config(embodied_sampling=sampling))
    found = keep_group(torch.tensor(won).bool(), truncated, torch.tensor(valid).bool())
    assert found == (None if reason is None else Drop(reason))


def embedded(
    frames: list[list[str]], embedder: Any, valid: list[bool] | None = None
) -> dict[str, Any]:
    valid = valid or [True] * len(frames)
    work: Any = srpo_nodes.embed_episodes(
        [{"frames": own} for own in frames],
        torch.tensor(valid),
        [None] * len(frames),
        embedder=embedder,
    )

    return asyncio.run(work).batch


def test_the_embedder_sees_all_frames_in_order(tmp_path):
    paths = [keep_pixels(np.full((20, 20, 3), level, np.uint8), tmp_path) for level in (0, 51, 255)]
    found = embedded([paths, paths[:2]], lambda frames: frames[:, 0, 0, 0].sum() / len(frames))
    assert found["embeddings"] == [[102.0], [25.5]] and found["valid"].tolist() == [True, True]
    found = embedded([paths, paths[:2]], srpo_nodes.pixels)
    assert found["embeddings"] == [[1.0] * 192, pytest.approx([0.2] * 192)]


@pytest.mark.parametrize(
    ("embedder", "says"),
    [
        (lambda frames: [float("nan")], "not finite"),
        (lambda frames: [], "empty"),
        (lambda frames: 1 / 0, "ZeroDivision"),
    ],
)
def test_an_episode_without_a_finite_embedding_has_an_error_and_no_reward(tmp_path, embedder, says):
    path = keep_pixels(np.zeros((4, 4, 3), np.uint8), tmp_path)
    found = embedded([[path], [path]], embedder, [True, False])
    assert found["valid"].tolist() == [False, False] and says in found["reward_errors"][0]
    assert "no frames" in embedded([[]], embedder)["reward_errors"][0]


def test_vectors_of_several_lengths_are_refused(tmp_path):
    path = keep_pixels(np.zeros((4, 4, 3), np.uint8), tmp_path)
    with pytest.raises(UserError, match=r"\[1, 2\] numbers"):
        embedded([[path], [path, path]], lambda frames: [0.0] * len(frames))


def test_rewards_are_on_the_last_token_of_the_policy_and_only_valid_episodes_count():
    found = shaped(list(range(NUMBER)), OneRank())
    given = episodes(list(range(NUMBER)))
    for uid, won, valid in zip(
        given["uid"], given["success"].tolist(), given["valid"].tolist(), strict=True
    ):
        (first, last, unused), parts = found[uid]
        assert first == unused == 0.0 and (last == 1.0) == (won and valid)
        assert (0.0 < last < 0.6) == (valid and not won), uid
        assert {"srpo_distance", "success"} == {*parts}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_numbers_do_not_depend_on_the_ranks(tmp_path, ranks):
    run_ranks("tests.acting.srpo_ranks", ranks, tmp_path)
    parts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    wanted = json.loads(json.dumps(shaped(list(range(NUMBER)), OneRank())))
    assert all(part["metrics"] == wanted["metrics"] for part in parts)
    together = {uid: value for part in parts for uid, value in part.items()}
    assert together == wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"actor_rollout_ref.rollout.workflow": "multi_turn"}, "multi_turn.* simulator"),
        ({"algorithm.reward_scale": 2.0}, "algorithm.reward_scale: SRPO sets the rewards"),
        ({"algorithm.use_kl_in_reward": True}, "use_kl_in_reward: SRPO sets the rewards"),
    ],
)
def test_the_pipeline_refuses_what_would_change_its_rewards(change, says):
    with pytest.raises(UserError, match=says):
        embodied_srpo_pipeline(with_values(preset_config("embodied_srpo"), change))
