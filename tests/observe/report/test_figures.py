"""The figures of the report against cases worked by hand: intervals, histograms, groups, the graph,
the time line."""

import json
import math
import os
import random
import re
import time
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from distflow.data.images import keep_pixels
from distflow.observe.crash_safe_files import JSON
from distflow.observe.report.activity import read_activity
from distflow.observe.report.build import report_data
from distflow.observe.report.chart_data import (
    MAX_BINS,
    Z_95,
    choose_charts,
    error_bars,
    histogram,
    histograms,
    series,
    set_constants_apart,
    wilson,
)
from distflow.observe.report.pipeline_graph import drawn_nodes
from distflow.observe.report.samples import num_problems, sample_groups, thin_samples
from distflow.observe.report.timelines import MAX_SPANS, StepTimeline, timelines
from distflow.observe.run_reader import MetricsRecord, Timeline, read_metrics, read_spans
from distflow.observe.writing.run_folder import RunFolder, Span
from tests.observe.conftest import write_asynchronous_run


@pytest.mark.parametrize(("right", "number"), [(0, 10), (10, 10), (3, 20), (128, 256), (1, 400)])
def test_wilson_intervals_end_where_the_score_test_rejects(right: int, number: int) -> None:
    """Its ends solve (p̂ − p)² = z² p (1 − p) / n, which is what defines it."""
    share = right / number
    for end in wilson(share, number):
        assert 0 <= end <= 1
        assert math.isclose((share - end) ** 2, Z_95**2 * end * (1 - end) / number, abs_tol=1e-12)
    low, high = wilson(share, number)
    assert low - 1e-12 <= share <= high + 1e-12 and high - low > 0


def test_error_bars_belong_to_accuracies_of_a_known_number_of_problems() -> None:
    columns = {
        "val_correct/all/mean": [0.5, None, "NaN"],
        "val_correct/math/pass@4": [0.25],
        "val_correct/code/mean": [0.5],
        "reward/mean_score": [0.5],
        "val_correct/all/odd": [3.0],
    }
    bars = error_bars(columns, {"all": 100, "math": 4})
    assert set(bars) == {"val_correct/all/mean", "val_correct/math/pass@4", "val_correct/all/odd"}
    assert bars["val_correct/all/mean"] == [[0.4038, 0.5962], None, None] and bars[
        "val_correct/all/odd"
    ] == [None]


def test_problems_are_counted_by_domain(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}", "domain": "a" if i < 3 else "b", "kind": kind}
        for i in range(5)
        for kind in "gs"
    ]
    with RunFolder(tmp_path, 0) as run:
        run.samples(0, rows, "val")
        run.samples(4, rows[:2], "val")
    assert num_problems(tmp_path, Timeline()) == {"all": 5, "a": 3, "b": 2}


@pytest.mark.parametrize(("ground_truth", "number"), [("7", 1), ("", 3), (None, 3)])
def test_tasks_without_a_ground_truth_are_problems_of_their_own(
    ground_truth: str | None, number: int, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "reach", "uid": uid, "ground_truth": ground_truth}
        for uid in ("0-0", "0-1", "1-0", "2-0")
    ]
    with RunFolder(tmp_path, 0) as run:
        run.samples(0, rows, "val")
    assert num_problems(tmp_path, Timeline())["all"] == number


def test_few_values_have_a_bin_each_and_many_share_bins_of_one_width() -> None:
    few = histogram("t", "u", {"early": [0.0, 1.0, 0.0, 0.5], "late": [1.0], "none": []})
    assert few["bins"] == ["0", "0.5", "1"]
    assert [(part["name"], part["number"], part["shares"]) for part in few["parts"]] == [
        ("early", 4, [0.5, 0.25, 0.25]),
        ("late", 1, [0.0, 0.0, 1.0]),
    ]
    # 1 to 200 in at most 24 bins: width 10, from 0.
    many = histogram("t", "u", {"all": [float(i) for i in range(1, 201)]})
    assert (
        many["bins"][0] == "0 to 9" and many["bins"][-1] == "200 to 209" and len(many["bins"]) == 21
    )
    assert many["parts"][0]["shares"][:2] == [9 / 200, 0.05]
    tenths = histogram("t", "u", {"all": [i / 10 for i in range(14)]})
    assert tenths["parts"][0]["shares"].count(0.07143) == 14


