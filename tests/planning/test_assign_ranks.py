"""Plans of many ranks: by an allocation, by the scheduler, and what contradicts an allocation."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.config import Config, Loaded
from distflow.config.compose.fit_defaults_to_data import apply_changes
from distflow.config.keys.schema import schema_keys
from distflow.errors import UserError
from distflow.graph import BoundPipeline, NodeRole, NodeType, Pipeline, node
from distflow.planning.allocation_expression import follow_allocation
from distflow.planning.assign_ranks import plan_ray, share_devices
from distflow.planning.independent_parts import pipeline_parts
from distflow.planning.layouts import Layout, Sizes
from distflow.planning.plan import Plan
from tests.planning.valid_plan import check_plan

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def ray_is_there(monkeypatch):
    """The launcher of several workers may be chosen."""
    info = schema_keys()["trainer.launcher"]
    monkeypatch.setitem(schema_keys(), info.name, replace(info, spec=replace(info.spec, later=())))


def config(**keys: object) -> Config:
    """Keys as `trainer__nnodes=2`."""
    return apply_changes(
        Config(), [(name.replace("__", "."), value, "") for name, value in keys.items()]
    )[0]


def devices(per_node: int, nodes: int = 1, **keys: object) -> Config:
    return config(trainer__nnodes=nodes, trainer__n_gpus_per_node=per_node, **keys)


@node(writes="responses")
def answer(prompts, *, rollout): ...


@node(writes="token_level_rewards", scope="group")
def grade(responses, *, reward_fn): ...


@node(writes="ref_log_prob")
def refer(responses, *, ref): ...


@node(writes="values")
def value(responses, *, critic): ...


@node(writes="advantages")
def compare(token_level_rewards, ref_log_prob, values=None): ...


def learn(advantages, *, actor): ...


def learn_values(advantages, *, critic): ...


def grpo() -> BoundPipeline:
    pipeline = (
        Pipeline("grpo")
        .add_node("answer", answer)
        .add_node("grade", grade, node_role=NodeRole.REWARD)
    )
    pipeline.add_node("refer", refer, plane="training").add_node(
        "compare", compare, plane="training"
    )

    return pipeline.add_node("learn", learn).build().bind(Config(), ["prompts"])


def ppo() -> BoundPipeline:
    pipeline = (
        Pipeline("ppo")
        .add_node("answer", answer)
        .add_node("grade", grade, node_role=NodeRole.REWARD)
    )
    pipeline.add_node("refer", refer, plane="training").add_node("value", value, plane="training")
    pipeline.add_node("compare", compare, plane="training")
    pipeline.add_node("learn", learn).add_node("learn_values", learn_values)

    return pipeline.build().bind(Config(), ["prompts"])


def two_parts() -> BoundPipeline:
    """Two models that learn the same given responses, each by itself."""

    @node(writes="advantages")
    def load(prompts): ...

    pipeline = Pipeline("two").add_node("load", load)
    pipeline.add_node("learn", learn).add_node("learn_values", learn_values)
    return pipeline.build().bind(Config(), ["prompts"])


def nodes_of(plan: Plan) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(rank.rollout_nodes, rank.training_nodes) for rank in plan.ranks]


PLAYS = ("answer", "grade")
LEARNS = ("refer", "compare", "learn")


def test_without_an_allocation_one_part_is_on_all_devices():
    bound_pipeline = grpo()
    plan = plan_ray(bound_pipeline, devices(2, nodes=2), "cpu", {"actor": "7B"})
    check_plan(plan, bound_pipeline)
    assert nodes_of(plan) == [(PLAYS, LEARNS)] * 4
    assert [rank.node for rank in plan.ranks] == [0, 0, 1, 1]
    assert [rank.rank for rank in plan.ranks] == [0, 1, 2, 3]
    assert plan.layout("actor") == Layout("actor", "torch", (0, 1, 2, 3), Sizes(data=4))
    assert plan.layout("rollout") == Layout("rollout", "embedded", (0, 1, 2, 3), Sizes(data=4))
    assert {channel.kind for channel in plan.channels} == {"local", "stream"}
    assert plan.backends == ("gloo",)
    assert json.loads(json.dumps(asdict(plan)))["layouts"][0]["sizes"]["data"] == 4


def test_rollout_and_training_on_devices_of_their_own():
    bound_pipeline = grpo()
    plan = plan_ray(
        bound_pipeline,
        devices(4, trainer__allocation="embedded[rollout]:d2+torch[actor]:d2"),
        "cpu",
        {},
    )
    check_plan(plan, bound_pipeline)
    assert nodes_of(plan) == [(PLAYS, ())] * 2 + [((), LEARNS)] * 2
    assert [rank.engines for rank in plan.ranks] == [("rollout",)] * 2 + [("ref", "actor")] * 2
    assert [rank.services for rank in plan.ranks] == [("reward_fn",)] * 2 + [()] * 2
    assert plan.layout("ref").ranks == plan.layout("actor").ranks == (2, 3)
    assert plan.layout("rollout").ranks == (0, 1)
    assert [(group.name, group.ranks) for group in plan.groups] == [
        ("process_group_1", (0, 1)),
        ("process_group_2", (2, 3)),
    ]
    assert plan.layout("critic") is None


def test_an_allocation_of_shared_devices_is_the_plan_of_the_scheduler():
    shared = devices(3, trainer__allocation="embedded:d3|torch:d3")
    assert nodes_of(plan_ray(grpo(), shared, "cpu", {})) == nodes_of(
        plan_ray(grpo(), devices(3), "cpu", {})
    )


def test_a_critic_of_its_own_runs_what_it_waits_for():
    """What uses no engine runs wherever it is needed; columns go between the ranks of actor and
    critic."""
    bound_pipeline = ppo()
    plan = plan_ray(
        bound_pipeline,
        devices(4, trainer__allocation="embedded:d1+torch:d2+torch[critic]:d1"),
        "cpu",
        {},
    )
    check_plan(plan, bound_pipeline)
    actor = ("refer", "compare", "learn")
    critic = ("value", "compare", "learn_values")
    assert nodes_of(plan) == [(PLAYS, ()), ((), actor), ((), actor), ((), critic)]
    kinds = {(channel.source, channel.target): channel.kind for channel in plan.channels}
    assert kinds["refer", "compare"] == kinds["value", "compare"] == "exchange"
    assert kinds["compare", "learn"] == kinds["compare", "learn_values"] == "local"
    assert kinds["answer", "value"] == "stream" and kinds["answer", "grade"] == "local"


def test_an_unnamed_critic_sits_with_the_actor():
    plan = plan_ray(ppo(), devices(3, trainer__allocation="embedded:d1+torch:d2"), "cpu", {})
    assert plan.layout("critic") == Layout("critic", "torch", (1, 2), Sizes(data=2))


def test_a_rollout_beside_another_model_than_the_policy_is_refused():
    text = "embedded:d1|torch[critic]:d1+torch[actor]:d1"
    with pytest.raises(UserError, match="rollout .* devices of 'critic' .*'actor'"):
        plan_ray(ppo(), devices(2, trainer__allocation=text), "cpu", {})


def test_independent_parts_have_devices_of_their_own():
    bound_pipeline = two_parts()
    plan = plan_ray(bound_pipeline, devices(3), "cpu", {"actor": "500M", "critic": 600_000_000})
    check_plan(plan, bound_pipeline)
    critic = (("load",), ("learn_values",))
    actor = (("load",), ("learn",))
    assert nodes_of(plan) == [critic, critic, actor]
    assert plan.layout("critic").sizes == Sizes(data=2) and plan.layout("actor").ranks == (2,)
    assert [group.ranks for group in plan.groups] == [(0, 1)]


def test_a_join_before_a_fork_is_whole_in_each_part():
    """X and Y meet in M, M and P in Z, and Z leads to two ends, which train models of their own."""
    deps = {"X": "", "Y": "", "M": "XY", "P": "", "Z": "MP", "J": "Z", "K": "J", "L": "Z", "N": "L"}
    trains = {"K": "actor", "N": "critic"}
    pipeline = Pipeline("two ends")

    for name, ids in deps.items():
        kind = NodeType.MODEL_TRAIN if name in trains else NodeType.COMPUTE
        pipeline.add_node(
            name, nothing, list(ids), node_type=kind, engine=trains.get(name), plane="training"
        )

    bound_pipeline = pipeline.build().bind(Config(), ["prompts"])
    plan = plan_ray(
        bound_pipeline,
        devices(2, 2, dag__apportion_strategy="even"),
        "cpu",
        {"actor": "100M", "critic": "50M"},
    )
    check_plan(plan, bound_pipeline)
    assert [set(rank.training_nodes) for rank in plan.ranks] == [set("XYMPZJK")] * 2 + [
        set("XYMPZLN")
    ] * 2
    assert [rank.node for rank in plan.ranks] == [0, 0, 1, 1]
    by_size = plan_ray(bound_pipeline, devices(2, 2), "cpu", {"actor": "100M", "critic": "50M"})
    assert (by_size.layout("actor").ranks, by_size.layout("critic").ranks) == ((0, 2, 3), (1,))


def test_shares_go_by_parameters_or_evenly():
    sizes: dict[str, str | float] = {"actor": "600B", "critic": "1M"}
    by_size = plan_ray(two_parts(), devices(8), "cpu", sizes)
    assert (len(by_size.layout("actor").ranks), len(by_size.layout("critic").ranks)) == (7, 1)
    evenly = plan_ray(two_parts(), devices(8, dag__apportion_strategy="even"), "cpu", sizes)
    assert (len(evenly.layout("actor").ranks), len(evenly.layout("critic").ranks)) == (4, 4)


SIZES = st.fixed_dictionaries(
    {role: st.integers(0, 10**12) for role in ("actor", "critic", "ref", "reward_model")}
)
LARGE = {"actor": "300M"}
SMALL = {"actor": "100M"}


def test_pipelines_side_by_side_share_devices_by_parameters_or_evenly():
    parts = [pipeline_parts(grpo(), SMALL), pipeline_parts(grpo(), LARGE)]
    assert share_devices(parts, devices(2, 2)) == [((1,),), ((0, 2, 3),)]
    assert share_devices(parts, devices(2, 2, dag__apportion_strategy="even")) == [
        ((2, 3),),
        ((0, 1),),
    ]
    longer = [pipeline_parts(grpo(), SMALL), pipeline_parts(ppo(), SMALL)]
    assert share_devices(longer, devices(3)) == [((2,),), ((0, 1),)], (
        "as large, and the chain is longer"
    )
    spread = devices(2, 2, dag__apportion_strategy="even", dag__consider_node_cohesion=False)
    assert share_devices(parts, spread) == [((1, 3),), ((0, 2),)]


def test_fewer_devices_than_pipelines_are_refused():
    parts = [pipeline_parts(grpo(), SMALL)] * 3
    with pytest.raises(UserError, match="3 independent parts, .* 2 devices"):
        share_devices(parts, devices(2))


SHARED = st.lists(st.tuples(st.sampled_from([grpo, ppo, two_parts]), SIZES), min_size=1, max_size=4)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(SHARED, st.integers(1, 3), st.integers(4, 8), st.sampled_from(["even", "param_aware"]))
def test_each_of_several_pipelines_has_the_plan_that_it_has_alone_on_as_many_devices(
    wanted, nodes, per_node, strategy
):
    bound = [(make(), sizes) for make, sizes in wanted]
    given_config = devices(per_node, nodes, dag__apportion_strategy=strategy)
    parts = [pipeline_parts(*each) for each in bound]
    if sum(map(len, parts)) > nodes * per_node:
        return

    shared = share_devices(parts, given_config)
    assert sorted(number for own in shared for part in own for number in part) == list(
        range(nodes * per_node)
    )

    for (pipeline, sizes), own in zip(bound, shared, strict=True):
        its_config = devices(
            per_node, nodes, dag__apportion_strategy=strategy, trainer__devices=own
        )
        plan = plan_ray(pipeline, its_config, "cpu", sizes)
        check_plan(plan, pipeline)
        numbers = sorted(number for part in own for number in part)
        assert [rank.node for rank in plan.ranks] == [number // per_node for number in numbers]

        if len(own) == 1:
            alone = plan_ray(pipeline, devices(len(numbers)), "cpu", sizes)
            assert replace(plan, ranks=tuple(replace(rank, node=0) for rank in plan.ranks)) == alone


@pytest.mark.parametrize("wrong", [((0, 4),), ((1, 1),), ((0,), (1,)), ((),)])
def test_devices_that_are_not_there_twice_or_for_other_parts_are_refused(wrong):
    with pytest.raises(
        UserError,
        match=r"trainer\.devices.* 1 independent parts, .* 4",
    ):
        plan_ray(grpo(), devices(2, 2, trainer__devices=wrong), "cpu", LARGE)


def test_on_gpus_gloo_stands_beside_nccl_from_the_threshold_on():
    assert plan_ray(grpo(), devices(4), "cuda", {}).backends == ("nccl",)
    assert plan_ray(grpo(), devices(4, dag__backend_threshold=4), "cuda", {}).backends == (
        "nccl",
        "gloo",
    )


SHARDED = {"actor_rollout_ref__actor__strategy": "fsdp"}
SHARD = "actor_rollout_ref__actor__fsdp_config__fsdp_size"


@pytest.mark.parametrize(("size", "shard"), [(-1, None), (1, 1), (2, 2), (4, None)])
def test_a_copy_of_the_weights_lies_over_as_many_ranks_as_the_config_says(size, shard):
    plan = plan_ray(grpo(), devices(4, **SHARDED, **{SHARD: size}), "cpu", {})
    assert {layout.role: layout.shard for layout in plan.layouts} == {
        "actor": shard,
        "ref": shard,
        "rollout": None,
    }
    pairs = [] if shard != 2 else [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert sorted(group.ranks for group in plan.groups if len(group.ranks) == 2) == pairs


@pytest.mark.parametrize("allocation", ["embedded:d8|fsdp:d8", "embedded:d8|fsdp:d4t2"])
def test_a_copy_over_ranks_that_do_not_divide_them_is_refused(allocation):
    keys = {**SHARDED, SHARD: 3, "trainer__n_gpus_per_node": 8}
    number = "8" if "d8|fsdp:d8" in allocation else "4"
    with pytest.raises(
        UserError,
        match=f"fsdp_size=3 .* {number} data parallel ranks of the actor",
    ):
        plan_ray(grpo(), config(trainer__allocation=allocation, **keys), "cpu", {})


@pytest.mark.parametrize(
    ("allocation", "keys", "said"),
    [
        (
            "embedded:d2+torch:d2",
            {},
            ("takes 4 devices", "trainer.nnodes=1 × trainer.n_gpus_per_node=1 are 1"),
        ),
        ("embedded:d2|torch:d2", {"trainer__nnodes": 3}, ("takes 2 devices", "trainer.nnodes=3")),
        (
            "hf:d1|torch:d1",
            {},
            (f"{ROLLOUT}.name=embedded contradicts trainer.allocation", "which says hf"),
        ),
        (
            "embedded:d1|torch:d1",
            {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2},
            (f"{ROLLOUT}.tensor_model_parallel_size=2 contradicts", "which says 1"),
        ),
        (
            "embedded:d1|fsdp:d1",
            {},
            ("actor_rollout_ref.actor.strategy=torch contradicts", "which says fsdp"),
        ),
        ("torch:d1", {}, ("lacks the rollout",)),
        ("embedded:d1", {}, ("lacks the actor",)),
        (
            "embedded:d1|torch:d1|torch[critic]:d1",
            {},
            ("pipeline 'grpo' has no critic; its engines: actor, ref",),
        ),
        ("embedded:d1t2|torch:d2", {}, ("has no tensor parallelism",)),
        (
            "embedded:d4|fsdp:d2t2|fsdp[ref]:d4",
            {
                "trainer__n_gpus_per_node": 4,
                "actor_rollout_ref__actor__strategy": "fsdp",
            },
            ("'fsdp[ref]:d4': 'ref' needs the sizes of 'actor'",),
        ),
    ],
)
def test_what_contradicts_the_allocation_is_refused(allocation, keys, said):
    with pytest.raises(UserError) as caught:
        plan_ray(grpo(), config(trainer__allocation=allocation, **keys), "cpu", {})
    assert all(part in str(caught.value) for part in said), caught.value


def test_a_node_whose_engines_lie_apart_is_refused():
    def both(advantages, *, actor, critic): ...

    pipeline = (
        Pipeline("both")
        .add_node("answer", answer)
        .add_node("grade", grade, node_role=NodeRole.REWARD)
    )
    pipeline.add_node("refer", refer, plane="training").add_node(
        "compare", compare, plane="training"
    )
    bound_pipeline = pipeline.add_node("both", both).build().bind(Config(), ["prompts"])
    text = "embedded:d1+torch:d1+torch[critic]:d1"

    with pytest.raises(
        UserError,
        match="'both' .*'critic', .*'actor': join",
    ):
        plan_ray(bound_pipeline, devices(3, trainer__allocation=text), "cpu", {})


def test_a_rollout_of_several_devices_divides_them():
    keys = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2}
    with pytest.raises(UserError, match="tensor_model_parallel_size=2 .* 3 devices"):
        plan_ray(grpo(), devices(3, **keys), "cpu", {})

    plan = plan_ray(grpo(), devices(4, **keys), "cpu", {})
    assert plan.layout("rollout").sizes == Sizes(data=2, tensor=2)
    assert [rank.rollout_group for rank in plan.ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert all(not rank.rollout_group for rank in plan_ray(grpo(), devices(2), "cpu", {}).ranks)


def test_ranks_of_one_rollout_engine_are_on_one_machine():
    keys = {
        "trainer__allocation": "vllm:d2t2+fsdp:d4",
        "trainer__nnodes": 2,
        "trainer__n_gpus_per_node": 4,
    }
    engines = {
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__actor__strategy": "fsdp",
    }
    size = "actor_rollout_ref__rollout__tensor_model_parallel_size"
    plan = plan_ray(grpo(), config(**keys, **engines, **{size: 2}), "cpu", {})
    of_rollout = [rank.rank for rank in plan.ranks if rank.rollout_nodes]
    groups = [plan.ranks[rank].rollout_group for rank in of_rollout]
    assert groups == [tuple(of_rollout[:2])] * 2 + [tuple(of_rollout[2:])] * 2
    keys |= {"trainer__allocation": "vllm:d1t6+fsdp:d2"}

    with pytest.raises(UserError, match="ranks 0, 1, 4, 5, 6, 7 .* 2 machines"):
        plan_ray(grpo(), config(**keys, **engines, **{size: 6}), "cpu", {})


def test_more_parts_than_devices_share_all_of_them():
    (rank,) = plan_ray(two_parts(), devices(1), "cpu", {}).ranks
    assert set(rank.training_nodes) == {node.node_id for node in two_parts().training_nodes}


def generates_for_two(joined: bool) -> BoundPipeline:
    """The policy and a second model learn from one rollout; they meet in a node behind both, or do
    not."""
    pipeline = Pipeline("two_learners")
    pipeline.add_node(
        "generate", nothing, node_type=NodeType.MODEL_INFERENCE, engine="rollout", plane="rollout"
    )
    pipeline.add_node("score", nothing, ["generate"], plane="rollout")
    pipeline.add_node("both_read", nothing, ["score"], plane="training")
    pipeline.add_node(
        "policy", nothing, ["both_read"], node_type=NodeType.MODEL_TRAIN, engine="actor"
    )
    pipeline.add_node(
        "second", nothing, ["both_read"], node_type=NodeType.MODEL_TRAIN, engine="critic"
    )
    if joined:
        pipeline.add_node("meet", nothing, ["policy", "second"], plane="training")
    return pipeline.build().bind(Config(), ["prompts"])


def test_training_paths_that_part_after_one_rollout_have_devices_of_their_own():
    plan = plan_ray(generates_for_two(joined=False), devices(3), "cpu", {"actor": 2, "critic": 1})
    check_plan(plan, generates_for_two(joined=False))
    policy = (("generate", "score"), ("both_read", "policy"), {"rollout", "actor"})
    second = ((), ("both_read", "second"), {"critic"})
    found = [(rank.rollout_nodes, rank.training_nodes, {*rank.engines}) for rank in plan.ranks]
    assert found == [policy, policy, second]
    met = plan_ray(generates_for_two(joined=True), devices(3), "cpu", {"actor": 2, "critic": 1})
    assert all({*rank.engines} == {"rollout", "actor", "critic"} for rank in met.ranks)


def loaded(origins: dict[str, str], **keys: object) -> Loaded:
    text = "hf[rollout]:d4+torch[actor]:d2"
    return Loaded(config(trainer__launcher="ray", trainer__allocation=text, **keys), origins)


@pytest.mark.parametrize(
    ("origins", "keys", "nodes", "per_node"),
    [
        ({}, {}, 1, 6),
        ({"trainer.nnodes": "run.yaml:3"}, {"trainer__nnodes": 3}, 3, 2),
        ({"trainer.n_gpus_per_node": "run.yaml:3"}, {"trainer__n_gpus_per_node": 3}, 2, 3),
    ],
)
def test_keys_that_nobody_set_follow_the_allocation(origins, keys, nodes, per_node):
    found = follow_allocation(loaded(origins, **keys))
    trainer = found.config.trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (nodes, per_node)
    assert found.config.actor_rollout_ref.rollout.name == "hf"
    shown = f"{ROLLOUT}.name='hf' instead of 'embedded': trainer.allocation says so"
    assert shown in [str(fitted) for fitted in found.fitted]
    plan_ray(grpo(), found.config, "cpu", {})


def test_other_keys_must_go_with_the_engines_of_the_allocation():
    megatron = Loaded(config(trainer__allocation="embedded:d1|megatron:d1"), {})
    with pytest.raises(UserError, match="'megatron' .* torch"):
        follow_allocation(megatron)


def test_without_an_allocation_nothing_follows():
    plain = Loaded(Config(), {})
    assert follow_allocation(plain) is plain


def nothing(ctx): ...


@st.composite
def pipelines(draw: st.DrawFn) -> BoundPipeline:
    """Random nodes behind each other as they come: some that load, then of the training loop, some
    with an engine."""
    pipeline = Pipeline("random")
    num_loading = draw(st.integers(0, 2))
    for number in range(num_loading + draw(st.integers(1, 7))):
        deps = [f"n{i}" for i in range(number) if draw(st.integers(0, 2)) == 0]
        loads = number < num_loading
        engine = (
            None
            if loads
            else draw(st.sampled_from([None, "actor", "critic", "ref", "reward_model"]))
        )
        kind = NodeType.MODEL_INFERENCE if engine else NodeType.COMPUTE
        plane = "rollout" if loads else "training"
        pipeline.add_node(f"n{number}", nothing, deps, node_type=kind, engine=engine, plane=plane)  # type: ignore[arg-type]

    return pipeline.build().bind(Config(), ["prompts"])


def engines_together(bound_pipeline: BoundPipeline) -> list[set[str]]:
    """Engines that one part must have, by the definition: those that some exit depends on, joined
    where they meet."""
    found: list[set[str]] = []
    for end in bound_pipeline.training_nodes:
        behind = {end.node_id}
        for other in reversed(bound_pipeline.training_nodes):
            if any(
                dep == other.node_id for name in behind for dep in bound_pipeline.node(name).deps
            ):
                behind.add(other.node_id)

        engines = {engine for name in behind for engine in bound_pipeline.node(name).engines}
        met = [part for part in found if part & engines]
        found = [part for part in found if part not in met] + (
            [engines.union(*met)] if engines else []
        )

    return found


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(
    pipelines(),
    st.integers(1, 3),
    st.integers(1, 6),
    SIZES,
    st.sampled_from(["even", "param_aware"]),
)
def test_any_program_is_placed_whole_on_any_cluster_that_is_large_enough(
    bound_pipeline, nodes, per_node, sizes, strategy
):
    given_config = devices(per_node, nodes, dag__apportion_strategy=strategy)
    parts = engines_together(bound_pipeline)
    if len(parts) > nodes * per_node:
        parts = [set[str]().union(*parts)]
    plan = plan_ray(bound_pipeline, given_config, "cpu", sizes)
    check_plan(plan, bound_pipeline)
    assert [rank.node for rank in plan.ranks] == [
        rank // per_node for rank in range(nodes * per_node)
    ]

    for rank in plan.ranks:
        assert rank.training_nodes and (not parts or set(rank.engines) in parts), (
            "it has a part, and one alone"
        )

        for node_id in (*rank.rollout_nodes, *rank.training_nodes):
            assert {*bound_pipeline.node(node_id).deps} <= {
                *rank.rollout_nodes,
                *rank.training_nodes,
            }, "an input of a join is lost"

    assert {frozenset(rank.engines) for rank in plan.ranks} == {
        frozenset(part) for part in parts or [set[str]()]
    }
    assert {layout.role: layout.ranks for layout in plan.layouts} == {
        role: tuple(rank.rank for rank in plan.ranks if role in rank.engines)
        for role in bound_pipeline.engines
    }
    assert {channel.kind for channel in plan.channels} <= {"local", "stream"}, (
        "no part waits for another"
    )
    assert plan == plan_ray(bound_pipeline, given_config, "cpu", dict(reversed(sizes.items())))
