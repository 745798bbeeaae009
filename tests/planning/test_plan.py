"""The plan of one process: everything on one worker, one experience edge between the planes."""

from distflow.graph import NodeRole, Pipeline, node
from distflow.planning.plan import Channel, plan_local


def test_everything_is_on_one_worker_and_the_planes_meet_at_the_experience_edge() -> None:
    @node(writes="responses")
    def answer(prompts): ...

    def judge(responses): ...

    def learn(token_level_rewards, *, actor): ...

    class Groups:
        rollout = actor = object()

    class Config:
        actor_rollout_ref = Groups()
        reward = object()

    program = (
        Pipeline("small")
        .add_node("answer", answer)
        .add_node("judge", judge, ["answer"], node_role=NodeRole.REWARD)
        .add_node("learn", learn, ["judge"], node_role=NodeRole.ACTOR)
        .build()
        .bind(Config(), ["prompts"])
    )
    plan = plan_local(program, "cpu")
    (rank,) = plan.ranks
    assert rank.experience == ("answer", "judge")
    assert rank.learning == ("learn",)
    assert plan.channels == (Channel("answer", "judge", "local"), Channel("judge", "learn", "stream"))
    assert plan.to_json()["ranks"][0]["device"] == "cpu"
