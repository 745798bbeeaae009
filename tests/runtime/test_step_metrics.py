"""What is measured of a step: scores over samples with a score, lengths over all, staleness."""

import pytest
import torch

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.runtime.step_metrics import (
    Figures,
    batch_metrics,
    equal_groups,
    group_metrics,
    over_ranks,
    part_means,
    sample_rows,
    score_metrics,
    staleness_shares,
)
from distflow.scheduling.group_states import DomainCounts, GroupCounts
from distflow.training.engine import OneRank
from tests.runtime.groups import group


def test_scores_of_samples_without_a_score_are_left_out() -> None:
    metrics = score_metrics(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    assert metrics == {
        "reward/mean_score": 2.0,
        "reward/std": 1.0,
        "reward/max": 3.0,
        "reward/min": 1.0,
    }
    assert score_metrics(torch.tensor([1.0]), torch.tensor([False])) == {}
    cancelling = torch.tensor([3e38, 3.0, -3e38, 3e38, -3e38, -0.5], dtype=torch.float64)
    assert score_metrics(cancelling, cancelling != 0)["reward/mean_score"] == 2.5 / 6
    assert part_means([{"a": score} for score in cancelling.tolist()]) == {"a": 2.5 / 6}


def test_groups_whose_responses_all_scored_the_same_are_counted() -> None:
    values = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, 2.0, 3.0, 3.0])
    groups = torch.tensor([4, 4, 7, 7, 9, 9, 2, 2])
    valid = torch.tensor([True, True, True, True, True, False, True, True])
    # 4 and 2 are equal, 7 is not, and of 9 only one score is there.
    assert equal_groups(values, valid, groups) == {"reward/frac_reward_zero_std": 2 / 3}
    assert equal_groups(values[:1], valid[:1], groups[:1]) == {}


def test_a_reward_on_a_token_that_no_policy_made_is_not_measured() -> None:
    batch = group(lengths=(2, 3))
    batch["response_mask"] = torch.tensor([[1.0, 0, 0], [1, 1, 0]])
    batch["token_level_scores"] = torch.tensor([[1.0, 5, 0], [0, 2, float("nan")]])
    assert batch_metrics(Figures.of(batch))["reward/mean_score"] == 1.5
    assert [row["score"] for row in sample_rows(batch)] == [1.0, 2.0]


def test_parts_are_means_over_the_samples_that_have_them() -> None:
    assert part_means([{"math": 1.0, "format": 0.5}, {"math": 0.0}]) == {"format": 0.5, "math": 0.5}


def test_an_episode_with_branches_is_as_long_as_its_longest_conversation() -> None:
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


def test_a_batch() -> None:
    batch = group(lengths=(2, 4), valid=(True, False))
    batch["token_level_scores"] = torch.tensor([[0.0, 1.0, 0, 0], [0, 0, 0, 9.0]])
    batch["reward_parts"] = [{"math": 1.0}, {}]
    metrics = batch_metrics(Figures.of(batch))
    assert (
        metrics["rollout/avg_response_length"] == 3 and metrics["rollout/max_response_length"] == 4
    )
    assert metrics["rollout/avg_prompt_length"] == 3 and metrics["rollout/truncated"] == 0
    assert metrics["reward/mean_score"] == 1.0 and metrics["reward/math/mean"] == 1.0


def test_domains_are_told_apart() -> None:
    batch = group(lengths=(3, 3, 3, 3))
    batch["domain"] = ["math", "math", "code", "code"]
    batch["group_index"] = torch.tensor([4, 4, 6, 7])
    batch["valid"] = torch.tensor([True, False, True, True])
    batch["token_level_scores"] = torch.tensor([[0, 0, 1.0], [0, 0, 9.0], [0, 0, 2.0], [0, 0, 4.0]])
    batch["reward_parts"] = [
        {"exact": 1.0},
        {},
        {"tests": 2.0, "format": 0.0},
        {"tests": 4.0, "format": 1.0},
    ]
    found = batch_metrics(Figures.of(batch))
    by_domain = {name: value for name, value in found.items() if "math" in name or "code" in name}
    assert by_domain == {
        "domains/math/groups": 1,
        "reward/math/mean_score": 1.0,
        "reward/math/exact": 1.0,
        "domains/code/groups": 2,
        "reward/code/mean_score": 3.0,
        "reward/code/tests": 3.0,
        "reward/code/format": 0.5,
    }
    assert not [name for name in batch_metrics(Figures.of(group())) if name.startswith("domains/")]


def test_what_became_of_a_domains_groups() -> None:
    domains = {"math": DomainCounts(6, 3, {"all_equal": 2}), "code": DomainCounts(3, 0)}
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
    }


def test_counters_and_ages() -> None:
    group_counts = GroupCounts(
        issued=9, running=1, complete=2, consumed=3, dropped={"all_equal": 2, "stale": 1}
    )
    metrics = group_metrics(group_counts, Figures.of(group()).versions, step=2)
    assert (
        metrics["async/enqueued"] == 9
        and metrics["async/accepted"] == 5
        and metrics["async/rejected"] == 3
    )
    assert metrics["async/stale_data_count"] == 1 and metrics["async/dropped/all_equal"] == 2
    assert metrics["async/version_diff/max"] == 2 and metrics["async/version_diff/mean"] == 2


