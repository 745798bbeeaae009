"""The table of metrics, and how parts are combined."""

import math
import re
from typing import get_args

import pytest

from distflow.observe.metrics import (
    Kind,
    combine,
    find_metric,
    headline_table,
    headlines,
    metric_table,
)


@pytest.mark.parametrize(
    "name",
    re.split(
        r"\s+",
        """actor/loss actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/grad_norm
    actor/lr actor/reward_kl_penalty actor/kl_coef critic/vf_loss critic/grad_norm reward/mean_score
    rollout/avg_response_length async/stale_data_count async/version_diff/mean async/version_start async/version_end
    async/enqueued async/submitted async/accepted async/running async/rejected val_correct/all/mean
    val_correct/openai/gsm8k/mean timing_s/rollout timing_s/recompute_logp timing_s/ref_logp timing_s/compute_advantage
    timing_s/train_step timing_s/update_weights timing_s/save timing_s/eval throughput/tokens_per_s memory/cpu/peak""",  # noqa: E501
    ),
)
def test_every_named_metric_has_a_description(name):
    metric = find_metric(name)
    assert metric is not None and metric.doc


def test_the_first_fitting_entry_counts_and_none_is_out_of_reach():
    assert find_metric("val_correct/all/mean").name == "val_correct/all/mean"
    assert find_metric("val_correct/math/pass@8").name == "val_correct/*/pass@*"
    assert find_metric("something/else") is None
    assert [m.name for m in metric_table() if find_metric(m.name.replace("*", "x")) is not m] == []


def test_each_entry_of_the_table_says_how_parts_are_combined_and_what_it_is():
    assert {metric.kind for metric in metric_table()} <= set(get_args(Kind))
    assert all(metric.doc and isinstance(metric.unit, str) for metric in metric_table())


def test_parts_are_combined_by_kind():
    parts = [
        (
            {
                "reward/mean_score": 1.0,
                "actor/loss": 1.0,
                "timing_s/rollout": 3.0,
                "actor/lr": 0.1,
                "mine": 2.0,
            },
            3.0,
        ),
        (
            {
                "reward/mean_score": 0.0,
                "actor/loss": 2.0,
                "timing_s/rollout": 1.0,
                "actor/lr": 0.2,
                "mine": 6.0,
            },
            1.0,
        ),
        ({"async/version_start": 4.0}, 1.0),
        ({"async/version_start": 3.0}, 1.0),
    ]
    assert combine(parts) == {
        "reward/mean_score": 0.75,
        "actor/loss": 3.0,
        "timing_s/rollout": 3.0,
        "actor/lr": 0.2,
        "mine": 3.0,
        "async/version_start": 3.0,
    }


def test_a_part_without_weight_counts_nothing_even_if_it_is_nan():
    assert combine([({"reward/mean_score": math.nan}, 0.0), ({"reward/mean_score": 0.5}, 2.0)]) == {
        "reward/mean_score": 0.5
    }
    assert combine([({"x": 1.0}, 0.0), ({"x": 2.0}, 0.0)]) == {"x": 0.0}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_is_never_hidden(values):
    parts = [
        ({"timing_s/x": v, "async/version_start": v, "actor/loss": v, "reward/std": v}, 1.0)
        for v in values
    ]
    assert all(math.isnan(value) for value in combine(parts).values())


def test_headlines_take_the_first_name_that_is_there():
    found = headlines({"actor/ppo_kl": 0.5, "actor/kl_loss": 0.25, "reward/mean_score": math.nan})
    assert {line.label: line.text(value) for line, value in found.items()} == {
        "reward": "   nan",
        "kl": " 0.2500",
    }


@pytest.mark.parametrize(
    "value", [0.0, -0.25, 1.0, 12.345, 99999.5, -1e7, 1e30, 1e-30, math.inf, -math.inf, math.nan]
)
def test_a_headline_is_filled_up_to_its_width_and_never_long(value):
    assert all(line.width <= len(line.text(value)) <= 9 for line in headline_table())
