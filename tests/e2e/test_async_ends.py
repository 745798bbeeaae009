"""How asynchronous runs come to their end: short data, few steps, filters, evaluations beside the
stream."""

import pytest

from distflow.scheduling.sample_queue import Exhausted
from tests.e2e.runs import Playground, Run
from tests.e2e.survivors import Place, Survivors, audit, records
from tests.ledger_audit import verify
from tests.sparse_params import one_fast_in

CHEAP = (
    "trust.check_rewards=false",
    "trust.check_freq=0",
    "trust.canary_freq=0",
    "actor_rollout_ref.rollout.n=2",
)


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=10)


def run(ground: Playground, staleness: int, *overrides: str, preset: str = "grpo") -> Run:
    return ground.run(preset, f"async.max_staleness={staleness}", *CHEAP, *overrides)


def whole(ground: Playground, staleness: int, num_epochs: int) -> Survivors:
    places: set[Place] = {(epoch, row) for epoch in range(num_epochs) for row in range(10)}
    verify(ground.folder / "run" / "ledger.jsonl")
    return audit(ground.folder / "run", staleness, places)


def test_the_data_end_with_a_short_step(ground):
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


def test_no_ticket_is_issued_that_no_step_will_consume(ground):
    run(ground, 4, "trainer.total_training_steps=3")
    issued = [r["group_id"] for r in records(ground.folder / "run") if r["kind"] == "issued"]
    consumed = [number for r in records(ground.folder / "run") for number in r.get("group_ids", ())]
    assert sorted(issued) == sorted(consumed) == list(range(12))


@pytest.mark.parametrize(
    ("staleness", "at_once"), one_fast_in(4, [(2, 3), (0, 1), (50, 100), (2, 1)], unpack=True)
)
def test_any_number_of_groups_in_flight_comes_to_the_end(ground, staleness, at_once):
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


def test_a_step_that_does_not_fill_goes_on_with_what_there_is(ground):
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


def test_a_step_that_does_not_fill_ends_the_run_where_that_is_wanted(ground):
    ground.write_reward(NOW_AND_THEN.format(one_in=12))
    with pytest.raises(Exhausted, match=r"needs 4 prompt groups, .*max_num_gen_batches"):
        run(ground, 2, *DYNAMIC[:2], f"{DYNAMIC[2]}1", preset="dapo")
