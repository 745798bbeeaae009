"""What a config and the data's columns make of a graph."""

import functools

import pytest
import torch

from distflow.data.batch import Batch
from distflow.graph import Pipeline, PipelineError, node, register_field
from distflow.graph.fields import DERIVED, Axis, Field, find_field


def graph_of(*nodes):
    pipeline = Pipeline("p")
    for node_id, fn, deps, settings in nodes:
        pipeline.add_node(node_id, fn, deps, **settings)
    return pipeline.build()


def one(fn, **settings):
    return graph_of(("x", fn, [], settings))


def fails(graph, config, data_fields=()):
    with pytest.raises(PipelineError) as caught:
        graph.bind(config, data_fields)
    return str(caught.value)


def by_group(token_level_rewards, response_mask, group_index): ...


def discounted(
    token_level_rewards, response_mask, gamma, epsilon: float = 1e-6, *, lam=1.0, missing="default"
): ...


def by_lambda(token_level_rewards, *, gamma, lam=1.0): ...


REWARDS = ["token_level_rewards", "response_mask", "group_index"]


# ---- options
# ----------------------------------------------------------------------------------------------


def test_options_come_from_add_node_then_the_group_then_the_default(config):
    bound = one(discounted, node_role="ADVANTAGE", lam=0.5).bind(config, REWARDS).node("x")
    assert bound.options == {"gamma": 0.9, "epsilon": 1e-6, "lam": 0.5, "missing": "default"}
    assert bound.contract.reads == ("token_level_rewards", "response_mask"), (
        "gamma is a key of the group, not a field"
    )
    assert bound.config is config.algorithm and bound.config_key == "algorithm"


def test_an_option_that_the_group_sets_to_none_is_none(config):
    config.algorithm.missing = None
    bound = one(discounted, node_role="ADVANTAGE").bind(config, REWARDS).node("x")
    assert bound.options["missing"] is None


def test_what_a_partial_sets_goes_before_the_group(config):
    partial = functools.partial(by_lambda, gamma=0.5)
    assert one(partial, node_role="ADVANTAGE").bind(config, REWARDS).node("x").options == {
        "gamma": 0.5,
        "lam": 0.95,
    }
    assert one(partial, gamma=0.1).bind(config, REWARDS).node("x").options == {
        "gamma": 0.1,
        "lam": 1.0,
    }
    with pytest.raises(PipelineError, match="'x'.*cannot be inspected"):
        one(functools.partial(by_lambda, gama=0.5))


def test_an_option_without_a_value(config):
    def f(responses, *, gama): ...

    message = fails(one(f, node_role="ADVANTAGE"), config, ["responses"])
    assert "node 'x': option 'gama' has no value" in message
    assert "'algorithm'" in message and "did you mean 'gamma'?" in message


def test_a_parameter_that_is_neither_field_nor_key(config):
    def f(token_level_rewards, gama): ...

    message = fails(one(f, node_role="ADVANTAGE"), config, REWARDS)
    assert "node 'x' reads 'gama'" in message and "did you mean 'gamma'?" in message


def test_a_group_of_the_nodes_own(config):
    def f(responses, *, scale, kl_coef=9.0): ...

    bound = one(f, config={"scale": 3}).bind(config, ["responses"]).node("x")
    assert bound.options == {"scale": 3, "kl_coef": 9.0}
    bound_pipeline = one(f, config="algorithm.kl_ctrl", scale=2).bind(config, ["responses"])
    assert bound_pipeline.node("x").options == {"scale": 2, "kl_coef": 0.001}
    assert bound_pipeline.node("x").config_key == "algorithm.kl_ctrl" and bound.config_key is None
    with pytest.raises(PipelineError, match="'x': .*'scal'.*'scale'"):
        one(f, config={"scal": 3})
    assert "did you mean 'kl_ctrl'?" in fails(
        one(f, config="algorithm.kl_ctr"), config, ["responses"]
    )


# ---- fields
# -----------------------------------------------------------------------------------------------


