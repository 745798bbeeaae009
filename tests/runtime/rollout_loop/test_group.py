"""A group in the rollout loop: what nodes write and read before the queue makes columns of it."""

import pytest
import torch

from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Sample, Segment
from distflow.graph.fields import Axis
from distflow.rollout.engine import Stream
from distflow.runtime.rollout_loop.group import Group
from distflow.scheduling.group_states import PromptGroup
from tests.runtime.groups import PARAMS, group_with_responses, prompt_group, waiting_group


def test_a_group_without_responses_is_its_prompts():
    group = waiting_group(prompt_group(5, size=3))
    batch = group.batch()
    assert batch["uid"] == ["5-0", "5-1", "5-2"] and batch["group_index"].tolist() == [5, 5, 5]
    assert batch["prompt_ids"].tolist() == [[1, 2, 3]] * 3 and batch.lengths(
        Axis.RESPONSE
    ).tolist() == [0, 0, 0]
    assert batch["ground_truth"] == ["r0"] * 3 and batch["extra_info"] == [{"row": 5}] * 3
    assert (group.stream.name, group.stream.row, len(group)) == ("train", 5, 3)


def test_the_greedy_group_wants_one_response_and_shares_nothing_that_is_written():
    group = group_with_responses()
    group.batch()
    greedy = group.greedy()
    assert len(greedy.batch()) == 1
    greedy.write({"advantages": torch.zeros(0)})
    greedy.measured.append(({"mine": 1.0}, 1.0))
    assert greedy.params.greedy and greedy.wanted == (0,) and greedy.samples == []
    assert (
        not group.params.greedy
        and len(group.samples) == 2
        and group.written == {}
        and group.measured == []
    )


def test_what_is_drawn_follows_from_the_seed_and_the_prompt_group_s_stream_epoch_and_row():
    of = PromptGroup(17, 2, 5, 3, 0, stream="val/sums/sampled")
    group = Group(of, PromptRow(5, (1, 2, 3), "p", "r0", "default", {}), PARAMS, seed=9)
    assert group.stream == Stream(9, "val/sums/sampled", 2, 5) and group.wanted == (0, 1, 2)
    assert group.greedy().stream == group.stream


def test_columns_are_read_as_tensors_and_lists_by_their_names_and_aliases():
    group = group_with_responses()
    group.write({"scores": [1, 0.5], "data_source": ["a", "b"], "reward_extra": [{}, {"k": 1}]})
    assert isinstance(group["scores"], torch.Tensor) and group["scores"].dtype is torch.float64
    assert group["scores"].tolist() == [1.0, 0.5]
    assert group["data_source"] == group["domain"] == ["a", "b"] and group["reward_extra"] == [
        {},
        {"k": 1},
    ]
    assert group["index"].tolist() == [0, 0] and group["response_mask"].shape == (2, 4)  # type: ignore[attr-defined]
    assert (
        "index" in group and "data_source" in group and "scores" in group and "values" not in group
    )
    assert group.batch()["domain"] == ["a", "b"]


def test_one_score_a_sample_lies_on_the_last_token_and_a_rewrite_moves_with_it():
    group = group_with_responses()
    group.write({"scores": [5.0, 7.0]})
    assert group["token_level_scores"].tolist() == [[0, 5, 0, 0], [0, 0, 0, 7]]  # type: ignore[attr-defined]
    group.write({"scores": [1.0, 2.0]})
    batch = group.batch()
    assert batch["token_level_scores"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 2]]
    assert batch["token_level_rewards"].tolist() == batch["token_level_scores"].tolist()


def test_a_score_is_never_after_the_last_token_of_the_policy():
    """Estimators read the policy's tokens only: a score on a tool's would be lost."""
    group = waiting_group(prompt_group(size=3))
    answer = Segment("policy", (4, 5), (-1.0,) * 2, (-1.0,) * 2, (0, 0))
    tool = Segment("tool", (6, 7))
    prompt = Segment("prompt", (1, 2, 3))
    turns = ([prompt, answer, tool], [prompt, answer, tool, answer], [prompt, tool])
    group.set_samples([Sample(f"0-{i}", 0, segments) for i, segments in enumerate(turns)])
    group.write({"scores": [5.0, 7.0, 9.0]})
    assert group.batch()["token_level_scores"].tolist() == [
        [0, 5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 7],
        [0] * 6,
    ]
    group.set_samples([Sample(f"0-{i}", 0, [prompt]) for i in range(3)])
    assert group.batch()["token_level_scores"].shape == (3, 0), (
        "responses without any token have no place for a score"
    )


def test_dense_scores_give_the_score_of_each_sample():
    group = group_with_responses()
    dense = torch.tensor([[1.0, 2, 0, 0], [0, 0, 3, 0.5]])
    group.write({"token_level_scores": dense})
    assert group["scores"].tolist() == [3.0, 3.5]  # type: ignore[attr-defined]
    assert group.batch()["token_level_rewards"].tolist() == dense.tolist()
    group.write({"token_level_rewards": dense / 2})
    assert group.batch()["token_level_rewards"].tolist() == (dense / 2).tolist()
    assert group.batch()["token_level_scores"].tolist() == dense.tolist(), "rewards are not scores"
    group.write({"scores": [1.0, 2.0]})
    assert group["scores"].tolist() == [1.0, 2.0], "a score that was written is no sum"  # type: ignore[attr-defined]


def test_the_score_of_a_sample_is_the_sum_over_the_policy_s_tokens():
    group = group_with_responses()
    mask = torch.ones_like(group.batch()["response_mask"])
    mask[:, -1] = 0.0
    per_token = torch.ones_like(mask)
    per_token[:, -1] = float("nan")
    group.write({"response_mask": mask, "token_level_scores": per_token})
    batch = group.batch()
    assert batch["scores"].tolist() == batch["response_mask"].sum(-1).tolist()


@pytest.mark.parametrize(
    "columns",
    [
        {"scores": [1.0]},
        {"scores": torch.zeros(3)},
        {"scores": torch.zeros(2, 2)},
        {"scores": 1.0},
        {"scores": ["high", "low"]},
        {"scores": [1.0, None]},
        {"reward_extra": [{}]},
        {"data_source": ["a", "b", "c"]},
        {"advantages": torch.zeros(2, 5)},
        {"advantages": torch.zeros(6), "returns": torch.zeros(7)},
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_written_and_leaves_no_trace(columns):
    group = group_with_responses()
    group.write({"valid": [True, False]})
    with pytest.raises((ValueError, TypeError)):
        group.write(columns)
    assert list(group.written) == ["valid"] and group.batch()["valid"].tolist() == [True, False]


def test_a_sample_s_text_and_reason_come_with_its_tokens():
    group: Group = waiting_group(prompt_group(3))
    answer = Segment("policy", (8, 9), (-1.0, -2.0), (-1.5, -2.5), (4, 4))
    group.set_samples(
        [group.sample(0, answer, "text", "length"), group.sample(1, None, "", "stop")]
    )
    batch = group.batch()
    assert batch["uid"] == ["3-0", "3-1"] and batch["responses"] == ["text", ""]
    assert batch["truncated"].tolist() == [True, False] and batch["versions"].tolist() == [
        [4, 4],
        [0, 0],
    ]
    assert batch["rollout_log_probs"][0].tolist() == [-1.0, -2.0]
