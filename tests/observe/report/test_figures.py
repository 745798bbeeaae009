"""The figures of the report against cases worked by hand: intervals, groups, images."""

import json
import math
import os
from base64 import b64encode

import pytest

from distflow.observe.report.chart_data import (
    Z_95,
    choose_charts,
    wilson,
)
from distflow.observe.report.samples import sample_groups, thin_samples
from distflow.observe.report.validations import num_problems, read_validations
from distflow.observe.run_reader import Timeline, read_spans
from distflow.observe.writing.run_folder import RunFolder, Span


@pytest.mark.parametrize(("right", "number"), [(0, 10), (10, 10), (3, 20), (128, 256), (1, 400)])
def test_wilson_intervals_end_where_the_score_test_rejects(right, number):
    """Its ends solve (p̂ − p)² = z² p (1 − p) / n, which is what defines it."""
    share = right / number
    for end in wilson(share, number):
        assert 0 <= end <= 1
        assert math.isclose((share - end) ** 2, Z_95**2 * end * (1 - end) / number, abs_tol=1e-12)
    low, high = wilson(share, number)
    assert low - 1e-12 <= share <= high + 1e-12 and high - low > 0


@pytest.mark.parametrize(("ground_truth", "number"), [("7", 1), ("", 3), (None, 3)])
def test_tasks_without_a_ground_truth_are_problems_of_their_own(ground_truth, number, tmp_path):
    rows = [
        {"prompt": "reach", "uid": uid, "ground_truth": ground_truth}
        for uid in ("0-0", "0-1", "1-0", "2-0")
    ]
    with RunFolder(tmp_path, 0) as run:
        run.samples(0, rows, "val")
    assert num_problems(read_validations(tmp_path, Timeline()))["all"] == number


def test_groups_are_whole_and_a_reward_error_has_no_score():
    rows = [
        {
            "uid": "7-0",
            "prompt": "p",
            "response": "a",
            "score": 1.0,
            "acc": 1.0,
            "advantage": 0.123456789,
        },
        {"uid": "8-0", "prompt": "q", "response": "c", "score": 0.0, "acc": 0.0},
        {"uid": "7-1", "prompt": "p", "response": "b", "score": 0.0, "acc": 0.0, "errors": "down"},
        {"uid": "odd", "prompt": "q", "response": "d"},
        {"prompt": "q", "response": "e"},
    ]
    groups = sample_groups(rows, 3, "train")
    assert [
        (group["name"], [response["response"] for response in group["responses"]])
        for group in groups
    ] == [
        ("7", ["a", "b"]),
        ("8", ["c"]),
        ("", ["d", "e"]),
    ]
    first, failed = groups[0]["responses"]
    assert first["advantage"] == 0.12346 and "score" not in failed and failed["errors"] == "down"


def test_large_groups_stay_whole_with_shorter_texts(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for step in range(1, 5):
            run.samples(
                step, [{"uid": f"0-{i}", "prompt": "p", "response": "r" * 9000} for i in range(16)]
            )

    found = thin_samples(tmp_path, Timeline(), 40_000)
    assert [len(group["responses"]) for group in found["groups"]] == [16] * 4
    assert len(json.dumps(found)) < 60_000


def test_only_the_end_of_long_span_files_is_read(tmp_path):
    with RunFolder(tmp_path, 0) as run:
        for i in range(1000):
            run.span("training", Span(float(i), i + 1.0, "phase", f"{i}"))

    (tmp_path / "spans" / "training.jsonl").open("a").write(
        '{"t0": "NaN", "t1": 3}\n{"t0": 5, "t1": 3}\n'
    )
    spans = read_spans(tmp_path, max_bytes=5000)["training"]
    assert 20 < len(spans) < 100 and spans[-1].what == "999"
    assert [int(span.what) for span in spans] == list(range(1000 - len(spans), 1000)), (
        "whole lines alone"
    )


def test_the_phases_that_take_most_memory_are_on_its_chart_however_many_there_are():
    small = ["audit", "compute_advantage", "eval", "my_node", "other", "peak", "ref_logp", "save"]
    large = ["recompute_logp", "rollout", "train_step", "update_weights"]
    names = [f"memory/{where}/{phase}" for where in ("cuda", "process") for phase in small + large]
    charts, left = choose_charts({name: [0.0, 1.0] for name in names})
    assert [chart["unit"] for chart in charts] == ["GiB", "GiB"] and len(left) == len(names) - 16
    for chart, where in zip(charts, ("cuda", "process"), strict=True):
        assert {f"memory/{where}/{phase}" for phase in large} < set(chart["names"])


def test_small_images_of_prompts_are_taken_once_and_nothing_else_is_read(tmp_path):
    names = ["a.png", "big.png", "link.png", "text.png", "fifo.png", "gone.png"]
    with RunFolder(tmp_path, 0) as run:
        images = [f"/elsewhere/{name}" for name in names]
        run.samples(
            1,
            [{"uid": f"{i}-0", "prompt": "p", "response": "r", "images": images} for i in range(3)],
        )

    store = tmp_path / "data" / "images"
    secret = tmp_path.parent / "secret.png"
    store.mkdir(parents=True)

    for path, content in (
        (store / "a.png", b"\x89PNG small"),
        (store / "big.png", b"\x89PNG" + bytes(2**20)),
    ):
        path.write_bytes(content)

    secret.write_bytes(b"\x89PNG secret")
    (store / "link.png").symlink_to(secret)
    (store / "text.png").write_text("no image")
    os.mkfifo(store / "fifo.png")
    found = thin_samples(tmp_path, Timeline(), 40_000)
    assert [group["images"] for group in found["groups"]] == [names] * 3
    assert found["images"] == {"a.png": b64encode(b"\x89PNG small").decode()}