def test_a_field_that_nobody_has(config):
    message = fails(one(by_group), config, ["token_level_reward", "response_mask", "group_index"])
    assert "node 'x' reads 'token_level_rewards'" in message
    assert "did you mean 'token_level_reward'?" in message


def test_an_optional_field_that_nobody_has_is_fine(config):
    def f(responses, ref_log_prob=None): ...

    assert one(f).bind(config, ["responses"]).node("x").contract.optional == ("ref_log_prob",)


def test_aliases_and_derived_fields_are_there(config):
    def f(index, data_source, input_ids, attention_mask, loss_mask): ...

    columns = ["group_index", "domain", "prompt_ids", "response_ids", "response_mask"]
    assert one(f).bind(config, columns)
    assert one(f).bind(config, ["index", "data_source", *columns[2:]])
    assert "reads 'input_ids'" in fails(one(f), config, [c for c in columns if c != "prompt_ids"])


def test_token_level_fields_come_of_scores_and_of_each_other(config):
    def f(token_level_rewards): ...

    assert one(f).bind(config, ["token_level_scores"])
    assert one(f).bind(config, ["scores", "response_mask"])
    assert "reads 'token_level_rewards'" in fails(one(f), config, ["scores"])


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "loss_mask"])
def test_derived_fields_are_those_of_a_batch(name):
    def has(columns):
        batch = Batch(torch.tensor([2]), torch.tensor([1]))
        for column in columns:
            batch[column] = torch.ones(2 if column == "prompt_ids" else 1)
        return name in batch

    sources = DERIVED[name]
    assert has(sources)
    assert not any(has([s for s in sources if s != missing]) for missing in sources)


def test_fields_of_the_program(config):
    @node(writes="token_level_scores")
    def f(prompts): ...

    graph = one(f)
    bound_pipeline = graph.bind(
        config, {"prompts": find_field("prompts"), "level": Field("level", "int64", Axis.SAMPLE)}
    )
    assert bound_pipeline.fields["token_level_scores"] == find_field("token_level_scores")
    assert bound_pipeline.fields["level"].axis is Axis.SAMPLE
    assert graph.bind(config, ["prompts", "level"]).fields["level"].axis is Axis.OBJECT


# ---- declared columns
# -------------------------------------------------------------------------------------


def test_columns_declared_by_their_writer(config):
    @node(writes={"my_bonus_per_sample": "sample", "my_tags": "object", "values": "response"})
    def f(prompts): ...

    def g(my_bonus_per_sample=0.5, my_tags=()): ...

    bound_pipeline = graph_of(("g", g, [], {}), ("f", f, [], {})).bind(config, ["prompts"])
    declared = [
        (bound_pipeline.fields[n].dtype, bound_pipeline.fields[n].axis)
        for n in ("my_bonus_per_sample", "my_tags")
    ]
    assert declared == [("float64", Axis.SAMPLE), ("object", Axis.OBJECT)]
    assert bound_pipeline.node("f").contract.writes == ("my_bonus_per_sample", "my_tags", "values")
    assert bound_pipeline.node("g").contract.optional == ("my_bonus_per_sample", "my_tags"), (
        "known, so it is a field"
    )


def test_a_column_that_nobody_declared(config):
    @node(writes=("values", "my_undeclared"))
    def f(prompts): ...

    message = fails(one(f), config, ["prompts", "my_undeclared"])
    assert "node 'x' writes 'my_undeclared', a column that is not declared" in message
    assert (
        '@node(writes={"my_undeclared": "sample"})' in message
        and 'register_field("my_undeclared"' in message
    )
    assert "'my_undeclared_2'" in fails(one(by_group, writes="my_undeclared_2"), config, REWARDS)


