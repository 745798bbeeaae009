"""`exact_match` and `format`."""

import pytest

from distflow.rewards import exact_match_reward as exact_match
from distflow.rewards import format_reward as format


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("Paris", "Paris", 1),
        ("  Paris\n", " Paris", 1),
        ("New \n York", "New York", 1),
        (r"It is \boxed{Paris}.", "Paris", 1),
        ("thinking\n#### 12", "so\n#### 12", 1),
        ("12", 12, 1),
        ("b", ["a", "b"], 1),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("12.0", 12, 0),
        ("", "Paris", 0),
        ("c", ["a", "b"], 0),
    ],
)
def test_exact_match(response, gold, score):
    assert exact_match.compute_score("d", response, gold) == score


@pytest.mark.parametrize("gold", [None, [], [None], {"a": 1}])
def test_exact_match_needs_a_ground_truth(gold):
    with pytest.raises(ValueError, match="data.answer_key"):
        exact_match.compute_score("d", "a", gold)


@pytest.mark.parametrize(
    ("response", "pattern", "score"),
    [
        (r"so \boxed{7}", None, 1),
        (r"so \boxed{ }", None, 0),
        (r"so \boxed{7", None, 0),
        ("so 7", None, 0),
        ("<think>a\nb</think>7", r"<think>.*</think>\d", 1),
        ("x<think>a</think>7", r"<think>.*</think>\d", 0),
    ],
)
def test_format(response, pattern, score):
    assert format.compute_score("d", response, None, {"format_regex": pattern} if pattern else {}) == score


@pytest.mark.parametrize("broken", ["(", 7])
def test_a_broken_expression_is_an_error_not_a_wrong_format(broken):
    with pytest.raises(ValueError, match="format_regex"):
        format.compute_score("d", "a", None, {"format_regex": broken})
