"""What is measured of a step: scores over samples with a score, lengths over all, staleness."""

import torch

from distflow.runtime.sample_rows import sample_rows
from distflow.runtime.step_metrics import (
    Figures,
    batch_metrics,
    group_metrics,
    over_ranks,
    part_means,
)
from distflow.scheduling.group_states import DomainCounts, GroupCounts
from distflow.training.engine import OneRank
from tests.runtime.groups import group


def test_parts_are_means_over_the_samples_that_have_them():
    assert part_means([{"math": 1.0, "format": 0.5}, {"math": 0.0}]) == {"format": 0.5, "math": 0.5}


def test_an_episode_with_branches_is_as_long_as_its_longest_conversation():
    """From its first drawn token on: before that a fork has the tokens of another conversation."""
    batch = group(lengths=(9, 4))
    batch["forks"] = [[["1", 2], ["2", 5]], []]
    batch["response_mask"] = torch.tensor([[1.0, 1, 0, 0, 1, 0, 1, 0, 1], [1.0] * 4 + [0] * 5])
    metrics = batch_metrics(Figures.of(batch))
    assert (
        metrics["rollout/avg_response_length"] == 3.5
        and metrics["rollout/max_response_length"] == 4
    )
    assert batch.lengths("response").tolist() == [9, 4]


def test_what_became_of_a_domains_groups():
    domains = {"math": DomainCounts(6, 3, {"all_equal": 2}), "code": DomainCounts(3, aborted=2)}
    group_counts = GroupCounts(
        issued=9, running=2, complete=2, consumed=3, dropped={"all_equal": 2}, domains=domains
    )
    found = {
        name: value
        for name, value in group_metrics(group_counts, {}, 1).items()
        if name.startswith("domains/")
    }
    assert found == {
        "domains/math/issued": 6,
        "domains/math/consumed": 3,
        "domains/math/dropped/all_equal": 2,
        "domains/code/issued": 3,
        "domains/code/consumed": 0,
        "domains/code/aborted": 2,
    }


def test_counters_and_ages():
    group_counts = GroupCounts(
        issued=9, running=1, complete=2, consumed=3, dropped={"all_equal": 2, "stale": 1}, aborted=4
    )
    assert group_metrics(group_counts, {5: 3, 4: 1}, step=6) == {
        "async/enqueued": 9,
        "async/submitted": 9,
        "async/accepted": 5,
        "async/running": 1,
        "async/rejected": 3,
        "async/stale_data_count": 1,
        "async/dropped/all_equal": 2,
        "async/dropped/stale": 1,
        "async/aborted": 4,
        "async/version_start": 4,
        "async/version_end": 5,
        "async/version_diff/mean": 1.25,
        "async/version_diff/max": 2,
        "async/staleness/0": 0,
        "async/staleness/1": 0.75,
        "async/staleness/2": 0.25,
    }


class OtherRank(OneRank):
    """Gathers what a second rank has."""

    size = 2

    def __init__(self, other: dict[str, tuple[float, float]]) -> None:
        self.other = other

    def gather(self, value):  # type: ignore[no-untyped-def]
        return [value, self.other]


def test_what_nodes_measured_are_means_over_ranks_by_their_weights():
    """But the largest of a metric that is a maximum, whatever its weight."""
    measured = [
        ({"a": 1.0, "b": 8.0, "reward/max": 2.0}, 3.0),
        ({"b": 2.0, "c": float("nan")}, 0.0),
    ]
    assert over_ranks(measured[:1], OneRank()) == {"a": 1.0, "b": 8.0, "reward/max": 2.0}
    other = {"a": (5.0, 1.0), "b": (4.0, 2.0), "c": (7.0, 0.0), "d": (3.0, 1.0)}
    found = over_ranks(measured, OtherRank({**other, "reward/max": (6.0, 0.0)}))
    assert found == {"a": 2.0, "b": 4.0, "c": 0.0, "d": 3.0, "reward/max": 6.0}


def test_a_domain_called_like_a_part_has_metrics_of_its_own():
    batch = group(lengths=(1, 1))
    batch["token_level_scores"] = torch.tensor([[1.0], [0.0]])
    batch["domain"] = ["math", "math"]
    batch["reward_parts"] = [{"math": 1.0, "format": 0.0}, {"math": 0.0, "format": 1.0}]
    found = batch_metrics(Figures.of(batch))
    for name in ("mean", "math", "mean_score"):
        assert found[f"reward/math/{name}"] == 0.5


def test_a_reward_that_a_node_changed_is_shown_beside_the_score():
    batch = group(lengths=(2, 1, 1), valid=(True, True, False))
    batch["token_level_scores"] = torch.tensor([[0.0, 1.0], [0.5, 0.0], [9.0, 0.0]])
    assert "reward/mean_reward" not in batch_metrics(Figures.of(batch))
    assert all("reward" not in row for row in sample_rows(batch))

    batch["token_level_rewards"] = torch.tensor([[-0.25, 0.75], [0.25, 7.0], [8.75, 0.0]])
    found = batch_metrics(Figures.of(batch))
    assert found["reward/mean_score"] == 0.75 and found["reward/mean_reward"] == 0.375
    assert [row["reward"] for row in sample_rows(batch)] == [0.5, 0.25, None]
    assert [row["score"] for row in sample_rows(batch)] == [1.0, 0.5, None]


def test_the_share_of_a_response_that_the_loss_leaves_out():
    batch = group(lengths=(2, 4, 1), valid=(True, True, False))
    assert "masked" not in sample_rows(batch)[0], "nothing was trained on yet"
    batch["advantages"] = torch.zeros(3, 4)
    batch["loss_mask"] = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert [row["masked"] for row in sample_rows(batch)] == [0.0, 0.75, 1.0]