def test_a_registered_column_needs_no_second_declaration(config):
    register_field("my_counts", "int64", "sample")
    bound_pipeline = one(by_group, writes="my_counts").bind(config, REWARDS)
    assert bound_pipeline.fields["my_counts"].dtype == "int64"


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        ({"values": "sample"}, "'values' is already"),
        ({"prompts": "sample"}, "'prompts' is already"),
        ({"my_word": "samples"}, "'samples' of column 'my_word' .*'sample'"),
        ({"my_word": "token"}, "'token' of column 'my_word' .*'response'"),
    ],
)
def test_a_declaration_that_cannot_be(writes, told):
    with pytest.raises(ValueError, match=told):
        node(writes=writes)


def test_a_diamond_joins_both_sides(config):
    @node(writes="old_log_probs")
    def b(responses): ...

    @node(writes="ref_log_prob")
    def c(responses): ...

    def d(old_log_probs, ref_log_prob): ...

    @node(writes="responses")
    def a(prompts): ...

    graph = graph_of(
        ("a", a, [], {}), ("b", b, ["a"], {}), ("c", c, ["a"], {}), ("d", d, ["b", "c"], {})
    )
    bound_pipeline = graph.bind(config, ["prompts"])
    assert [n.node_id for n in bound_pipeline.nodes] == ["a", "b", "c", "d"]
    assert bound_pipeline.node("d").contract.reads == ("old_log_probs", "ref_log_prob")
    assert bound_pipeline.node("d").deps == ("b", "c")
    half = graph_of(("a", a, [], {}), ("b", b, ["a"], {}), ("d", d, ["b"], {}))
    assert "node 'd' reads 'ref_log_prob'" in fails(half, config, ["prompts"])


# ---- roles, engines, freezing
# -----------------------------------------------------------------------------


def test_a_role_without_its_group(config):
    del config.critic
    message = fails(one(lambda ctx: None, node_role="CRITIC"), config)
    assert "node 'x' of role CRITIC" in message and "'critic'" in message


@pytest.mark.parametrize(
    ("role", "group"),
    [
        ("DEFAULT", lambda c: c),
        ("ACTOR", lambda c: c.actor_rollout_ref.actor),
        ("ROLLOUT", lambda c: c.actor_rollout_ref.rollout),
        ("REFERENCE", lambda c: c.actor_rollout_ref.ref),
        ("CRITIC", lambda c: c.critic),
        ("ADVANTAGE", lambda c: c.algorithm),
        ("REWARD", lambda c: c.reward),
        ("DYNAMIC_SAMPLING", lambda c: c.algorithm.filter_groups),
    ],
)
def test_each_role_receives_its_group(config, role, group):
    assert one(lambda ctx: None, node_role=role).bind(config, []).node("x").config is group(config)


def test_engines_of_the_program(config):
    def by_name(critic, ref): ...

    graph = graph_of(
        ("named", by_name, [], {}),
        (
            "by_role",
            lambda batch, ctx: None,
            ["named"],
            {"node_type": "MODEL_TRAIN", "node_role": "ACTOR"},
        ),
    )
    bound_pipeline = graph.bind(config, [])
    assert bound_pipeline.engines == {"critic", "ref", "actor"}
    assert bound_pipeline.node("by_role").engines == ("actor",)
    assert bound_pipeline.services == frozenset()


def test_services_of_the_program(config):
    def f(reward_fn, *, tokenizer): ...

    bound_pipeline = one(f).bind(config, [])
    assert (
        bound_pipeline.services == {"reward_fn", "tokenizer"}
        and bound_pipeline.engines == frozenset()
    )
    assert (
        bound_pipeline.node("x").contract.options == {}
        and bound_pipeline.node("x").contract.reads == ()
    )


@pytest.mark.parametrize("name, value", [("flag", "false"), ("scale", "0.1"), ("count", True)])
def test_an_option_of_another_type_than_its_function_declares(config, name, value):
    def f(
        responses,
        *,
        flag: bool = False,
        scale: float = 1.0,
        count: int = 0,
        limit: int = None,  # noqa: RUF013  # as people write it
    ): ...

    one(f, flag=True, scale=2, count=3, limit=None).bind(config, ["responses"])
    with pytest.raises(PipelineError, match=f"'x': option '{name}' is .*{value}"):
        one(f, **{name: value})