@pytest.mark.parametrize("span", [1e-9, 0.7, 13.0, 1e6])
@pytest.mark.parametrize("offset", [0.0, -3.3, 1e5])
def test_every_value_lies_in_a_bin(span: float, offset: float) -> None:
    values = [offset + span * i / 40 for i in range(41)]
    found = histogram("t", "u", {"all": values})
    assert len(found["bins"]) <= MAX_BINS + 1 and math.isclose(
        sum(found["parts"][0]["shares"]), 1.0, abs_tol=0.01
    )


def test_early_and_late_responses_are_compared(tmp_path: Path) -> None:
    with RunFolder(tmp_path, 0) as run:
        for step in range(1, 31):
            errors = "down" if step == 30 else None
            run.samples(
                step, [{"response_length": step, "score": float(step > 15), "errors": errors}] * 2
            )
    length, reward = histograms(tmp_path, Timeline())
    assert [(part["name"], part["number"]) for part in length["parts"]] == [
        ("steps 1 to 3", 6),
        ("steps 28 to 30", 6),
    ]
    assert length["bins"] == ["1", "2", "3", "28", "29", "30"]
    # A reward error is no reward of 0.
    assert [(part["number"], part["shares"]) for part in reward["parts"]] == [
        (6, [1.0, 0.0]),
        (4, [0.0, 1.0]),
    ]


def test_the_staleness_of_responses_is_counted_where_any_is_stale(tmp_path: Path) -> None:
    """Step 5 trains weights of version 4: tokens of version 2 are two steps behind. -1 is no
    version."""
    with RunFolder(tmp_path, 0) as run:
        run.samples(
            5,
            [{"versions": [4], "response_length": 1}] * 3
            + [{"versions": [2, 3, 4], "response_length": 1}],
        )
    found = {figure["title"]: figure for figure in histograms(tmp_path, Timeline())}
    stale = found["How stale are they when trained on?"]
    assert (stale["unit"], stale["bins"], stale["parts"][0]["shares"]) == (
        "steps",
        ["0", "2"],
        [0.75, 0.25],
    )
    with RunFolder(tmp_path / "fresh", 0) as run:
        run.samples(5, [{"versions": [4], "response_length": 1}] * 3)
    assert [figure["title"] for figure in histograms(tmp_path / "fresh", Timeline())] == [
        "How long are the responses?"
    ]


def test_groups_are_whole_and_a_reward_error_has_no_score() -> None:
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


def test_large_groups_stay_whole_with_shorter_texts(tmp_path: Path) -> None:
    with RunFolder(tmp_path, 0) as run:
        for step in range(1, 5):
            run.samples(
                step, [{"uid": f"0-{i}", "prompt": "p", "response": "r" * 9000} for i in range(16)]
            )
    found = thin_samples(tmp_path, Timeline(), 40_000)
    assert [len(group["responses"]) for group in found["groups"]] == [16] * 4
    assert len(json.dumps(found)) < 60_000


def test_the_graph_shows_direct_ways_alone_and_the_time_of_nodes_that_learn() -> None:
    nodes = [
        {"name": "a", "plane": "rollout", "phase": "rollout", "deps": []},
        {"name": "b", "plane": "training", "phase": "score", "deps": ["a"], "engines": ["actor"]},
        {"name": "c", "plane": "training", "phase": "train", "deps": ["a", "b", "gone"]},
    ]
    steps = {1: {"timing_s/rollout": 9.0, "timing_s/score": 1.0}, 2: {"timing_s/score": 2.0}}
    found = {node["name"]: node for node in drawn_nodes(nodes, steps)}
    assert [(name, node["deps"], node["layer"]) for name, node in found.items()] == [
        ("a", [], 0),
        ("b", ["a"], 1),
        ("c", ["b"], 2),
    ]
    assert [node["seconds"] for node in found.values()] == [None, 1.5, None] and found["b"][
        "engines"
    ] == ["actor"]


