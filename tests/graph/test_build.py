"""Structure: every error of `build` names the node, the field or option, and the nearest existing
name."""

import pytest

from distflow.errors import UserError
from distflow.graph import NodeRole, NodeType, Pipeline, PipelineError, node


@node(writes=("response_ids", "response_mask", "responses"), role=NodeRole.ROLLOUT)
async def generate(prompt_ids, *, rollout): ...


@node(writes="token_level_scores")
def reward_fn(responses): ...


@node(writes="advantages")
def centred(token_level_scores, response_mask, group_index, *, scale: float = 1.0): ...


def train(advantages, old_log_probs=None, *, actor, batch): ...


def nothing(ctx): ...


def writer_of(field):
    @node(writes=field)
    def write(ctx): ...

    return write


def reader_of(field):
    @node(reads=field)
    def read(batch): ...

    return read


def fails(pipeline: Pipeline) -> str:
    with pytest.raises(PipelineError) as caught:
        pipeline.build()
    assert isinstance(caught.value, UserError), "a mistake of the user's, and told as one"
    return str(caught.value)


def test_whole_program_builds():
    graph = (
        Pipeline("small", "a small one")
        .add_node("rollout_actor", generate)
        .add_node("reward", reward_fn, ["rollout_actor"])
        .add_node("advantage", centred, ["reward"], scale=0.5)
        .add_node("actor_train", train, ["advantage"], node_role=NodeRole.ACTOR)
        .build()
    )
    assert graph.graph_id == "small" and graph.description == "a small one"
    assert graph.get_topological_sort() == ["rollout_actor", "reward", "advantage", "actor_train"]
    assert [n.node_type for n in graph.nodes.values()] == [
        NodeType.MODEL_INFERENCE,
        NodeType.COMPUTE,
        NodeType.COMPUTE,
        NodeType.MODEL_TRAIN,
    ]
    assert graph.get_node("advantage").options == {"scale": 0.5}


def test_nothing_is_looked_up_before_build():
    pipeline = Pipeline("p").add_node("a", "no_such_module_anywhere:f", ["ghost"], node_type=17)
    assert isinstance(pipeline, Pipeline)


def test_empty_graph():
    assert "no nodes" in fails(Pipeline("p"))


def test_id_given_twice():
    assert "node 'a' exists already" in fails(
        Pipeline("p").add_node("a", nothing).add_node("a", nothing)
    )


def test_unknown_dependency_names_the_nearest():
    message = fails(
        Pipeline("p")
        .add_node("rollout_actor", nothing)
        .add_node("reward", nothing, ["rolout_actor"])
    )
    assert (
        "node 'reward' depends on 'rolout_actor'" in message
        and "did you mean 'rollout_actor'?" in message
    )


def test_dependency_on_itself():
    assert "cycle: a -> a" in fails(Pipeline("p").add_node("a", nothing, ["a"]))


def test_cycle_is_shown_in_the_direction_of_the_data():
    pipeline = (
        Pipeline("p")
        .add_node("start", nothing)
        .add_node("a", nothing, ["start", "c"])
        .add_node("b", nothing, ["a"])
        .add_node("c", nothing, ["b"])
        .add_node("end", nothing, ["c"])
    )
    message = fails(pipeline)
    assert any(
        path in message for path in ("a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c")
    )
    assert "start" not in message and "end" not in message


def test_field_read_before_its_writer():
    pipeline = (
        Pipeline("p")
        .add_node("rollout_actor", generate)
        .add_node("advantage", centred, ["rollout_actor"])
        .add_node("reward", reward_fn, ["advantage"])
    )
    message = fails(pipeline)
    assert "'advantage' reads 'token_level_scores' before 'reward' writes it" in message


def test_optional_field_read_before_its_writer_is_no_less_wrong():
    @node(writes="old_log_probs")
    def late(batch): ...

    pipeline = (
        Pipeline("p")
        .add_node("advantage", writer_of("advantages"))
        .add_node("actor_train", train, ["advantage"])
        .add_node("late", late, ["actor_train"])
    )
    message = fails(pipeline)
    assert "'actor_train' reads 'old_log_probs' before 'late' writes it" in message


def test_two_unordered_writers():
    pipeline = (
        Pipeline("p")
        .add_node("start", nothing)
        .add_node("one", writer_of("returns"), ["start"])
        .add_node("two", writer_of("returns"), ["start"])
    )
    message = fails(pipeline)
    assert (
        "'one' and 'two' both write 'returns'" in message
        and "add 'one' to the deps of 'two'" in message
    )


def test_ordered_writers_and_an_update_in_place_are_fine():
    @node(writes="loss_mask")
    def tighten(loss_mask, response_mask): ...

    graph = (
        Pipeline("p")
        .add_node("make", writer_of("response_mask"))
        .add_node("look", reader_of("loss_mask"), ["make"])
        .add_node("tighten", tighten, ["look"])
        .add_node("tighten_more", tighten, ["tighten"])
        .build()
    )
    assert graph.validate_graph() == (True, None)


def test_unknown_option_names_the_nearest():
    message = fails(Pipeline("p").add_node("advantage", centred, scal=0.5))
    assert (
        "node 'advantage'" in message and "'scal'" in message and "did you mean 'scale'?" in message
    )


def test_misspelt_keyword_of_add_node_is_named_too():
    message = fails(Pipeline("p").add_node("advantage", centred, node_rol=NodeRole.ADVANTAGE))
    assert "'node_rol'" in message and "did you mean 'node_role'?" in message


