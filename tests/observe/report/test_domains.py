"""The report of a run with several domains: whose each curve is, sums by domain, which groups of
responses it holds."""

from pathlib import Path

import pytest

from distflow.observe.report.build import report_data
from distflow.observe.report.domains import domain_table
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
    assert math["dropped"] == {"all_equal": 2}


def test_a_run_of_one_domain_has_no_more_than_before() -> None:
    one = {
        step: {n: v for n, v in values.items() if "calc" not in n} for step, values in STEPS.items()
    }
    assert domain_table(one) == []


def test_the_report_has_a_domains_table(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", 0) as run:
        for step, values in STEPS.items():
            run.metrics(step, "train", values)
    data = report_data(tmp_path / "run")
    assert [row["name"] for row in data["domains"]] == ["lab/calc", "math"]
