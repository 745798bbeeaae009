"""The report of a run with several domains: whose each curve is, sums by domain, which groups of
responses it holds."""

from pathlib import Path
from typing import Any

import pytest

from distflow.observe.report.build import report_data
from distflow.observe.report.chart_data import choose_charts
from distflow.observe.report.domains import domain_charts, domain_docs, domain_table
from distflow.observe.report.samples import thin_samples
from distflow.observe.reward_remarks import failure, in_short, is_right, remarks
from distflow.observe.run_reader import Timeline
from distflow.observe.writing.run_folder import RunFolder

# The domain `math` is called like a part; `lab/calc` lies below no domain of its own.
STEPS = {
    step: {
        "reward/mean_score": step / 10,
        "reward/math/mean": 0.1 * step,
        "reward/format/mean": 0.2 * step,
        "reward/math/mean_score": 0.3 * step,
        "reward/math/math": 0.4 * step,
        "reward/math/format": 0.5 * step,
        "reward/lab/calc/mean_score": 0.6 * step,
        "reward/lab/calc/math": 0.6 * step,
        "domains/math/groups": 3.0,
        "domains/lab/calc/groups": 1.0,
        "domains/math/calls": 12.0,
        "domains/math/errors": float(step == 2),
        "domains/math/timeouts": 0.0,
        "domains/math/dropped/all_equal": float(step // 2),
        "domains/math/issued": 3.0 * step,
        "val_correct/all/mean": 0.2,
        "val_correct/math/mean": 0.1 * step,
        "val_correct/math/pass@2": 0.2,
        "val_correct/math/pass@16": 0.05 * step,
    }
    for step in range(1, 5)
}
COLUMNS = {name: [values[name] for values in STEPS.values()] for name in STEPS[1]}


def test_each_curve_says_which_domain_and_part_it_is() -> None:
    charts = {chart["question"]: chart["labels"] for chart in domain_charts(COLUMNS)}
    assert charts["What do the parts of the reward score, over all domains?"] == {
        "reward/format/mean": "format",
        "reward/math/mean": "math",
    }
    assert charts["What makes up the reward of math?"] == {
        "reward/math/format": "format",
        "reward/math/math": "math",
    }
    assert charts["In which domains does the reward rise?"] == {
        "reward/lab/calc/mean_score": "lab/calc",
        "reward/math/mean_score": "math",
    }
    assert charts["For how many problems is one of k responses correct?"] == {
        "val_correct/math/pass@16": "math pass@16"
    }
    assert charts["Which groups were dropped, by domain?"] == {
        "domains/math/dropped/all_equal": "math: all_equal"
    }
    # What would only be the reward of the domain again is no chart.
    assert not [question for question in charts if "reward of lab/calc" in question]
    chosen, others = choose_charts(COLUMNS, domain_charts(COLUMNS))
    names = [name for chart in chosen for name in chart["names"]] + others
    assert sorted(names) == sorted(COLUMNS), "each metric once, none lost"


def test_what_a_mean_is_of_is_said_in_words() -> None:
    docs = domain_docs(COLUMNS)
    assert docs["reward/math/mean"] == "mean of the part math of the reward, over all domains"
    assert docs["reward/math/math"] == "mean of the part math in the domain math"
    assert docs["reward/math/mean_score"] == "mean reward of the domain math"
    assert docs["reward/lab/calc/math"] == "mean of the part math in the domain lab/calc"


def test_a_domain_has_one_colour_in_all_charts() -> None:
    colors: dict[str, set[int]] = {}
    for chart in domain_charts(COLUMNS):
        for name, color in chart.get("colors", {}).items():
            colors.setdefault(chart["labels"][name], set()).add(color)
    assert colors == {"lab/calc": {0}, "math": {1}}


def test_a_part_called_mean_of_all_domains_is_a_part() -> None:
    columns = {**COLUMNS, "reward/mean/mean": [0.0], "reward/lab/calc/mean": [1.0]}
    charts = {chart["question"]: chart["labels"] for chart in domain_charts(columns)}
    assert "reward/mean/mean" in charts["What do the parts of the reward score, over all domains?"]
    assert charts["What makes up the reward of lab/calc?"]["reward/lab/calc/mean"] == "mean"


def test_the_row_of_a_domain() -> None:
    calc, math = domain_table(STEPS)
    assert (calc["name"], calc["groups"], calc["share"], calc["calls"], calc["accuracy"]) == (
        "lab/calc",
        4,
        0.25,
        None,
        None,
    )
    assert (math["groups"], math["share"], math["calls"], math["errors"], math["timeouts"]) == (
        12,
        0.75,
        48,
        1,
        0,
    )
    assert math["reward"] == pytest.approx([0.3, 1.2]) and math["accuracy"] == pytest.approx(
        [0.1, 0.4]
    )
    assert (math["k"], math["best"]) == (16, pytest.approx([0.05, 0.2])) and math["dropped"] == {
        "all_equal": 2
    }


def test_a_run_of_one_domain_has_no_more_than_before() -> None:
    one = {
        step: {n: v for n, v in values.items() if "calc" not in n} for step, values in STEPS.items()
    }
    assert domain_table(one) == [] and domain_charts({name: COLUMNS[name] for name in one[1]}) == []


def sample(uid: str, **changes: Any) -> dict[str, Any]:
    return {
        "uid": uid,
        "prompt": f"p{uid}",
        "response": "x" * 1500,
        "score": 0.0,
        "domain": "a",
        **changes,
    }


def test_of_many_groups_each_domain_and_some_failures_are_there(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", 0) as run:
        for step in range(1, 61):
            rows = [sample(f"{g}-{i}", response="x" * 300) for g in range(100) for i in range(4)]
            rows[200]["errors"] = "judge: down"
            rows[300]["errors"] = "no score within 10 s"
            for row in rows[40:60]:
                row["domain"] = "rare"
            run.samples(step, rows)
    found = thin_samples(tmp_path / "run", Timeline(), 400_000)
    assert (
        found["num_groups"],
        found["num_responses"],
        found["num_files"],
        found["all_files"],
    ) == (
        4_000,
        16_000,
        40,
        60,
    )
    responses = [response for group in found["groups"] for response in group["responses"]]
    assert {response.get("failure") for response in responses} == {None, "error", "timeout"}
    assert {group["domain"] for group in found["groups"]} == {"a", "rare"}
    kinds = {group["step"] for group in found["groups"]}
    assert len(kinds) == 40 and {1, 60} <= kinds


def test_what_was_said_is_told_by_part() -> None:
    row = {
        "reward_parts": {"lib/mine.py:judge": 1.0, "math": 0.0},
        "extra": {
            "lib/mine.py:judge/why": "x",
            "math/extracted": None,
            "math/wanted": "7",
            "math/acc": 0.0,
        },
        "score": 1.0,
        "acc": 0.0,
    }
    assert remarks(row) == {
        "lib/mine.py:judge": {"why": "x"},
        "math": {"extracted": None, "wanted": "7"},
    }
    assert (
        in_short(row) == "math: no answer, wanted 7"
        and is_right(row) is False
        and failure(row) is None
    )
    assert (
        failure({"errors": "no score within 2 s"}) == "timeout"
        and failure({"errors": ["judge: x"]}) == "error"
    )
    assert in_short({"errors": "judge:\n\x1b[2J"}) == "judge:⏎\\x1b[2J"
    case = {"case": "f(1)", "why": "it returned 2", "printed": ""}
    assert in_short({"extra": {"code/failed": [case]}}) == "code: f(1): it returned 2"
    kept = {"extra": {"ifeval/followed": {"no_comma": False, "words": True}}}
    assert in_short(kept) == "ifeval: not followed: no_comma"
    assert (
        in_short({"extra": "hostile", "reward_parts": 3}) == ""
        and is_right({"score": "NaN"}) is None
    )


def test_the_report_has_a_domains_table(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", 0) as run:
        for step, values in STEPS.items():
            run.metrics(step, "train", values)
    data = report_data(tmp_path / "run")
    assert [row["name"] for row in data["domains"]] == ["lab/calc", "math"]
    assert "In which domains does the reward rise?" in [
        chart["question"] for chart in data["charts"]
    ]