def test_shares_of_tokens_by_staleness() -> None:
    shares = staleness_shares({0: 2, 2: 3})
    assert shares == {"async/staleness/0": 0.4, "async/staleness/1": 0.0, "async/staleness/2": 0.6}


def test_a_row_for_each_sample() -> None:
    batch = group(lengths=(2, 4))
    batch["advantages"] = torch.tensor([[1.0, 3.0, 0, 0], [1, 1, 1, 5.0]])
    rows = sample_rows(batch)
    assert [row["advantage"] for row in rows] == [pytest.approx(2.0), pytest.approx(2.0)]
    assert rows[0]["score"] is None and rows[0]["errors"] is None and rows[0]["reward_parts"] == {}
    assert (
        rows[1]["response_length"] == 4 and rows[1]["versions"] == [0] and rows[1]["uid"] == "0-1"
    )


def test_what_has_no_score_is_shown_without_a_score() -> None:
    batch = group(lengths=(1, 1, 1))
    batch["token_level_scores"] = torch.tensor([[1.0], [0.0], [0.25]])
    batch["acc"] = torch.tensor([1.0, 0.0, 0.0])
    batch["valid"] = torch.tensor([True, False, True])
    # the third was given a score
    batch["reward_errors"] = [None, "judge: no luck", "judge: no luck"]
    rows = sample_rows(batch)
    assert [(row["score"], row["acc"]) for row in rows] == [(1.0, 1.0), (None, None), (0.25, None)]


class OtherRank(OneRank):
    """Gathers what a second rank has."""

    size = 2

    def __init__(self, other: dict[str, tuple[float, float]]) -> None:
        self.other = other

    def gather(self, value):  # type: ignore[no-untyped-def]
        return [value, self.other]


def test_what_nodes_measured_are_means_over_ranks_by_their_weights() -> None:
    measured = [({"a": 1.0, "b": 8.0}, 3.0), ({"b": 2.0, "c": float("nan")}, 0.0)]
    assert over_ranks(measured[:1], OneRank()) == {"a": 1.0, "b": 8.0}
    other = OtherRank({"a": (5.0, 1.0), "b": (4.0, 2.0), "c": (7.0, 0.0), "d": (3.0, 1.0)})
    assert over_ranks(measured, other) == {"a": 2.0, "b": 4.0, "c": 0.0, "d": 3.0}


def test_the_figures_of_ranks_joined_are_those_of_the_whole_step() -> None:
    groups = [group(number, lengths=(2, 3 + number)) for number in range(3)]
    for number, each in enumerate(groups):
        each["token_level_scores"] = torch.ones(2, 3 + number) * number
        each["reward_parts"] = [{"math": float(number)}, {}]
    whole = Figures.of(Batch.concat(groups))
    parts = [
        Figures.of(Batch.concat(groups[:2])),
        Figures.of(groups[2]),
        Figures.of(groups[0].select([])),
    ]
    group_counts = GroupCounts(issued=3, running=0, complete=0, consumed=3, dropped={})
    for figures in (Figures.joined([Figures.of(Batch.concat(groups))]), Figures.joined(parts)):
        assert (
            batch_metrics(figures) == batch_metrics(whole)
            and figures.num_tokens == whole.num_tokens
        )
        assert group_metrics(group_counts, figures.versions, 1) == group_metrics(
            group_counts, whole.versions, 1
        )


def test_two_things_never_share_a_metric() -> None:
    """A domain called like a part is fine; a part called `mean` is not where that is so."""
    batch = group(lengths=(1, 1))
    batch["token_level_scores"] = torch.tensor([[1.0], [0.0]])
    batch["domain"] = ["math", "math"]
    batch["reward_parts"] = [{"math": 1.0, "format": 0.0}, {"math": 0.0, "format": 1.0}]
    found = batch_metrics(Figures.of(batch))
    assert (
        found["reward/math/mean"],
        found["reward/math/math"],
        found["reward/math/mean_score"],
    ) == (0.5, 0.5, 0.5)
    for name in ("mean", "mean_score"):
        batch["reward_parts"] = [{"math": 1.0, name: 0.0}, {"math": 0.0, name: 0.0}]
        with pytest.raises(UserError, match=f"'reward/math/{name}' would have two meanings"):
            batch_metrics(Figures.of(batch))


def test_the_share_of_a_response_that_the_loss_leaves_out() -> None:
    batch = group(lengths=(2, 4, 1), valid=(True, True, False))
    assert "masked" not in sample_rows(batch)[0], "nothing was trained on yet"
    batch["advantages"] = torch.zeros(3, 4)
    batch["loss_mask"] = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert [row["masked"] for row in sample_rows(batch)] == [0.0, 0.75, 1.0]
