"""At staleness 0 the steps of a run are those of the data, whichever group ends first."""

import random

import pytest

from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan

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
