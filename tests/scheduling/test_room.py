"""Room for groups by their bytes: the bound holds, and what a step waits for is admitted whatever
is held."""

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.admission import MemoryLimit
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan


def test_groups_that_run_count_as_large_as_those_before_them():
    room = MemoryLimit(1000)
    assert room.left(0) == 0, "nothing is known yet"
    room.weigh(0, 100)
    room.weigh(1, 300)
    assert room.held_bytes == 400 and room.left(0) == 3 and room.left(2) == 1 and room.left(9) == 0
    room.keep(lambda number: number == 1)
    assert room.held_bytes == 300 and room.left(0) == 3
    room.weigh(2, 10_000)
    assert room.left(0) == 0
    assert MemoryLimit(None).left(10**6) is None


@st.composite
def plans(draw: st.DrawFn) -> DataPlan:
    staleness = draw(st.integers(0, 4))
    return DataPlan(
        num_rows=draw(st.integers(1, 9)),
        consumer_batch=draw(st.integers(1, 5)),
        group_size=1,
        total_groups=None,
        total_steps=draw(st.integers(1, 8)),
        max_staleness=staleness,
        max_concurrent=draw(st.none() | st.integers(1, 9)),
        max_held_bytes=draw(st.integers(0, 40)),
    )


@settings(derandomize=True, deadline=None, max_examples=150)
@given(plans(), st.integers(1, 10), st.floats(0, 0.8), st.randoms(use_true_random=False))
def test_every_run_comes_to_its_end_and_holds_no_more_than_the_bound_or_a_step(
    plan, size, drops, random
):
    """All groups are of one size, which is known from the first on; they end in any order, or fail,
    or are lost."""
    coordinator = Coordinator(plan)
    running: list[int] = []
    limit = max(plan.max_held_bytes, plan.consumer_batch * size)

    for _ in range(10_000):
        if coordinator.finished:
            break

        running += [prompt_group.group_id for prompt_group in coordinator.issue_groups()]
        group_counts = coordinator.checked_counts()
        assert (group_counts.running + group_counts.complete) * size <= limit
        numbers = coordinator.ready(coordinator.step)
        if numbers is not None and (not running or random.random() < 0.5):
            coordinator.release(coordinator.step)
            continue

        assert running, "nothing runs, nothing may start, and the step waits"
        number = running.pop(random.randrange(len(running)))

        if random.random() < drops:
            coordinator.drop(number, "filtered") if random.random() < 0.8 else coordinator.retry(
                number
            )
        else:
            coordinator.complete(number, 1)
            coordinator.weigh(number, size)

    assert coordinator.finished