@pytest.mark.parametrize(
    "odd",
    [
        None,
        3,
        [{"name": 1}, 2],
        [{"name": "a", "deps": ["b"]}, {"name": "b", "deps": ["a"]}],
        [{"name": "a", "deps": []}, {"name": "a", "deps": []}],
        [{"name": f"{i}", "deps": []} for i in range(1000)],
    ],
)
def test_what_is_no_graph_is_not_drawn(odd: JSON) -> None:
    assert drawn_nodes(odd, {}) == []


def timelines_of(folder: Path, records: list[MetricsRecord]) -> list[StepTimeline]:
    return timelines(read_activity(folder), records)


def trained(step: int, end: float, seconds: float, restart: int = 0) -> MetricsRecord:
    return MetricsRecord(step, end, restart, "train", {"timing_s/step": seconds})


@pytest.mark.parametrize("taking", ["rollout", "data"])
def test_the_time_line_has_what_lies_in_the_step(tmp_path: Path, taking: str) -> None:
    """A run on given texts, whose steps are taken in a phase "data", has no rollout."""
    now = time.time()
    with RunFolder(tmp_path, 0) as run:
        # reaches a second into the step
        run.span("training", Span(now - 12, now - 9, "phase", taking))
        run.span("training", Span(now - 9, now - 1, "phase", "train_step"))
        run.span("training", Span(now - 8, now - 2, "wait", "step 3", on="rollout"))
        run.span("training", Span(now - 1, now - 1 + 1e-5, "phase", "blink"))
        run.span("rollout", Span(now - 30, now - 20, "group", "complete"))
        run.span("rollout", Span(now - 10, now - 5, "group", "dropped"))
    (found,) = timelines_of(tmp_path, [trained(4, now, 10.0)])
    assert (found["first"], found["last"], found["seconds"]) == (4, 4, 10.0)
    assert found["notes"] == ["1 span is not shown (too short or too many)."]
    lanes = {
        lane["name"]: [(round(bar[0]), round(bar[1]), bar[2]) for bar in lane["spans"]]
        for lane in found["lanes"]
    }
    assert lanes == {
        "training": [(0, 1, taking), (1, 9, "train_step")],
        f"{taking}: groups": [(0, 5, "dropped")],
        "training waits for": [(2, 8, "step 3")],
    }


def test_the_last_steps_show_groups_by_staleness_decoding_by_version_and_weight_syncs(
    tmp_path: Path,
) -> None:
    write_asynchronous_run(tmp_path)
    # a group that began at version 1 and drew no token of it
    with (tmp_path / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"kind": "complete", "group_id": 7, "version": 2}\n')
    last, *_ = timelines_of(tmp_path, read_metrics(tmp_path))
    assert (last["why"], last["first"], last["last"], last["seconds"]) == (
        "the last steps",
        3,
        12,
        10.5,
    )
    assert last["steps"] == [(float(step - 2), step) for step in range(3, 12)]
    assert last["synced"] == [(float(step - 2), step) for step in range(3, 13)]
    assert last["paused"] == [(10.0, 10.5)]
    lanes = {lane["name"]: lane["spans"] for lane in last["lanes"]}
    assert list(lanes)[:4] == [
        "training",
        "rollout: groups",
        "engine decodes: train",
        "engine decodes: eval",
    ]
    # The last steps have their groups: there the plane is idle while it waits.
    assert [bar[:2] for bar in lanes["rollout waits for"]] == [(9.0, 9.4)]
    # Groups 6 and 7 are of step 4: begun at version 1, done at 1002.5, taken after half of the
    # step.
    groups = lanes["rollout: groups"]
    assert groups[2:4] == [(0.0, 0.5, "complete", 2, 1.5), (0.0, 0.5, "complete", 1, 1.5)]
    assert {bar[3] for bar in groups[4:]} == {2}
    assert [bar[3] for bar in lanes["engine decodes: train"]] == list(range(2, 12))
    assert lanes["engine decodes: eval"] == [(10.0, 10.5, "eval", 12, None)]
    assert last["notes"] == [
        "The trainer waited for groups 48% of this time; the engine decoded 95% of it."
    ]


