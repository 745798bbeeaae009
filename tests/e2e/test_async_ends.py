"""How asynchronous runs come to their end: short data, few steps, filters, evaluations beside the
stream."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.observe.run_reader import read_samples, sample_steps
from distflow.scheduling.sample_queue import Exhausted
from tests.e2e.runs import Playground, Run
from tests.e2e.survivors import Place, Survivors, audit, records
from tests.ledger_audit import verify
from tests.patience import at_some_deadline
from tests.sparse_params import one_fast_in

CHEAP = (
    "trust.check_rewards=false",
    "trust.check_freq=0",
    "trust.canary_freq=0",
    "actor_rollout_ref.rollout.n=2",
)


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    return Playground(tmp_path, num_rows=10)


def run(ground: Playground, staleness: int, *overrides: str, preset: str = "grpo") -> Run:
    return ground.run(preset, f"async.max_staleness={staleness}", *CHEAP, *overrides)


def whole(ground: Playground, staleness: int, num_epochs: int) -> Survivors:
    places: set[Place] = {(epoch, row) for epoch in range(num_epochs) for row in range(10)}
    verify(ground.folder / "run" / "ledger.jsonl")
    return audit(ground.folder / "run", staleness, places)


def test_the_data_end_with_a_short_step(ground: Playground) -> None:
    run(
        ground,
        4,
        "trainer.total_epochs=2",
        "data.train_batch_size=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    )
    survived = whole(ground, 4, 2)
    assert not survived.dropped and sorted(survived.step.values()) == [
        n // 3 + 1 for n in range(20)
    ]


def test_no_ticket_is_issued_that_no_step_will_consume(ground: Playground) -> None:
    run(ground, 4, "trainer.total_training_steps=3")
    issued = [r["group_id"] for r in records(ground.folder / "run") if r["kind"] == "issued"]
    consumed = [number for r in records(ground.folder / "run") for number in r.get("group_ids", ())]
    assert sorted(issued) == sorted(consumed) == list(range(12))


@pytest.mark.parametrize(
    ("staleness", "at_once"), one_fast_in(4, [(2, 3), (0, 1), (50, 100), (2, 1)], unpack=True)
)
def test_any_number_of_groups_in_flight_comes_to_the_end(
    ground: Playground, staleness: int, at_once: int
) -> None:
    """Fewer than a step takes, and more than the run has."""
    run(ground, staleness, f"async.max_concurrent_rollouts={at_once}", "trainer.total_epochs=1")
    survived = whole(ground, staleness, 1)
    assert not survived.dropped and max(survived.step.values()) == 3
    running = most = 0
    for record in records(ground.folder / "run"):
        running += {"issued": 1, "complete": -1, "dropped": -1}.get(record["kind"], 0)
        most = max(most, running)
    assert most == min(at_once, 10)


NOW_AND_THEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % {one_in} == 0)
"""
DYNAMIC = (
    "trainer.total_epochs=4",
    "reward.overlong.buffer_tokens=0",
    "algorithm.filter_groups.max_num_gen_batches=",
)


@pytest.mark.slow
def test_a_filter_that_drops_most_groups_trains_the_others(ground: Playground) -> None:
    ground.write_reward(NOW_AND_THEN.format(one_in=12))
    done = run(ground, 2, *DYNAMIC[:2], f"{DYNAMIC[2]}10", preset="dapo")
    survived = whole(ground, 2, 4)
    assert (
        set(survived.dropped.values()) == {"all_equal"}
        and len(survived.dropped) > len(survived.step) > 0
    )
    assert done.metrics()[-1]["async/dropped/all_equal"] == len(survived.dropped)


def test_a_step_that_does_not_fill_goes_on_with_what_there_is(ground: Playground) -> None:
    ground.write_reward(NOW_AND_THEN.format(one_in=3))
    # the same answers at any version
    same = ("actor_rollout_ref.actor.optim.lr=0", "actor_rollout_ref.rollout.n=4")
    keys = (
        *DYNAMIC[:2],
        f"{DYNAMIC[2]}1",
        "algorithm.filter_groups.when_exhausted=continue",
        *same,
    )
    run(ground, 2, *keys, preset="dapo")
    survived = whole(ground, 2, 4)
    sizes = [
        list(survived.step.values()).count(step) for step in range(1, max(survived.step.values()))
    ]
    assert min(sizes) < 4 and set(survived.dropped.values()) == {"all_equal"}


def test_a_step_that_does_not_fill_ends_the_run_where_that_is_wanted(ground: Playground) -> None:
    ground.write_reward(NOW_AND_THEN.format(one_in=12))
    with pytest.raises(
        Exhausted, match=r"needs 4 prompt groups, but of the .* drawn for it .*max_num_gen_batches"
    ):
        run(ground, 2, *DYNAMIC[:2], f"{DYNAMIC[2]}1", preset="dapo")


FAILS_ON_HELD_OUT = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "held out" in ground_truth:
        {how}
    return sum(map(ord, solution_str)) % 7 / 6
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", one_fast_in(2, ["raise KeyError('not there')", "time.sleep(300)"]))
def test_an_evaluation_beside_the_stream_counts_for_itself(ground: Playground, how: str) -> None:
    """Verifiers fail on validation prompts alone: training groups, which go on meanwhile, count
    none of it."""
    ground.write_reward(FAILS_ON_HELD_OUT.format(how=how))
    held_out = ground.folder / "held_out.jsonl"
    held_out.write_text(
        "".join(json.dumps({"prompt": f"{i}=", "answer": "held out"}) + "\n" for i in range(3))
    )
    keys = (f"data.val_files={held_out}", "trainer.test_freq=1", "trainer.val_before_train=true")

    def check(deadline_s: float) -> None:
        shutil.rmtree(ground.folder / "run", ignore_errors=True)
        patience = (f"reward.timeout_s={deadline_s}", "reward.num_workers=3")
        counts_for_itself(ground, run(ground, 2, *keys, *patience, "trainer.total_epochs=1"))

    at_some_deadline(check, *((0.4, 3.0) if "sleep" in how else (30.0,)))


def counts_for_itself(ground: Playground, done: Run) -> None:
    assert not whole(ground, 2, 1).dropped
    for metrics in done.metrics():
        assert (
            metrics.get("reward/error_rate", 0) == 0
            and metrics["reward/errors"] == 0 == metrics["reward/timeouts"]
        )
        assert metrics["timing_s/eval"] > 0
    warned = [note for note in done.notes("warning") if "reward errors" in note]
    assert warned and all(
        "3 of 3 scores are reward errors (100%) in a validation" in note for note in warned
    )
    answers = list(evaluations(done))
    assert len(answers) == 4
    for step, rows in answers:
        assert {tuple(row["versions"]) for row in rows} == {(step,)}, (
            "one version, that of the weights judged"
        )


def evaluations(done: Run) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for step in sample_steps(done.folder, "val"):
        yield step, list(read_samples(done.folder, step, split="val"))
