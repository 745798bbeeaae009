"""Rows that are passed over: which, how often, in the account, and across crashes."""

import json
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.coordinator import Coordinator, mark_of
from distflow.scheduling.data_plan import DataPlan, place
from distflow.scheduling.difficulty_filter import TOO_EASY, TOO_HARD, Accuracy, SkipPlan
from distflow.scheduling.ledger import timeline
from tests.ledger_audit import verify
from tests.scheduling.test_domains import Journal, plan_of


def right_of(prompt_group):
    """A row is as hard as its number says."""
    return prompt_group.row % 5


def run(coordinator, num_steps):
    """At staleness 0; the groups that were worked on."""
    worked = []
    for _ in range(num_steps):
        while coordinator.ready(coordinator.step) is None:
            prompt_groups = coordinator.issue_groups(coordinator.step)
            for prompt_group in prompt_groups:
                worked.append(
                    (
                        prompt_group.group_id,
                        prompt_group.stream,
                        prompt_group.epoch,
                        prompt_group.row,
                    )
                )
                coordinator.record_accuracy(
                    prompt_group.group_id, Accuracy(right_of(prompt_group), 4)
                )
                coordinator.complete(prompt_group.group_id, 1)
            if coordinator.finished or not (prompt_groups or coordinator.ready(coordinator.step)):
                return worked
        coordinator.release(coordinator.step)
    return worked


def test_no_source_runs_empty():
    """Where all rows would be passed over, the one behind a whole round is taken."""
    plan = plan_of(
        ("a", 3, 1), ("b", 3, 1), batch=2, steps=9, skips=SkipPlan({"a": (0.6, 0.7)}, 100)
    )
    coordinator = Coordinator(plan)
    worked = run(coordinator, 9)
    assert coordinator.finished and Counter(stream for _, stream, _, _ in worked) == {
        "train/a": 9,
        "train/b": 9,
    }
    domains = coordinator.checked_counts().domains
    assert domains["b"].dropped == {} and sum(domains["a"].dropped.values()) == 3 * 6


def test_a_run_that_goes_on_passes_over_what_the_other_would_have(tmp_path):
    skips = SkipPlan({"a": (0.25, 0.75), "b": (0.0, 0.5)}, 2)
    plan = plan_of(("a", 7, 2), ("b", 4, 1), batch=3, steps=12, skips=skips)
    whole = run(Coordinator(plan), 12)
    for cut in range(1, 12):
        path = tmp_path / f"{cut}.jsonl"
        with Journal(path) as ledger:
            first = Coordinator(plan, ledger)
            before = run(first, cut)
            snapshot = json.loads(json.dumps(first.snapshot()))
        with Journal(path, mark_of(snapshot)) as ledger:
            assert before + run(Coordinator(plan, ledger, snapshot), 12 - cut) == whole
        verify(path)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    staleness=st.integers(0, 2),
    batch=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_against_a_count_of_ones_own(tmp_path_factory, sizes, staleness, batch, epochs, seed):
    """With groups that end in any order, are dropped, lost and judged at random, in crashes too:
    what is issued and not dropped at once is exactly what a count by hand says, row by row in the
    order of the data."""
    names = "abc"[: len(sizes)] if len(sizes) > 1 else ("",)
    bands = dict.fromkeys(names, (0.3, 0.7))
    if len(sizes) > 1:
        plan = plan_of(
            *zip(names, sizes, strict=True), batch=batch, steps=12, max_staleness=staleness
        )
    else:
        plan = DataPlan(sizes[0], batch, 2, None, 12, max_staleness=staleness)
    plan = replace(plan, skips=SkipPlan(bands, epochs))
    choice = random.Random(seed)
    path = tmp_path_factory.mktemp("walk") / "ledger.jsonl"
    ledger = Journal(path)
    coordinator = Coordinator(plan, ledger)
    running = []
    expected = {}
    cut = json.dumps([coordinator.snapshot(), []])
    while not coordinator.finished:
        before = coordinator.checked_counts().issued
        prompt_groups = coordinator.issue_groups(coordinator.step)
        check_issued(
            plan, path, before, [t for t in prompt_groups if t.group_id >= before], expected
        )
        running += prompt_groups
        for prompt_group in (
            [*running] if staleness == 0 else running[: choice.randint(0, len(running))]
        ):
            running.remove(prompt_group)
            accuracy = Accuracy(choice.randint(0, 2), 2)
            coordinator.record_accuracy(prompt_group.group_id, accuracy)
            expected[prompt_group.row] = 0 if accuracy.num_right == 1 else epochs
            coordinator.drop(
                prompt_group.group_id, "x"
            ) if choice.random() < 0.2 else coordinator.complete(prompt_group.group_id, 1)
        if coordinator.ready(coordinator.step) is not None:
            coordinator.release(coordinator.step)
            cut = json.dumps([coordinator.snapshot(), list(expected.items())])
        elif choice.random() < 0.1:
            ledger.close()
            snapshot, kept = json.loads(cut)
            ledger = Journal(path, mark_of(snapshot))
            coordinator = Coordinator(plan, ledger, snapshot)
            running = []
            expected = dict(kept)
    ledger.close()
    verify(path)


def check_issued(plan, path, before, prompt_groups, expected):
    """`expected`, by row how often it is still to be passed over, is counted down."""
    found = {
        record["group_id"]: record for _, record in timeline(path) if record["kind"] == "issued"
    }
    at_once = {
        record["group_id"]
        for _, record in timeline(path)
        if record.get("reason") in (TOO_EASY, TOO_HARD)
    }
    in_a_row = Counter()
    for number in range(before, max(found, default=-1) + 1):
        record = found[number]
        name = found[number].get("domain", "")
        num_rows = next(source.num_rows for source in plan.sources if source.name == name)
        wanted = not expected.get(record["row"]) or in_a_row[name] == num_rows
        expected[record["row"]] = max(0, expected.get(record["row"], 0) - 1)
        in_a_row[name] = 0 if wanted else in_a_row[name] + 1
        assert (number not in at_once) == wanted
    assert [prompt_group.group_id for prompt_group in prompt_groups] == [
        n for n in range(before, len(found)) if n not in at_once
    ]
    if not plan.domains:
        for number, record in found.items():
            assert place(number, plan.num_rows, plan.seed, plan.shuffle) == (
                record["epoch"],
                record["row"],
            )
