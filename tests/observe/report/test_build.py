"""What the report says: words, numbers, chosen samples and curves, each against cases worked by
hand."""

import json
import math
import re

import pytest

from distflow.observe.findings.summary import Accuracy, describe_learning
from distflow.observe.report.build import MAX_BYTES, report_data, write_report
from distflow.observe.report.chart_data import series
from distflow.observe.report.page import embed
from distflow.observe.report.validations import before_and_after, read_validations
from distflow.observe.run_reader import Timeline
from distflow.observe.writing.run_folder import RunFolder, RunFolderError


def accuracy(
    *points: tuple[int, float], num_problems: int | None = None, before: bool = True
) -> Accuracy:
    return Accuracy(points, before, num_problems)


def rewards(*values: float) -> dict[int, dict[str, float]]:
    return {step: {"reward/mean_score": value} for step, value in enumerate(values)}


@pytest.mark.parametrize(
    ("found", "tone", "words"),
    [
        (
            accuracy((0, 0.41), (60, 0.87), num_problems=256),
            "good",
            r"It learned: .*\(256 problems\) was 0.41 before RL",
        ),
        # 2 · sqrt((0.5 · 0.5 + 0.6 · 0.4) / 50) = 0.198: a change of 0.1 is chance.
        (
            accuracy((0, 0.5), (60, 0.6), num_problems=50),
            "flat",
            r"change of \+0.10 is within .* \(±0.20\)",
        ),
        (accuracy((0, 0.5), (60, 0.6), num_problems=5000), "good", "It learned"),
        (accuracy((0, 0.5), (60, 0.2), num_problems=256), "bad", "It got worse"),
        (accuracy((10, 0.5), (60, 0.51), before=False), "flat", "was 0.50 at step 10"),
        (
            accuracy((0, 0.1), (40, 0.9), (60, 0.6), num_problems=1000),
            "good",
            "It was best at step 40 with 0.90",
        ),
        # One problem more of four is nothing, though shares of 0 and 1 have no variance of their
        # own.
        (accuracy((0, 0.0), (60, 0.25), num_problems=4), "flat", "No clear change"),
    ],
)
def test_whether_it_learned_by_accuracy(found, tone, words):
    assert describe_learning(found, {})[0] == tone
    assert re.search(words, describe_learning(found, {})[1])


@pytest.mark.parametrize(
    ("values", "tone"),
    [
        ((0.1, 0.12, 0.5, 0.8, 0.82), "good"),
        ((0.8, 0.82, 0.5, 0.1, 0.12), "bad"),
        ((0.1, 0.9, 0.5, 0.2, 0.95), "flat"),
        ((0.1, math.nan, 0.12, 0.5, 0.8, math.inf, 0.82), "good"),
        ((0.1, 0.9), "unknown"),
    ],
)
def test_whether_it_learned_by_reward_alone(values, tone):
    found, sentence, *_ = describe_learning(None, rewards(*values))
    assert found == tone and ("validation" in sentence) == (tone != "unknown")


def test_whether_it_learned_by_the_loss_of_sft():
    assert (
        describe_learning(None, {step: {"sft/loss": 1 / (1 + step)} for step in range(20)})[0]
        == "good"
    )


def test_one_validation_only_falls_back_to_the_reward():
    assert describe_learning(accuracy((0, 0.4)), rewards(0.1, 0.1, 0.9, 0.9))[1].startswith(
        "The reward rose"
    )


def test_the_report_of_a_run(make_run):
    data = report_data(make_run())
    first, second, checked = (sentence["text"] for sentence in data["sentences"])
    assert first.startswith(
        "It learned: accuracy on validation problems (20 problems) was 0.20 before RL and is 0.80"
    )
    assert "1 warning" in second and "actor/grad_norm, actor/kl_loss" in second
    assert checked.startswith("No step was checked")
    assert data["status"]["word"] == "finished" and data["title"] == "<b>tiny</b> & co"
    tiles = {tile["label"]: (tile["value"], tile["note"]) for tile in data["tiles"]}

    # Wilson: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n), n = 20, z = 1.96.
    assert tiles["accuracy before RL"] == ("0.20", "95 %: 0.08 to 0.42")
    assert tiles["accuracy at step 12"] == ("0.80", "95 %: 0.58 to 0.92")
    assert tiles["steps"] == ("12", "in 12.0 s")
    compare = data["compare"]
    assert (compare["num_better"], compare["num_worse"], compare["num_same"]) == (12, 0, 8)
    assert compare["examples"][0]["before"] == {
        "response": "answer 4 of 0",
        "score": 0.0,
        "num_responses": 1,
    }
    assert (
        data["series"]["y"]["actor/grad_norm"][3] == "NaN"
        and data["series"]["y"]["actor/kl_loss"][5] == "Infinity"
    )
    assert data["series"]["y"]["actor/kl_loss"][0] is None, (
        "no training at step 0: not measured, not 0"
    )


