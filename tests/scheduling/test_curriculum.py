"""The curriculum: what it is told, what it may return, what it keeps."""

import json
from fractions import Fraction

import pytest

from distflow.errors import UserError
from distflow.scheduling.curriculum import (
    Accuracy,
    Curriculum,
    CurriculumPlan,
    Progress,
    learnability,
    load_curriculum,
)

HALF = [Fraction(1, 2)] * 2


def by_share(progress, step, state):
    """For the tests: who gets less right has more, and the state holds what it was told."""
    state.setdefault("seen", []).append(
        [step, {name: known.accuracy for name, known in progress.items()}]
    )
    return {name: 1 - (known.mean_accuracy or 0) for name, known in progress.items()}


def made(function, saved=None, **options):
    return Curriculum(
        CurriculumPlan(f"{__name__}:{function}", **options), {"math": 3.0, "code": 1.0}, saved
    )


def test_by_hand():
    """Two groups of math, 1 of 4 and 3 of 4 right; one of code without verdicts. Then nothing of
    math, all of code."""
    curriculum = made("by_share", smoothing=0.75)
    for group in (Accuracy(1, 4), Accuracy(3, 4)):
        curriculum.count("math", group)
    curriculum.count("code", Accuracy(0, 0))
    shares, known = curriculum.shares(1, HALF)
    assert known == {
        "math": Progress(3.0, 0.5, 0.5, 3 / 16, 0.5, 3 / 16, 8),
        "code": Progress(1.0, 0.5, None, None, None, None, 0),
    }
    assert shares == [Fraction(333333, 10**6), Fraction(666667, 10**6)]
    curriculum.count("code", Accuracy(2, 2))
    _, known = curriculum.shares(2, shares)
    assert known["math"] == Progress(3.0, 0.333333, None, None, 0.5, 3 / 16, 8)
    assert known["code"] == Progress(1.0, 0.666667, 1.0, 0.0, 1.0, 0.0, 2)
    curriculum.count("code", Accuracy(0, 2))
    _, known = curriculum.shares(3, shares)
    assert known["code"].mean_accuracy == 0.75 and known["code"].accuracy == 0
    seen = [
        [1, {"math": 0.5, "code": None}],
        [2, {"math": None, "code": 1}],
        [3, {"math": None, "code": 0}],
    ]
    assert curriculum.saved_curriculum()["state"] == {"seen": seen}


def test_it_goes_on_from_what_it_saved():
    first = made("by_share")
    groups = [Accuracy(1, 3), Accuracy(0, 2), Accuracy(5, 7)]
    first.count("math", groups[0])
    first.shares(1, HALF)
    first.count("math", groups[1])
    second = made("by_share", json.loads(json.dumps(first.saved_curriculum())))
    for each in (first, second):
        each.count("math", groups[2])
        each.count("code", groups[0])
    assert (
        first.shares(2, HALF) == second.shares(2, HALF)
        and first.saved_curriculum() == second.saved_curriculum()
    )


def test_the_order_in_which_groups_end_changes_nothing():
    groups = [Accuracy(right, judged) for judged in range(1, 9) for right in range(judged + 1)]
    told = []
    for order in (groups, groups[::-1], groups[::2] + groups[1::2]):
        curriculum = made("by_share")
        for group in order:
            curriculum.count("math", group)
        told.append(curriculum.shares(1, HALF))
    assert told[0] == told[1] == told[2]


def test_learnability():
    """What half of the answers get right is worth most; what is not known as much; the least is a
    fifth of that."""
    known = {
        "half": Progress(1, 0.2, mean_learnability=0.25),
        "new": Progress(2, 0.2),
        "some": Progress(1, 0.2, mean_learnability=0.1),
        "solved": Progress(4, 0.2, mean_learnability=0.0),
    }
    assert learnability(known, 7, {}) == {"half": 0.25, "new": 0.5, "some": 0.1, "solved": 0.2}
    assert made("by_share") and Curriculum(CurriculumPlan("learnability"), {"a": 1.0})


def fails(progress, step, state):
    return {"math": 1 / 0}


def leaves(state):
    def function(progress, step, kept):
        kept.update(state)
        return {"math": 1, "code": 1}

    return function


def returns(value):
    return lambda progress, step, state: value


nothing = returns(None)
listed = returns([1, 2])
unknown = returns({"math": 1, "cod": 2, "code": 1})
lacks = returns({"math": 1})
negative = returns({"math": 1, "code": -0.5})
zero = returns({"math": 0, "code": 0.0})
nan, text, infinite = [
    returns({"math": value, "code": 1}) for value in (float("nan"), "1", float("inf"))
]
an_object = leaves({"a": object()})
a_tuple = leaves({"a": (1, 2)})
not_a_number = leaves({"a": float("nan")})


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "fails",
            (
                r"failed: ZeroDivisionError: division by zero \(at "
                r"test_curriculum.py:\d+\)"
            ),
        ),
        ("nothing", "returned None, not a mapping"),
        ("listed", r"returned \[1, 2\], not a mapping"),
        ("unknown", "gave a weight to 'cod', which is not a domain of the run, did you mean code"),
        ("lacks", "gave no weight to 'code'; 0 suspends a domain"),
        ("negative", "gave 'code' the weight -0.5, not a finite number"),
        ("nan", "gave 'math' the weight nan"),
        ("infinite", "gave 'math' the weight inf"),
        ("text", "gave 'math' the weight '1'"),
        ("zero", "gave every domain the weight 0"),
        ("an_object", "left a state that JSON cannot represent: Object of type object"),
        ("a_tuple", r"left a state that JSON would change: {'a': \(1, 2\)}"),
        ("not_a_number", "left a state that JSON cannot represent"),
    ],
)
def test_what_it_may_not_do(function, said):
    curriculum = made(function)
    curriculum.count("math", Accuracy(1, 2))
    before = curriculum.saved_curriculum()
    with pytest.raises(
        UserError, match=rf"^data.curriculum.function=.*:{function}: after step 5 .*{said}"
    ) as found:
        curriculum.shares(5, HALF)
    assert (
        "start the same command again" in str(found.value)
        and curriculum.saved_curriculum() == before
    )


def test_one_that_is_not_there():
    with pytest.raises(UserError, match="data.curriculum.function: .*'by_shares'.*'by_share'"):
        made("by_shares")


def test_a_function_with_other_parameters_is_refused_before_the_start(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def one(progress):\n    return {}\n\n\ndef any_(*given):\n    return {}\n"
    )
    with pytest.raises(UserError, match=r"one'.*\(progress, step, state\)"):
        load_curriculum(f"{tmp_path}/mine.py:one")
    assert load_curriculum(f"{tmp_path}/mine.py:any_")
