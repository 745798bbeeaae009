"""What goes from team to team: read off the plan, for every rank the same."""

from distflow.planning.cluster import plan_ray
from distflow.planning.plan import learning_teams, plan_local
from distflow.runtime.handovers import Handovers, handovers
from tests.planning.test_cluster import devices, ppo


def test_what_a_team_reads_of_nodes_that_it_does_not_run_is_handed_over_once() -> None:
    program = ppo()
    plan = plan_ray(program, devices(4, trainer__allocation="embedded:d1+torch[critic]:d1+torch:d2"), "cpu", {})
    assert learning_teams(plan) == ((2, 3), (1,)), "the policy's team leads"
    found = [(each.source, each.target, each.writers, each.readers) for each in handovers(plan, program)]
    assert found == [("value", "compare", (1,), (2, 3)), ("refer", "compare", (2, 3), (1,))]
    assert str(next(handovers(plan, program)).key(3)) == ("step 3 of edge 'value to compare on ranks 2, 3' (version 3)")


def test_one_team_hands_nothing_over() -> None:
    program = ppo()
    assert not [*handovers(plan_local(program, "cpu"), program)]
    assert not Handovers(plan_local(program, "cpu"), program, 0, None).waits_for("compare")