def test_the_file_is_whole_and_its_data_cannot_leave_its_tag(make_run):
    folder = make_run()
    page = write_report(folder).read_bytes()
    assert (
        page.count(b"<script") == 3
        and page.count(b"</script>") == 3
        and page.endswith(b"</html>\n")
    )
    raw = re.search(rb'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert raw is not None and b"<" not in raw[1]
    assert json.loads(raw[1])["samples"]["num_groups"] == 12 * 4 + 40
    assert not re.search(
        rb'(src|href)="(?!data:,|#)', page.split(b"<body>")[0] + page.split(b'id="data"')[0]
    )
    assert "\\u003c!--" in embed("<!-- \u2028") and "\\u2028" in embed("\u2028")
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("ends", "saved", "words"),
    [
        (
            [],
            False,
            "No end is recorded after 3 of 9 steps: it is still running, or it was killed.",
        ),
        (["finished"], True, "The reward"),
        (
            ["stopped"],
            True,
            "It was stopped by SIGTERM after 3 of 9 steps; the same command resumes from step 3.",
        ),
        (
            ["stopped"],
            False,
            "It was stopped by SIGTERM after 3 of 9 steps; no checkpoint was saved, so "
            "the same command starts from the beginning.",
        ),
        (["failed"], False, "It failed after 3 of 9 steps:"),
    ],
)
def test_how_a_run_ended_is_said_first(tmp_path, ends, saved, words):
    with RunFolder(tmp_path, 0) as run:
        run.write_json("run.json", {"total_steps": 9})
        for step in (1, 2, 3):
            run.metrics(step, "train", {"timing_s/step": 1.0, "reward/max": 1.0, "reward/min": 1.0})
        if saved:
            run.event("checkpoint", "saved step-000003", step=3)
        if "stopped" in ends:
            run.event("info", "SIGTERM: finishing this step", step=2)
        if "failed" in ends:
            run.event("error", "TooManyErrors: 9 of 9\nRepair it", step=3, raised="TooManyErrors")
        for status in ends:
            run.event("end", f"the run {status}", step=3, status=status)

    data = report_data(tmp_path)
    assert data["sentences"][0]["text"].startswith(words)
    assert 1 <= len(data["judgements"]) <= 3 and "checked whole" not in "".join(data["judgements"])
    shown = [f"{sentence['text']} {sentence['advice']}".rstrip() for sentence in data["sentences"]]
    assert data["judgements"] == shown[: len(data["judgements"])]
    assert data["failure"] == (
        {"message": "9 of 9\nRepair it", "traceback": ""} if "failed" in ends else None
    )
    assert not data["problems"], "what it failed of is reported once"


def test_a_report_of_nothing_and_of_no_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    text = write_report(tmp_path / "empty").read_text(encoding="utf-8")
    assert "No step has been recorded yet." in text
    with pytest.raises(RunFolderError, match="no folder .*missing"):
        write_report(tmp_path / "missing")