def test_of_several_engines_the_mean_share_is_shown_and_each_has_its_lane(tmp_path: Path) -> None:
    write_asynchronous_run(tmp_path)
    spans = [
        json.loads(line) for line in (tmp_path / "spans/engine.jsonl").read_text().splitlines()
    ]
    # which decodes for validation alone
    of_another = [span for span in spans if span["what"] == "eval"]
    (tmp_path / "spans/engine-1.jsonl").write_text(
        "".join(f"{json.dumps(span)}\n" for span in of_another)
    )
    last, *_ = timelines_of(tmp_path, read_metrics(tmp_path))
    assert "the engine decoded 48% of it" in last["notes"][0]
    names = [lane["name"] for lane in last["lanes"] if lane["kind"] == "decode"]
    assert sorted(names) == [
        "engine decodes: eval",
        "engine decodes: train",
        "engine-1 decodes: eval",
    ]


def test_a_window_never_spans_the_time_between_two_starts(tmp_path: Path) -> None:
    write_asynchronous_run(tmp_path)
    records = [trained(step, 1000.0 + step, 1.0, restart=int(step > 9)) for step in range(1, 13)]
    assert (
        timelines_of(tmp_path, records)[0]["first"],
        timelines_of(tmp_path, records)[0]["last"],
    ) == (10, 12)


def test_few_of_very_many_groups_are_drawn_and_it_is_said(tmp_path: Path) -> None:
    write_asynchronous_run(tmp_path, groups=700)
    last, *rest = timelines_of(
        tmp_path, [trained(step, 1000.0 + step, 1.0) for step in range(1, 13)]
    )
    assert (last["first"], last["last"]) == (11, 12)
    for line in (last, *rest):
        (groups,) = [lane["spans"] for lane in line["lanes"] if lane["kind"] == "group"]
        assert MAX_SPANS // 2 < len(groups) <= MAX_SPANS
        assert any(re.fullmatch(r"One group of \d+ is drawn\.", note) for note in line["notes"])
    assert len(json.dumps([last, *rest])) < 100_000


def test_the_first_step_is_the_slowest_where_its_start_took_most_of_it(tmp_path: Path) -> None:
    now = time.time()
    with RunFolder(tmp_path, 0) as run:
        for start in (now - 11, now - 10, now - 9):
            run.span("training", Span(start, start + 1, "phase", "rollout"))
    records = [trained(1, now - 10, 5.0), trained(2, now - 9, 1.0), trained(3, now - 8, 1.0)]
    records.insert(0, MetricsRecord(0, now - 14, 0, "val", {"val_correct/all/mean": 0.5}))
    assert (1, "the slowest step") in [
        (line["first"], line["why"]) for line in timelines_of(tmp_path, records)
    ]


def test_a_usual_step_the_slowest_and_the_last_are_shown(tmp_path: Path) -> None:
    lengths = (5.0, 1.0, 3.0, 2.0)
    end = time.time() - 100
    records = []
    with RunFolder(tmp_path, 0) as run:
        for step, seconds in enumerate(lengths, 1):
            run.span("training", Span(end, end + seconds, "phase", f"phase of {step}"))
            end += seconds
            records.append(trained(step, end, seconds))
    several, *found = timelines_of(tmp_path, records)
    assert (several["first"], several["last"], several["seconds"]) == (1, 4, 11.0)
    assert [(line["first"], line["why"]) for line in found] == [
        (3, "a usual step"),
        (1, "the slowest step"),
        (4, "the last step"),
    ]
    assert [[span[2] for span in line["lanes"][0]["spans"]] for line in found] == [
        ["phase of 3"],
        ["phase of 1"],
        ["phase of 4"],
    ]
    assert timelines_of(tmp_path / "nothing", records) == []


def test_only_the_end_of_long_span_files_is_read(tmp_path: Path) -> None:
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


def test_what_moves_nowhere_is_set_apart() -> None:
    columns: dict[str, list[float | str | None]] = {
        "reward/mean_score": [0.1, 0.2],
        "reward/max": [1.0, 1.0],
        "actor/grad_norm": [0.5, "NaN"],
        "actor/entropy": [0.3, 0.1 + 0.2],
        "timing_s/rollout": [1.0, 2.0],
        "timing_s/other": [1.0, 1.0],
        "odd": [None, 4.0],
    }
    charts, others, constants = set_constants_apart(*choose_charts(columns), columns)
    assert [name for chart in charts for name in chart["names"]] == [
        "reward/mean_score",
        "actor/grad_norm",
        "timing_s/other",
        "timing_s/rollout",
    ]
    assert others == [] and {c["name"]: c["value"] for c in constants} == {
        "actor/entropy": 0.3,
        "odd": 4.0,
        "reward/max": 1.0,
    }


