"""A run's folder as tables: what was written is what comes back, without torch."""

import math

import pytest

import distflow
from distflow.errors import UserError
from distflow.observe.writing.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """Three steps, of which the second restart took back the last."""
    for restart, steps in ((0, (1, 2)), (1, (2, 3))):
        with RunFolder(tmp_path / "run", restart, resumed_at=-1 if restart == 0 else 1) as run:
            if restart == 0:
                run.metrics(0, "val", {"val_correct/all/mean": 0.25})

            for step in steps:
                run.metrics(
                    step,
                    "train",
                    {"reward/mean_score": step / 2 + restart, "actor/entropy": math.nan},
                )
                rows = [
                    {"uid": "0-0", "prompt": "<b>1+1=</b>", "response": "2\x1b[2J", "score": 1.0}
                ]
                run.samples(step, rows)

            run.event("warning", "look <here>", step=2)
            run.event("end", "the run finished", status="finished")

    with (tmp_path / "run" / "config.yaml").open("w") as file:
        file.write("trainer:\n  seed: 3\n")
    return tmp_path / "run"


def test_metrics_samples_and_events(folder):
    run = distflow.load_run(folder)
    assert (run.status, run.num_steps, run.config, run.facts) == (
        "finished",
        3,
        {"trainer": {"seed": 3}},
        {},
    )
    assert [(row["step"], row["reward/mean_score"]) for row in run.metrics("train")] == [
        (1, 0.5),
        (2, 2.0),
        (3, 2.5),
    ]
    assert [row["kind"] for row in run.metrics()] == ["val", "train", "train", "train"]
    assert math.isnan(run.metrics("train")[0]["actor/entropy"])  # type: ignore[arg-type]
    assert [row["step"] for row in run.samples()] == [1, 2, 3]
    assert [row["response"] for row in run.samples(step=-1)] == ["2\x1b[2J"]
    assert run.samples(split="val") == []
    assert [row["message"] for row in run.events("warning")] == ["look <here>"] * 2
    assert (run.accuracy_before, run.accuracy_after, run.checkpoints) == (0.25, None, [])


def test_findings(tmp_path):
    with RunFolder(tmp_path / "run", 0) as run:
        for step in range(1, 21):
            run.metrics(step, "train", {"actor/pg_clipfrac": 0.5 * (step > 4), "actor/ppo_kl": 0.0})

    (found,) = distflow.load_run(tmp_path / "run").findings()
    assert (found["rule"], found["level"], found["first"], found["last"]) == (
        "update-too-large",
        "warning",
        8,
        20,
    )


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.metrics("training"), "kind='training': .*'train', 'val'"),
        (lambda run: run.samples(split="test"), "split='test': .*'train', 'val'"),
        (lambda run: run.samples(step=9), "step=9: .* 3 steps"),
        (
            lambda run: run.samples(step="last"),
            "step='last': .* -1 ",
        ),
    ],
)
def test_what_a_run_does_not_have_is_no_empty_table(ask, said, folder):
    with pytest.raises(UserError, match=said):
        ask(distflow.load_run(folder))


def test_a_table_as_pandas(folder):
    run = distflow.load_run(folder)
    frame = run.metrics().to_pandas()
    assert list(frame["step"]) == [0, 1, 2, 3] and math.isnan(frame["reward/mean_score"][0])


def test_views_as_tables_and_a_comparison(folder, tmp_path):
    pytest.importorskip("duckdb", reason="the extra `ui`")
    run = distflow.load_run(folder)
    frame = run.sql("select step, response, fate from samples order by step").to_pandas()
    assert list(frame["step"]) == [1, 2, 3] and set(frame["fate"]) == {"trained"}
    assert {row["key"] for row in run.sql("from metrics")} >= {"reward/mean_score"}
    with pytest.raises(UserError, match="nothing"):
        run.sql("select nothing from metrics")

    other = tmp_path / "other"
    with RunFolder(other, 0) as written:
        for step in range(1, 41):
            written.metrics(step, "train", {"reward/mean_score": 10.0 + step % 2, "unknown": 1.0})

    compared = distflow.load_run(other).compare([run, str(other)])
    assert [(row["metric"], row["run"]) for row in compared] == [
        ("reward/mean_score", folder.name), ("reward/mean_score", "other"),
    ]  # fmt: skip
    assert (
        compared[0]["differs"] is None
        and compared[1]["differs"] is False
        and compared[1]["a"] == 10.5
    )


@pytest.mark.parametrize(
    ("name", "said"), [("nothing", "is not there"), (".", "has no file events.jsonl")]
)
def test_what_is_no_run_is_refused(name, said, tmp_path):
    with pytest.raises(UserError, match=said):
        distflow.load_run(tmp_path / name)
