"""The reward `reasoning_gym` against the package's own scores; no answer is evaluated."""

import inspect
import re
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="wants the extra reasoning-gym")
pytestmark = pytest.mark.slow

from reasoning_gym.factory import DATASETS, create_dataset  # noqa: E402

from distflow.data.task_packages import GYM, write_entry  # noqa: E402
from distflow.rewards.reasoning_gym_reward import EVALUATED, EXPRESSIONS, compute_score, is_readable  # noqa: E402

# Of each kind: plain texts, numbers, tuples in the entry, those that the package evaluates.
NAMES = (
    "chain_sum",
    "leg_counting",
    "countdown",
    "rearc",
    "knights_knaves",
    "prime_factorization",
    *EVALUATED,
)


def row_of(
    name: str, index: int = 0, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The row's column, its entry and the data set."""
    settings = {"seed": 3, "size": 5, **settings}
    dataset = create_dataset(name, **settings)
    entry = dataset[index]
    return {GYM: {"name": name, "settings": settings, "entry": write_entry(entry)}}, entry, dataset


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_packages_own(name):
    row, entry, dataset = row_of(name)
    right = entry["answer"]
    said = compute_score(f"I think <answer>0</answer>, no: <answer>{entry['answer']}</answer>", row)
    assert (
        said == {"score": dataset.score_answer(right, entry), "acc": 1.0, "answer": right}
        and said["score"] == 1.0
    )
    assert compute_score(f"{right}", row)["score"] == dataset.score_answer(None, entry), (
        "no tags, no answer"
    )


def test_a_fraction_is_paid_and_not_right():
    row, entry, dataset = row_of("leg_counting")
    answer = f"{entry['answer']} legs"
    wanted = dataset.score_answer(answer, entry)
    assert 0 < wanted < 1
    assert compute_score(f"<answer>{answer}</answer>", row) == {
        "score": wanted,
        "acc": 0.0,
        "answer": answer,
    }


def test_what_the_data_set_cannot_read_is_wrong():
    row, entry, dataset = row_of("prime_factorization")
    with pytest.raises(ValueError):
        dataset.score_answer("garbage", entry)
    assert compute_score("<answer>garbage</answer>", row)["score"] == 0.0


@pytest.mark.parametrize("name", [*EVALUATED, *EXPRESSIONS])
def test_no_answer_is_evaluated(name, tmp_path):
    trace = tmp_path / "it ran"
    row, _, _ = row_of(name)

    for attack in (
        f"open({str(trace)!r}, 'w')",
        f"[open({str(trace)!r}, 'w')]",
        f"__import__('os').mkdir({str(trace)!r})",
    ):
        assert compute_score(f"<answer>{attack}</answer>", row)["acc"] == 0.0

    assert not trace.exists()


# Which evaluate what they made themselves; the last has a parser of its own.
HARMLESS = {
    "basic_arithmetic",
    "bitwise_arithmetic",
    "codeio",
    "number_sorting",
    "propositional_logic",
}


def test_those_that_evaluate_are_known():
    """A version of the package with others fails here."""
    found = set()
    for name, (dataset, _) in DATASETS.items():
        code = inspect.getsource(inspect.getmodule(dataset))  # type: ignore[arg-type]  # it has one
        if re.search(r"\b(eval|exec|sympify|parse_expr|parse_latex)\(", code):
            found.add(name)
    assert found == {*EVALUATED, *EXPRESSIONS, *HARMLESS}


def test_arithmetic_is_read_and_nothing_else():
    readable = ("3 + 4*(2 - 1)/5", "2*x**2 + sin(x)/3 - 4.5", "x^2 + C", "-7", "", None)
    assert all(is_readable("simple_integration", answer) for answer in readable)
    refused = (
        "os",
        "x.y",
        "().__class__",
        "'a'",
        "[1]",
        "lambda: 1",
        "a if b else c",
        "1;2",
        "x" * 2000,
        "é",
    )
    assert not any(is_readable("simple_integration", answer) for answer in refused)


def test_a_row_of_other_data_is_told():
    with pytest.raises(ValueError, match="reasoning-gym:NAME"):
        compute_score("<answer>4</answer>", {})
