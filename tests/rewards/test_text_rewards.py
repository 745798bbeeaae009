"""`exact_match`, `format`, `length` and `repetition`."""

import pytest

from distflow.rewards.text_rewards import exact_match, has_format, length, repetition


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
    assert exact_match("d", response, gold) == score


@pytest.mark.parametrize("gold", [None, [], [None], {"a": 1}])
def test_exact_match_needs_a_ground_truth(gold):
    with pytest.raises(ValueError, match="data.answer_key"):
        exact_match("d", "a", gold)


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
    assert has_format("d", response, None, {"format_regex": pattern} if pattern else {}) == score


@pytest.mark.parametrize("broken", ["(", 7])
def test_a_broken_expression_is_an_error_not_a_wrong_format(broken):
    with pytest.raises(ValueError, match="format_regex"):
        has_format("d", "a", None, {"format_regex": broken})


@pytest.mark.parametrize(
    ("response", "options", "score"),
    [
        ("", {}, 0),
        ("", {"at_least": 0}, 1),
        ("abcd", {"at_most": 4}, 1),
        ("abcde", {"at_most": 4}, 0),
        ("abcde", {"at_most": 4, "slope": 4}, 0.75),
        ("abcdefgh", {"at_most": 4, "slope": 4}, 0),
        ("a b", {"at_least": 4, "slope": 4, "unit": "words"}, 0.5),
        (" a  b\nc d ", {"at_least": 4, "at_most": 4, "unit": "words"}, 1),
    ],
)
def test_length(response, options, score):
    assert length(response, **options) == score


@pytest.mark.parametrize(
    ("response", "options", "score"),
    [
        ("", {}, 0),
        ("a b", {}, 0),
        ("a b c", {}, 0),
        ("A b c a B C", {}, 1 - 3 / 4),  # abc bca cab abc
        ("a " * 100, {}, 1 - 1 / 98),
        ("a b a b", {"n": 1}, 1 - 2 / 4),
        ("你好你好你好", {"n": 2, "unit": "characters"}, 1 - 2 / 5),
    ],
)
def test_repetition(response, options, score):
    assert repetition(response, **options) == pytest.approx(score)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (length, {"unit": "tokens"}),
        (length, {"at_least": 5, "at_most": 4}),
        (length, {"slope": -1}),
        (repetition, {"n": 0}),
        (repetition, {"unit": "tokens"}),
    ],
)
def test_options_that_make_no_sense_are_an_error_not_a_score(function, options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        function("a b c", **options)