def test_arguments_of_other_systems_pass_with_their_defaults():
    graph = Pipeline("p").add_node("x", nothing, agent_group=0, filter_plugin=None).build()
    assert graph.get_node("x").options == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"deps": "start"}, "deps must be a list"),
        ({"deps": [3]}, "deps must be a list"),
        ({"deps": 3}, "deps must be a list"),
        ({"deps": ["start", "start"]}, "'start' is named twice"),
        ({"node_type": "COMPUT"}, "did you mean 'COMPUTE'?"),
        ({"node_type": 3}, "3 is not a NodeType"),
        ({"node_role": "ACTR"}, "did you mean 'ACTOR'?"),
        ({"node_role": NodeType.COMPUTE}, "is not a NodeRole"),
        ({"scope": "groups"}, "did you mean 'group'?"),
        ({"retry_limit": -1}, "retry_limit must be an int"),
        ({"retry_limit": True}, "retry_limit must be an int"),
        ({"plane": "train"}, "did you mean 'training'?"),
        ({"writes": 3}, "expected names, got 3"),
        ({"writes": ("values", "values")}, "'values' is named twice"),
        (
            {"agent_group": 3},
            "'agent_group' does not exist: the agents of an episode are declared in",
        ),
        ({"filter_plugin": nothing}, "a filter is a node whose function returns Drop(reason)"),
        ({"func": None}, "has no func"),
        ({"func": 3}, "cannot be called"),
        ({"func": dict}, "is a class"),
    ],
)
def test_arguments_of_a_wrong_type(arguments, said):
    message = fails(
        Pipeline("p").add_node("start", nothing).add_node("bad", **{"func": nothing, **arguments})
    )
    assert "'bad'" in message and said in message


@pytest.mark.parametrize("node_id", ["", "  ", 3, None])
def test_node_id_of_a_wrong_type(node_id):
    assert "node_id must be" in fails(Pipeline("p").add_node(node_id, nothing))


def test_type_and_role_by_name():
    graph = (
        Pipeline("p").add_node("a", nothing, node_type="barrier_sync", node_role="actor").build()
    )
    assert graph.get_node("a").node_type is NodeType.BARRIER_SYNC
    assert graph.get_node("a").node_role is NodeRole.ACTOR


def test_role_of_the_call_goes_before_that_of_the_function():
    graph = (
        Pipeline("p")
        .add_node("a", generate)
        .add_node("b", generate, ["a"], node_role=NodeRole.DEFAULT)
        .build()
    )
    assert [graph.get_node(i).node_role for i in "ab"] == [NodeRole.ROLLOUT, NodeRole.DEFAULT]


@pytest.mark.parametrize("kind", [NodeType.PUT_TO_BUFFER, NodeType.GET_FROM_BUFFER])
def test_marks_of_an_exchange_need_no_function_and_change_nothing(kind):
    graph = (
        Pipeline("p").add_node("a", nothing).add_node("mark", deps=["a"], node_type=kind).build()
    )
    batch = object()
    assert graph.get_node("mark").fn(batch=batch) is batch


def test_a_node_that_names_data_or_a_workflow_needs_no_function_and_its_options_are_none_of_one():
    load = (
        Pipeline("p")
        .add_node("load", node_type="DATA_LOAD", train_files="rows.jsonl", lazy=True)
        .build()
    )
    assert load.get_node("load").configures and load.get_node("load").options == {
        "train_files": "rows.jsonl",
        "lazy": True,
    }
    bound = load.bind(None, []).node("load")
    assert (bound.plane, bound.options, bound.contract.writes) == ("rollout", {}, ())
    play = (
        Pipeline("p")
        .add_node("play", node_type="ENV_INTERACT", env="game.py:Game")
        .build()
        .get_node("play")
    )
    assert (
        play.configures
        and play.node_role is NodeRole.ROLLOUT
        and play.fn.__name__ == "run_workflow"
    )
    own = Pipeline("p").add_node("a", generate, node_type="ENV_INTERACT").build().get_node("a")
    assert own.fn is generate and not own.configures
    assert "takes no option 'env'" in fails(
        Pipeline("p").add_node("a", generate, node_type="ENV_INTERACT", env="x")
    )


def test_engine_type_without_an_engine():
    message = fails(
        Pipeline("p").add_node("a", nothing, node_type=NodeType.MODEL_TRAIN, node_role="ADVANTAGE")
    )
    assert "'a' uses an engine" in message and "ADVANTAGE" in message and "CRITIC" in message


def test_a_node_with_side_effects_is_not_retried():
    message = fails(Pipeline("p").add_node("actor_train", train, retry_limit=2))
    assert "'actor_train': retry_limit=2" in message and "side effects" in message
    assert Pipeline("p").add_node("a", train, retry_limit=2, only_forward_compute=True).build()


def test_decorator_checks_its_own_words():
    with pytest.raises(PipelineError, match="'ADVANTAGE'"):
        node(role="ADVANTAG")
    with pytest.raises(PipelineError, match="@node: 'world' .*scope"):
        node(scope="world")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("values", "values"), "'values' is named twice"),
        ((3,), "expected names, got 3"),
        ("", "expected names"),
    ],
)
@pytest.mark.parametrize("argument", ["reads", "writes"])
def test_names_given_twice_or_empty(argument, names, said):
    with pytest.raises(PipelineError, match=f"@node: {argument}: {said}"):
        node(**{argument: names})
