"""Plans: one worker has everything, and one that does not fit its pipeline is refused before
anything is built."""

import json
from dataclasses import asdict, replace

import pytest

from distflow.graph import NodeRole, Pipeline, PipelineError, node
from distflow.planning.plan import Channel, Plan, RankPlan, plan_local, rank_plan
from tests.planning.valid_plan import check_plan


class Groups:
    rollout = actor = object()


class Config:
    actor_rollout_ref = Groups()
    reward = object()


@pytest.fixture
def pipeline():
    @node(writes="responses")
    def answer(prompts, *, rollout): ...

    @node(writes="token_level_rewards", scope="group")
    def grade(responses, *, reward_fn): ...

    def learn(token_level_rewards, *, actor): ...

    return (
        Pipeline("small")
        .add_node("answer", answer)
        .add_node("grade", grade, ["answer"], node_role=NodeRole.REWARD)
        .add_node("learn", learn, ["grade"], node_role=NodeRole.ACTOR)
        .build()
        .bind(Config(), ["prompts"])
    )


def test_everything_is_on_one_worker_and_the_planes_meet_at_the_experience_edge(pipeline):
    plan = plan_local(pipeline, "cpu")
    (rank,) = plan.ranks
    assert (rank.rollout_nodes, rank.training_nodes) == (("answer", "grade"), ("learn",))
    assert (rank.engines, rank.services) == (("rollout", "actor"), ("reward_fn",))
    assert plan.channels == (
        Channel("answer", "grade", "local"),
        Channel("grade", "learn", "stream"),
    )
    assert json.loads(json.dumps(asdict(plan)))["ranks"][0]["device"] == "cpu"
    check_plan(plan, pipeline)


def test_an_engine_of_two_nodes_is_named_once():
    @node(writes="responses")
    def answer(prompts, *, rollout, reward_fn): ...

    @node(writes="token_level_rewards", scope="group")
    def grade(responses, *, rollout, reward_fn): ...

    graph = (
        Pipeline("small")
        .add_node("answer", answer)
        .add_node("grade", grade, ["answer"], node_role=NodeRole.REWARD)
    )
    (rank,) = plan_local(graph.build().bind(Config(), ["prompts"]), "cpu").ranks
    assert (rank.engines, rank.services) == (("rollout",), ("reward_fn",))


def test_a_worker_gets_the_engines_and_services_of_its_own_nodes_only(pipeline):
    learner = rank_plan(pipeline, 0, "cuda:0", [], ["learn"])
    player = rank_plan(pipeline, 1, "cuda:1", ["answer", "grade"], [])
    assert (learner.engines, learner.services) == (("actor",), ())
    assert (player.engines, player.services, player.device) == (
        ("rollout",),
        ("reward_fn",),
        "cuda:1",
    )
    check_plan(Plan("small", (learner, player), ()), pipeline)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"engines": ("rollout", "actor", "ref")},
            "gives rank 0 the engine 'ref', which no node of pipeline 'small'",
        ),
        (
            {"services": ("reward_fn", "tokenizer")},
            "gives rank 0 the service 'tokenizer', which no node",
        ),
        ({"engines": ("rollout",)}, "gives rank 0 no engine 'actor', which its nodes need"),
        ({"services": ()}, "gives rank 0 no service 'reward_fn', which its nodes need"),
        (
            {"training_nodes": (), "engines": ("rollout",)},
            "no rank of the plan runs node 'learn' of pipeline 'small'",
        ),
    ],
)
def test_a_plan_that_does_not_fit_its_program_is_refused(pipeline, changes, said):
    plan = plan_local(pipeline, "cpu")
    rank: RankPlan = replace(plan.ranks[0], **changes)
    with pytest.raises(AssertionError) as caught:
        check_plan(replace(plan, ranks=(rank,)), pipeline)
    assert said in str(caught.value)


def test_a_node_that_the_program_has_not_is_refused(pipeline):
    plan = plan_local(pipeline, "cpu")
    rank = replace(plan.ranks[0], training_nodes=("learn", "lern"))
    with pytest.raises(PipelineError, match="lern"):
        check_plan(replace(plan, ranks=(rank,)), pipeline)
