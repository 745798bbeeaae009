"""Factories: nodes whose function is made of the config when the graph is bound."""

import functools

import pytest

from distflow.graph import NodeType, Pipeline, PipelineError, node, node_factory

REWARDS = ["token_level_rewards", "response_mask", "group_index"]


def factory_of(fn, **said):
    return node_factory(node(role="ADVANTAGE", **said)(lambda config: fn))


def one(fn, **settings):
    return Pipeline("p").add_node("x", fn, **settings).build()


def fails(graph, config, data_fields=REWARDS):
    with pytest.raises(PipelineError) as caught:
        graph.bind(config, data_fields)
    return str(caught.value)


def estimator(token_level_rewards, values=None, *, gamma, **kwargs): ...


def test_the_function_that_is_made_brings_its_contract(config):
    made = node(scope="global", writes="returns")(functools.partial(estimator, scale=2.0))
    bound = one(factory_of(made)).bind(config, REWARDS).node("x")
    assert bound.fn is made and bound.contract.scope == "global" and bound.plane == "training"
    assert bound.contract.reads == ("token_level_rewards",) and bound.contract.optional == (
        "values",
    )
    assert bound.contract.writes == ("returns",) and bound.options == {"gamma": 0.9}


def test_the_factory_sees_the_whole_config_and_one_graph_binds_many_times(config):
    def group_mean(token_level_rewards, group_index): ...

    @node_factory
    def by_config(config):
        return estimator if config.algorithm.adv_estimator == "gae" else group_mean

    graph = one(by_config, node_role="ADVANTAGE")
    assert graph.bind(config, REWARDS).node("x").fn is group_mean
    config.algorithm.adv_estimator = "gae"
    assert graph.bind(config, REWARDS).node("x").fn is estimator
    config.algorithm.adv_estimator = "grpo"
    assert graph.bind(config, REWARDS).node("x").fn is group_mean


def test_before_bind_only_what_the_role_says_is_known(config):
    @node_factory
    @node(role="ADVANTAGE")
    def factory(config, actor=None):
        return node(writes="returns")(lambda advantages, token_level_rewards: None)

    graph = (
        Pipeline("p").add_node("first", factory).add_node("second", lambda returns: None).build()
    )
    message = fails(graph, config)
    assert "node 'first' reads 'advantages'" in message, (
        "its role writes them, the function that was made does not"
    )
    assert "· actor" not in graph.to_mermaid(), "its parameters are no parameters of the node"


def test_the_type_is_told_by_the_function_that_is_made(config):
    graph = one(factory_of(lambda critic: None))
    bound_pipeline = graph.bind(config, [])
    assert bound_pipeline.node(
        "x"
    ).node_type is NodeType.MODEL_TRAIN and bound_pipeline.engines == {"critic"}
    assert "retry_limit=1" in fails(one(factory_of(lambda critic: None), retry_limit=1), config)


def test_what_add_node_says_holds_for_the_function_that_is_made(config):
    made = node(writes="returns", scope="global")(estimator)
    bound = (
        one(factory_of(made), writes="values", scope="group", gamma=0.5)
        .bind(config, REWARDS)
        .node("x")
    )
    assert (bound.contract.writes, bound.contract.scope) == (("values",), "group")
    assert bound.options == {"gamma": 0.5}


def test_readers_run_behind_a_node_that_a_factory_made(config):
    made = node(writes="values")(lambda response_mask: None)
    graph = (
        Pipeline("p")
        .add_node("read", lambda values: None)
        .add_node("made", factory_of(made))
        .build()
    )
    assert [n.node_id for n in graph.bind(config, REWARDS).nodes] == ["made", "read"]
    graph.update_node("made", deps=("read",))
    assert "'read' reads 'values' before 'made' writes it" in fails(graph, config)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no estimator 'grop'; did you mean 'grpo'?"), "did you mean 'grpo'?"),
        (KeyError("grop"), "grop"),
        (AttributeError("no gamma"), "no gamma"),
    ],
)
def test_what_a_factory_finds_wrong_names_the_node(config, error, said):
    @node_factory
    def raises(config):
        raise error

    message = fails(one(raises), config)
    assert message.startswith("node 'x': ") and said in message


def test_a_key_that_a_factory_misses_names_the_node(config):
    message = fails(one(node_factory(lambda config: config.algorithm.no_such_key)), config)
    assert message.startswith("node 'x': ") and "no_such_key" in message


@pytest.mark.parametrize(
    ("made", "said"), [(None, "returned None, which is not a function"), (dict, "is a class")]
)
def test_a_factory_that_makes_no_function(config, made, said):
    message = fails(one(factory_of(made)), config)
    assert message.startswith("node 'x': ") and said in message


def test_other_errors_of_a_factory_are_its_own(config):
    with pytest.raises(ZeroDivisionError):
        one(node_factory(lambda config: 1 // 0)).bind(config, [])


def test_two_factories_of_one_role_need_no_deps(config):
    reward_fn = node(writes="token_level_scores")(lambda response_mask: None)
    penalty = node(writes="token_level_rewards")(lambda token_level_scores: None)
    pipeline = Pipeline("p").add_node(
        "penalty", node_factory(lambda config: penalty), node_role="REWARD"
    )
    graph = pipeline.add_node(
        "reward_fn", node_factory(lambda config: reward_fn), node_role="REWARD"
    ).build()
    assert [n.node_id for n in graph.bind(config, REWARDS).nodes] == ["reward_fn", "penalty"]


def test_makers_without_an_order_are_found_when_their_functions_are_known(config):
    made = node(writes="values")(lambda response_mask: None)
    graph = Pipeline("p").add_node("a", factory_of(made)).add_node("b", factory_of(made)).build()
    assert "nodes 'a' and 'b' both write 'values'" in fails(graph, config)
    graph.update_node("b", deps=("a",))
    assert [n.node_id for n in graph.bind(config, REWARDS).nodes] == ["a", "b"]
