"""The bound on staleness over thousands of random runs with stragglers, drops and weights that
arrive late; and rules for forming a step that look as good, and break it."""

import heapq
import random

import pytest

from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan

NUM_RUNS = 1500


def staleness_of(seed, make):
    """(the highest staleness of a run in simulated time, the bound). A run that is stuck raises."""
    rng = random.Random(seed)
    plan = DataPlan(
        num_rows=10_000,
        consumer_batch=rng.randint(1, 6),
        group_size=1,
        total_groups=None,
        total_steps=rng.randint(4, 20),
        shuffle=False,
        max_staleness=rng.randint(1, 4),
    )
    drops = rng.choice([0, 0.3])
    straggles = rng.choice([0.02, 0.2])
    training = rng.choice([0.1, 1, 3])
    transfer = rng.choice([0, 0.5, 5])
    run = make(plan)
    engine_version = 0
    now = 0.0
    highest = 0
    trains = False
    versions = {}
    events = []

    def after(delay, kind, value):
        heapq.heappush(events, (now + delay, len(versions), kind, value))

    while not run.finished:
        for group_id in run.issue_groups(engine_version):
            versions[group_id.group_id] = group_id.version
            after(
                rng.uniform(5, 50) if rng.random() < straggles else rng.random(),
                "ended",
                group_id.group_id,
            )

        if not trains and (numbers := run.ready(run.step)) is not None:
            highest = max(highest, *(run.step - versions[number] for number in numbers))
            trains = True
            after(training, "trained", run.step)

        assert events, "the run is stuck"
        now, _, kind, value = heapq.heappop(events)
        if kind == "trained":
            run.release(value)
            trains = False
            after(transfer, "arrived", value + 1)
        elif kind == "arrived":
            engine_version = value
        elif rng.random() < drops:
            run.drop(value, "equal_rewards")
        else:
            run.complete(value, 1)

    return highest, plan.max_staleness


@pytest.mark.slow
def test_no_run_is_stuck_and_no_group_staler_than_allowed():
    at_the_bound = 0
    for seed in range(NUM_RUNS):
        highest, bound = staleness_of(seed, Coordinator)
        assert highest <= bound, f"run {seed}"
        at_the_bound += highest == bound
    assert at_the_bound > NUM_RUNS / 4, "the bound is used, not only kept"


ROWS = 12


def steps_in_order(order, dropped, options):
    """A synchronous run whose groups of a wave end in the order of their keys."""
    plan = DataPlan(ROWS, 3, 1, total_groups=2 * ROWS, total_steps=2 * ROWS // 3, **options)
    run = Coordinator(plan)

    steps = []
    while not run.finished:
        group_ids = run.issue_groups()
        for group_id in sorted(group_ids, key=lambda group_id: order[group_id.group_id]):
            if group_id.group_id in dropped:
                run.drop(group_id.group_id, "equal_rewards")
            else:
                run.complete(group_id.group_id, 1)

        if (numbers := run.ready(run.step)) is not None:
            steps.append(numbers)
            run.release(run.step)
        elif not group_ids and not run.finished:
            raise AssertionError("the run is stuck")

    return steps


@pytest.mark.parametrize(
    "options", [{}, {"max_concurrent": 2}, {"max_num_gen_batches": 3, "when_exhausted": "continue"}]
)
def test_at_staleness_0_a_step_does_not_depend_on_the_order_of_completion(options):
    rng = random.Random(0)
    for _ in range(30):
        dropped = {number for number in range(2 * ROWS) if rng.random() < 0.3}
        orders = [rng.sample(range(2 * ROWS), 2 * ROWS) for _ in range(4)]
        first, *others = [steps_in_order(order, dropped, options) for order in orders]
        assert others == [first] * 3
        survivors = [number for number in range(2 * ROWS) if number not in dropped]
        if "when_exhausted" not in options:
            assert first == [tuple(survivors[i : i + 3]) for i in range(0, len(survivors), 3)]