def test_bytes_are_shown_as_gib_and_the_changes_of_a_config_as_they_were_written(
    tmp_path: Path,
) -> None:
    change = {"key": "trainer.seed", "before": "1", "now": "3", "where": "command line"}
    with RunFolder(tmp_path, 0) as run:
        run.write_json("run.json", {"preset": "grpo", "changed": [change, "odd"]})
        for step in (1, 2):
            run.metrics(step, "train", {"memory/process/peak": step * 2.0**29})
    data = report_data(tmp_path)
    assert data["series"]["y"]["memory/process/peak"] == [0.5, 1.0]
    assert [chart["unit"] for chart in data["charts"]] == ["GiB"]
    assert data["changed"] == [change] and data["preset"] == "grpo"


def test_the_phases_that_take_most_memory_are_on_its_chart_however_many_there_are() -> None:
    small = ["audit", "compute_advantage", "eval", "my_node", "other", "peak", "ref_logp", "save"]
    large = ["recompute_logp", "rollout", "train_step", "update_weights"]
    names = [f"memory/{where}/{phase}" for where in ("cuda", "process") for phase in small + large]
    charts, left = choose_charts(names)
    assert [chart["unit"] for chart in charts] == ["GiB", "GiB"] and len(left) == len(names) - 16
    for chart, where in zip(charts, ("cuda", "process"), strict=True):
        assert {f"memory/{where}/{phase}" for phase in large} < set(chart["names"])


def test_small_images_of_prompts_are_taken_once_and_nothing_else_is_read(tmp_path: Path) -> None:
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


def test_long_columns_are_thinned_alike_with_and_without_a_nan() -> None:
    """A column with a NaN goes another way through the code than one without."""
    draw = random.Random(0)
    steps: dict[int, dict[str, float]] = {}
    for step in range(1, 1000):
        value = draw.random()
        is_missing = draw.random() < (0.9 if step < 500 else 0.2)
        steps[step] = {"c": 0.0} if is_missing else {"a": value, "b": value, "c": 0.0}
    steps[999]["b"] = math.nan
    found = series(steps, 401)
    a = found["y"]["a"]
    b = found["y"]["b"]
    assert len(a) == len(b) == len(found["x"]) and found["x"][-1] == 999
    assert a[:-2] == b[:-2] and "NaN" in b[-2:] and None in a


def test_an_episode_of_each_outcome_is_an_animation_of_its_observations(tmp_path: Path) -> None:
    def row(number: int, success: float, *frames: str) -> dict[str, object]:
        extra = {"frames": list(frames), "instruction": "red"}
        said = {"prompt": "p", "response": "r", "score": success, "extra": extra}
        return {
            "uid": f"0-{number}",
            "reward_parts": {"success": success, "env_steps": 3.0},
            **said,
        }

    with RunFolder(tmp_path, 0) as run:
        store = tmp_path / "data" / "images"
        frames = [
            keep_pixels(np.full((20, 20, 3), level, np.uint8), store) for level in (0, 120, 250)
        ]
        run.samples(
            1, [row(0, 0.0, *frames), row(1, 0.0, frames[1]), row(2, 1.0, frames[2], "/gone.png")]
        )
        run.samples(2, [row(0, 1.0, *frames[1:])])
    first, last = thin_samples(tmp_path, Timeline(), 400_000)["groups"]
    assert [(video["response"], video["instruction"]) for video in first["videos"]] == [
        (0, "red")
    ], "one is lost"
    assert "frames" not in first["responses"][0].get("remarks", {})
    for (video,), colours in ((first["videos"], (0, 120, 250)), (last["videos"], (120, 250))):
        with Image.open(BytesIO(b64decode(video["webp"]))) as shown:
            assert shown.size == (160, 160) and shown.n_frames == len(colours)
            for place, colour in enumerate(colours):
                shown.seek(place)
                assert shown.convert("RGB").getpixel((80, 80)) == (colour,) * 3
    tight = thin_samples(tmp_path, Timeline(), 3_000)["groups"]
    assert all("frames" not in video for group in tight for video in group["videos"])
