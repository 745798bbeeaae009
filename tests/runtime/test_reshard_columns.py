"""What goes from one dp group to another: read off the plan, for every rank the same."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distflow.graph import BoundPipeline
from distflow.planning.assign_ranks import plan_ray
from distflow.planning.plan import Plan, dp_groups_of, plan_local
from distflow.runtime.reshard_columns import ColumnReshard, resharded_columns
from tests.planning.test_assign_ranks import devices, pipelines, ppo
from tests.planning.valid_plan import check_plan


def test_one_team_hands_nothing_over():
    pipeline = ppo()
    assert not [*resharded_columns(plan_local(pipeline, "cpu"), pipeline)]
    assert not ColumnReshard(plan_local(pipeline, "cpu"), pipeline, 0, None).waits_for("compare")


@st.composite
def allocated(draw: st.DrawFn) -> tuple[BoundPipeline, Plan]:
    """A random pipeline whose engines lie together or apart as they come, on one to three devices
    each."""
    pipeline = draw(pipelines())
    assume(len(pipeline.engines) > 1)
    groups: dict[int, list[str]] = {}
    for engine in sorted(pipeline.engines):
        groups.setdefault(draw(st.integers(0, 3)), []).append(engine)
    parts = [(draw(st.integers(1, 3)), engines) for engines in groups.values()]
    text = "+".join(
        "|".join(f"torch[{engine}]:d{size}" for engine in engines) for size, engines in parts
    )
    keys = {"trainer__allocation": text}

    return pipeline, plan_ray(pipeline, devices(sum(size for size, _ in parts), **keys), "cpu", {})


@settings(derandomize=True, deadline=None)
@given(allocated())
def test_no_join_loses_an_input_wherever_its_engines_lie(case):
    pipeline, plan = case
    check_plan(plan, pipeline)
    over = [*resharded_columns(plan, pipeline)]
    assert len({(each.source, each.readers) for each in over}) == len(over), (
        "what is there already is not sent again"
    )
    order = [node.node_id for node in pipeline.training_nodes]

    for rank in plan.ranks:
        own = {*rank.rollout_nodes, *rank.training_nodes}
        assert rank.training_nodes == tuple(name for name in order if name in own)
        first = {
            each.source: order.index(each.target) for each in over if rank.rank in each.readers
        }

        for name in rank.training_nodes:
            lost = {
                dep
                for dep in pipeline.node(name).deps
                if dep not in own and first.get(dep, 99) > order.index(name)
            }
            assert not lost, f"rank {rank.rank} runs {name} without {lost}"

    for each in over:
        assert each.writers and all(
            each.source in plan.ranks[rank].training_nodes for rank in each.writers
        )

    check_that_all_end(plan, pipeline)


def check_that_all_end(plan: Plan, pipeline: BoundPipeline) -> None:
    """Dp groups run their nodes one by one, and wait before one for the columns that it reads."""
    over = [*resharded_columns(plan, pipeline)]
    left = {dp_group: [*plan.ranks[dp_group[0]].training_nodes] for dp_group in dp_groups_of(plan)}
    while any(left.values()):
        going = [
            dp_group
            for dp_group, nodes in left.items()
            if nodes
            and not any(
                each.source in left[dp_group_of(left, each.writers[0])]
                for each in over
                if each.readers == dp_group and each.target == nodes[0]
            )
        ]
        assert going, f"all wait: {left}"
        for dp_group in going:
            left[dp_group].pop(0)


def dp_group_of(dp_groups: dict[tuple[int, ...], list[str]], rank: int) -> tuple[int, ...]:
    return next(dp_group for dp_group in dp_groups if rank in dp_group)
