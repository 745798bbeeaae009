"""What goes from team to team: read off the plan, for every rank the same."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distflow.graph import BoundPipeline
from distflow.planning.multi_device import plan_ray
from distflow.planning.plan import Plan, check_plan, dp_groups_of, plan_local
from distflow.runtime.reshard import ColumnReshard, handovers
from tests.planning.test_multi_device import devices, ppo, programs


def test_what_a_team_reads_of_nodes_that_it_does_not_run_is_handed_over_once() -> None:
    program = ppo()
    plan = plan_ray(program, devices(4, trainer__allocation="embedded:d1+torch[critic]:d1+torch:d2"), "cpu", {})
    assert dp_groups_of(plan) == ((2, 3), (1,)), "the policy's team leads"
    found = [(each.source, each.target, each.writers, each.readers) for each in handovers(plan, program)]
    assert found == [("value", "compare", (1,), (2, 3)), ("refer", "compare", (2, 3), (1,))]
    assert str(next(handovers(plan, program)).key(3)) == ("step 3 of edge 'value to compare on ranks 2, 3' (version 3)")


def test_one_team_hands_nothing_over() -> None:
    program = ppo()
    assert not [*handovers(plan_local(program, "cpu"), program)]
    assert not ColumnReshard(plan_local(program, "cpu"), program, 0, None).waits_for("compare")


@st.composite
def allocated(draw: st.DrawFn) -> tuple[BoundPipeline, Plan]:
    """A random program whose engines lie together or apart as they come, on one to three devices each."""
    program = draw(programs())
    assume(len(program.engines) > 1)
    groups: dict[int, list[str]] = {}
    for engine in sorted(program.engines):
        groups.setdefault(draw(st.integers(0, 3)), []).append(engine)
    parts = [(draw(st.integers(1, 3)), engines) for engines in groups.values()]
    text = "+".join("|".join(f"torch[{engine}]:d{size}" for engine in engines) for size, engines in parts)
    keys = {"trainer__allocation": text}
    return program, plan_ray(program, devices(sum(size for size, _ in parts), **keys), "cpu", {})


@settings(derandomize=True, deadline=None)
@given(allocated())
def test_no_join_loses_an_input_wherever_its_engines_lie(case: tuple[BoundPipeline, Plan]) -> None:
    program, plan = case
    check_plan(plan, program)
    over = [*handovers(plan, program)]
    assert len({(each.source, each.readers) for each in over}) == len(over), "what is there already is not sent again"
    order = [node.node_id for node in program.learning]
    for rank in plan.ranks:
        own = {*rank.experience, *rank.learning}
        assert rank.learning == tuple(name for name in order if name in own)
        first = {each.source: order.index(each.target) for each in over if rank.rank in each.readers}
        for name in rank.learning:
            lost = {dep for dep in program.node(name).deps if dep not in own and first.get(dep, 99) > order.index(name)}
            assert not lost, f"rank {rank.rank} runs {name} without {lost}"
    for each in over:
        assert each.writers and all(each.source in plan.ranks[rank].learning for rank in each.writers)
    check_that_all_end(plan, program)


def check_that_all_end(plan: Plan, program: BoundPipeline) -> None:
    """Teams go through their nodes one by one, and wait before one for what is handed over to it."""
    over, left = [*handovers(plan, program)], {team: [*plan.ranks[team[0]].learning] for team in dp_groups_of(plan)}
    while any(left.values()):
        going = [
            team
            for team, nodes in left.items()
            if nodes
            and not any(
                each.source in left[team_of(left, each.writers[0])]
                for each in over
                if each.readers == team and each.target == nodes[0]
            )
        ]
        assert going, f"all wait: {left}"
        for team in going:
            left[team].pop(0)


def team_of(teams: dict[tuple[int, ...], list[str]], rank: int) -> tuple[int, ...]:
    return next(team for team in teams if rank in team)