def test_a_rolled_back_stretch_is_not_in_the_report(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for step in range(1, 10):
            run.metrics(step, "train", {"reward/mean_score": 9.0})
            run.samples(step, [{"response": "gone", "score": 9.0}])

    with RunFolder(tmp_path, 1, resumed_at=4) as run:
        run.metrics(5, "train", {"reward/mean_score": 1.0})
    data = report_data(tmp_path)
    assert data["series"]["x"] == [1, 2, 3, 4, 5] and data["series"]["y"]["reward/mean_score"] == [
        9,
        9,
        9,
        9,
        1,
    ]
    assert {group["step"] for group in data["samples"]["groups"]} == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_large_run_stays_within_the_size_and_says_what_is_left_out(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for step in range(120):
            run.metrics(step, "train", {f"m/{i}": step / 7 for i in range(330)})
            rows = [
                {"uid": f"{i // 8}-{i % 8}", "prompt": "p" * 3000, "response": f"{i}" * 6000}
                for i in range(64)
            ]
            run.samples(step, [{**row, "score": 0.5} for row in rows])

    data = report_data(tmp_path)
    assert len(data["series"]["y"]) == 300 and len(data["series"]["left_out"]) == 30
    samples = data["samples"]
    steps = {group["step"] for group in samples["groups"]}
    assert (
        (samples["all_files"], samples["num_files"]) == (120, 40)
        and steps >= {0, 119}
        and len(steps) == 40
    )
    assert len(samples["groups"]) < samples["num_groups"] == 40 * 8
    assert all(len(group["responses"]) == 8 for group in samples["groups"]), "groups are whole"
    assert 0.5 * MAX_BYTES < write_report(tmp_path).stat().st_size < 1.1 * MAX_BYTES


def test_thinned_curves_keep_extremes_order_and_nans():
    steps = {step: {"flat": 1.0} for step in range(10_000)}
    steps[5003]["flat"] = 100.0
    steps[5001]["flat"] = -100.0
    steps[7777]["flat"] = math.nan
    for step in range(0, 10_000, 1000):
        steps[step]["rare"] = float(step)
    found = series(steps, max_points=500)
    x = found["x"]
    flat = found["y"]["flat"]
    assert found["thinned"] and len(x) <= 500 and x == sorted(x) and (x[0], x[-1]) == (0, 9999)
    assert flat.index(-100.0) < flat.index(100.0) and flat.count("NaN") == 1
    assert [v for v in found["y"]["rare"] if v is not None] == [
        float(s) for s in range(0, 10_000, 1000)
    ]


def test_problems_are_matched_by_their_text_and_averaged(tmp_path):
    def rows(scores: dict[str, list[float | None]]) -> list[dict]:
        return [
            {"prompt": p, "ground_truth": 1, "response": "r", "score": s, "response_length": 10}
            for p, values in scores.items()
            for s in values
        ]

    with RunFolder(tmp_path, 0) as run:
        run.samples(
            0,
            rows(
                {
                    "up": [0.0, 1.0],
                    "down": [1.0, 1.0],
                    "same": [None, 0.0],
                    "gone": [1.0],
                    "failed": [0.0],
                    "fails": [None],
                }
            ),
            "val",
        )
        after = rows(
            {
                "down": [1.0, 0.0],
                "up": [1.0, 1.0],
                "new": [1.0],
                "same": [0.0],
                "failed": [0.0],
                "fails": [1.0],
            }
        )
        run.samples(
            9,
            [{**row, "errors": "no luck" if row["prompt"] == "failed" else None} for row in after],
            "val",
        )

    found = before_and_after(read_validations(tmp_path, Timeline()))
    assert found is not None
    assert [found[f"num_{how}"] for how in ("better", "worse", "same")] == [1, 1, 1]
    assert [e["prompt"] for e in found["examples"]] == ["up", "down", "same"]
    assert found["examples"][0]["before"]["score"] == 0.5
    (tmp_path / "samples" / "val-000009.parquet").unlink()
    assert before_and_after(read_validations(tmp_path, Timeline())) is None


def test_accuracies_on_other_validation_problems_are_not_compared(tmp_path):
    """The rows changed across a resume; changed back, the first ones count again."""
    for restart, (rows, steps) in enumerate((("a", (0, 5)), ("b", (10, 15)))):
        with RunFolder(tmp_path, restart) as run:
            run.write_json("run.json", {"total_steps": 15})
            run.event("validation_rows", "", validation_rows=rows)

            for step in steps:
                run.metrics(step, "train", {"timing_s/step": 1.0, "reward/mean_score": 0.5})
                run.metrics(
                    step,
                    "val",
                    {"val_correct/all/mean": 0.9 if restart == 0 else 0.1 + 0.1 * (step == 15)},
                )

    said = " ".join(report_data(tmp_path)["judgements"])
    assert (
        "got worse" not in said
        and "is 0.20 at step 15" in said
        and "before step 10 were others" in said
    )

    with RunFolder(tmp_path, 2) as run:
        run.event("validation_rows", "", validation_rows="a")
        run.metrics(20, "val", {"val_correct/all/mean": 0.3})

    assert "It got worse" in " ".join(report_data(tmp_path)["judgements"])
    with RunFolder(tmp_path, 3) as run:
        run.event("validation_rows", "", validation_rows="c")
        run.metrics(25, "val", {"val_correct/all/mean": 0.3})

    assert "accuracy is 0.30 at step 25" in " ".join(report_data(tmp_path)["judgements"])
