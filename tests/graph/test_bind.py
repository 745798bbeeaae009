"""What a config and the data's columns make of a graph."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

from distflow.data.batch import Batch
from distflow.graph import Field, Pipeline, PipelineError, find_field, inert_keys, node
from distflow.graph.fields import Axis
from distflow.graph.wiring import DERIVED


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


def discounted(token_level_rewards, response_mask, gamma, epsilon: float = 1e-6, *, lam=1.0, missing="default"): ...


def by_lambda(token_level_rewards, *, gamma, lam=1.0): ...


def picks(chosen, **said):
    @node(role="ADVANTAGE", chosen=lambda config: chosen, **said)
    def choose(): ...

    return choose


REWARDS = ["token_level_rewards", "response_mask", "group_index"]


# ---- options ----------------------------------------------------------------------------------------------


def test_options_come_from_add_node_then_the_group_then_the_default(config):
    bound = one(discounted, node_role="ADVANTAGE", lam=0.5).bind(config, REWARDS).node("x")
    assert bound.options == {"gamma": 0.9, "epsilon": 1e-6, "lam": 0.5, "missing": "default"}
    assert bound.contract.reads == ("token_level_rewards", "response_mask"), "gamma is a key of the group, not a field"
    assert bound.config is config.algorithm


def test_an_option_that_add_node_sets_does_not_take_the_config_key(config):
    program = one(discounted, node_role="ADVANTAGE", lam=0.5).bind(config, REWARDS)
    assert program.takes == {"algorithm.gamma"}


def test_an_option_that_the_group_sets_to_none_is_none(config):
    config.algorithm.missing = None
    bound = one(discounted, node_role="ADVANTAGE").bind(config, REWARDS).node("x")
    assert bound.options["missing"] is None


def test_what_a_partial_sets_goes_before_the_group(config):
    program = one(functools.partial(by_lambda, gamma=0.5)).bind(config, REWARDS)
    assert program.node("x").options == {"gamma": 0.5, "lam": 1.0} and program.takes == frozenset()
    chosen = picks(functools.partial(by_lambda, gamma=0.5))
    program = one(chosen, lam=0.1).bind(config, REWARDS)
    assert program.node("x").options == {"gamma": 0.5, "lam": 0.1} and program.takes == frozenset()
    message = fails(one(picks(functools.partial(by_lambda, gama=0.5))), config, REWARDS)
    assert "node 'x': its function takes no option 'gama'; did you mean 'gamma'?" in message


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
    program = one(f, config="algorithm.kl_ctrl", scale=2).bind(config, ["responses"])
    assert program.node("x").options == {"scale": 2, "kl_coef": 0.001}
    assert program.takes == {"algorithm.kl_ctrl.kl_coef"}
    assert "did you mean 'scale'?" in fails(one(f, config={"scal": 3}), config, ["responses"])
    assert "did you mean 'kl_ctrl'?" in fails(one(f, config="algorithm.kl_ctr"), config, ["responses"])


# ---- fields -----------------------------------------------------------------------------------------------


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


def test_derived_fields_are_those_of_a_batch():
    def has(name, columns):
        batch = Batch(torch.tensor([2]), torch.tensor([1]))
        for column in columns:
            batch[column] = torch.ones(2 if column == "prompt_ids" else 1)
        return name in batch

    for name, sources in DERIVED.items():
        assert has(name, sources)
        assert not any(has(name, [s for s in sources if s != missing]) for missing in sources)


def test_a_node_that_declares_no_writes_is_pointed_at(config):
    graph = graph_of(("silent", lambda batch, ctx: None, [], {}), ("read", by_group, ["silent"], {}))
    message = fails(graph, config, ["response_mask", "group_index"])
    assert "if 'silent' writes it, say so by @node(writes=...)" in message


def test_fields_of_the_program(config):
    @node(writes=("token_level_scores", "my_bonus"))
    def f(prompts): ...

    def g(my_bonus=0.5): ...

    graph = graph_of(("f", f, [], {}), ("g", g, ["f"], {}))
    program = graph.bind(config, {"prompts": find_field("prompts"), "level": Field("level", "int64", Axis.SAMPLE)})
    assert program.fields["token_level_scores"] == find_field("token_level_scores")
    assert program.fields["level"].axis is Axis.SAMPLE
    assert program.fields["my_bonus"] is None, "not registered: its axis is told by its shape"
    assert program.node("g").contract.optional == ("my_bonus",), "written by a node, so it is a field"
    assert graph.bind(config, ["prompts", "level"]).fields["level"].axis is Axis.OBJECT


def test_a_diamond_joins_both_sides(config):
    @node(writes="old_log_probs")
    def b(responses): ...

    @node(writes="ref_log_prob")
    def c(responses): ...

    def d(old_log_probs, ref_log_prob): ...

    @node(writes="responses")
    def a(prompts): ...

    graph = graph_of(("a", a, [], {}), ("b", b, ["a"], {}), ("c", c, ["a"], {}), ("d", d, ["b", "c"], {}))
    program = graph.bind(config, ["prompts"])
    assert [n.node_id for n in program.nodes] == ["a", "b", "c", "d"]
    assert program.node("d").contract.reads == ("old_log_probs", "ref_log_prob")
    assert program.node("d").deps == ("b", "c")
    half = graph_of(("a", a, [], {}), ("b", b, ["a"], {}), ("d", d, ["b"], {}))
    assert "node 'd' reads 'ref_log_prob'" in fails(half, config, ["prompts"])


# ---- when, chosen, functions of the config ----------------------------------------------------------------


def optional_chain(when):
    @node(writes="ref_log_prob", when=when)
    def reference(responses): ...

    def last(responses, ref_log_prob=None): ...

    def strict(responses, ref_log_prob): ...

    return reference, last, strict


@pytest.mark.parametrize("when", ["algorithm.use_kl_in_reward", lambda c: c.algorithm.use_kl_in_reward])
def test_a_node_that_is_not_wanted_is_left_out(config, when):
    reference, last, strict = optional_chain(when)
    nodes = [("a", lambda ctx: None, [], {}), ("b", lambda ctx: None, ["a"], {}), ("ref", reference, ["a", "b"], {})]
    graph = graph_of(*nodes, ("last", last, ["ref"], {}))
    program = graph.bind(config, ["responses"])
    assert [n.node_id for n in program.nodes] == ["a", "b", "last"]
    assert program.skipped == ("ref",) and program.node("last").deps == ("a", "b")
    with pytest.raises(PipelineError, match="the config leaves it out"):
        program.node("ref")
    message = fails(graph_of(*nodes, ("strict", strict, ["ref"], {})), config, ["responses"])
    assert "'strict' reads 'ref_log_prob', which only 'ref' writes, and this config leaves 'ref' out" in message
    config.algorithm.use_kl_in_reward = True
    program = graph.bind(config, ["responses"])
    assert program.skipped == () and program.node("last").deps == ("ref",)


def test_a_condition_given_as_a_key_is_taken_even_where_it_is_false(config):
    reference, last, _ = optional_chain("algorithm.use_kl_in_reward")
    graph = graph_of(("ref", reference, [], {}), ("last", last, ["ref"], {}))
    assert graph.bind(config, ["responses"]).takes == {"algorithm.use_kl_in_reward"}


def test_neighbours_left_out_pass_their_deps_on(config):
    @node(when=lambda c: False)
    def never(ctx): ...

    def always(ctx): ...

    graph = graph_of(
        ("a", always, [], {}), ("b", never, ["a"], {}), ("c", never, ["b"], {}), ("d", always, ["c", "a"], {})
    )
    assert graph.bind(config, []).node("d").deps == ("a",)
    assert "leaves out every node" in fails(one(never), config)


def test_the_chosen_function_brings_its_contract(config):
    @node(scope="global", takes="algorithm.lam")
    def estimator(token_level_rewards, values=None, *, gamma, **kwargs): ...

    program = one(picks(estimator, takes="algorithm.adv_estimator")).bind(config, REWARDS)
    bound = program.node("x")
    assert bound.fn is estimator and bound.contract.scope == "global" and bound.plane == "learning"
    assert bound.contract.reads == ("token_level_rewards",) and bound.contract.optional == ("values",)
    assert bound.contract.writes == ("advantages", "returns") and bound.options == {"gamma": 0.9}
    assert program.takes == {"algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam"}


def test_writes_of_the_chosen_go_before_those_of_the_chooser(config):
    @node(writes="returns")
    def estimator(token_level_rewards): ...

    assert one(picks(estimator, writes="advantages")).bind(config, REWARDS).node("x").contract.writes == ("returns",)

    def plain(token_level_rewards): ...

    assert one(picks(plain, writes="advantages")).bind(config, REWARDS).node("x").contract.writes == ("advantages",)


def test_options_of_a_chosen_function_are_checked_when_it_is_known(config):
    def estimator(token_level_rewards, *, scale=1.0): ...

    assert one(picks(estimator), scale=2.0).bind(config, REWARDS).node("x").options == {"scale": 2.0}
    assert "did you mean 'scale'?" in fails(one(picks(estimator), scal=2.0), config, REWARDS)


def test_the_chosen_function_cannot_be_had(config):
    def unknown(config):
        raise ValueError("no estimator 'grop'; did you mean 'grpo'?")

    @node(chosen=unknown)
    def choose(): ...

    message = fails(one(choose), config)
    assert "node 'x': chosen" in message and "did you mean 'grpo'?" in message
    assert "chooses again" in fails(one(picks(picks(by_group))), config)
    assert "cannot be called" in fails(one(picks(3)), config)


def test_a_chosen_function_may_read_what_is_written_too_late(config):
    def needs_values(token_level_rewards, values): ...

    @node(writes="values")
    def critic_values(responses): ...

    graph = graph_of(("advantage", picks(needs_values), [], {}), ("values", critic_values, ["advantage"], {}))
    message = fails(graph, config, [*REWARDS, "responses"])
    assert "'advantage' reads 'values' before 'values' writes it" in message


def test_reads_writes_and_takes_that_depend_on_the_config(config):
    @node(
        reads=lambda c: ("responses", *(("ref_log_prob",) if c.algorithm.use_kl_in_reward else ())),
        writes=lambda c: c.algorithm.adv_estimator,
        takes=lambda c: [f"algorithm.{c.algorithm.adv_estimator}"],
    )
    def f(batch): ...

    program = one(f).bind(config, ["responses"])
    assert program.node("x").contract.writes == ("grpo",) and program.takes == {"algorithm.grpo"}
    config.algorithm.use_kl_in_reward = True
    assert "reads 'ref_log_prob'" in fails(one(f), config, ["responses"])


def test_what_a_function_of_the_config_misses_is_said(config):
    @node(when=lambda c: c.algorithm.no_such_key)
    def f(ctx): ...

    message = fails(one(f), config)
    assert "node 'x': when" in message and "no_such_key" in message

    @node(when="algorithm.use_kl_in_rewards")
    def g(ctx): ...

    assert "did you mean 'use_kl_in_reward'?" in fails(one(g), config)


# ---- roles, engines, freezing -----------------------------------------------------------------------------


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
        ("by_role", lambda batch, ctx: None, ["named"], {"node_type": "MODEL_TRAIN", "node_role": "ACTOR"}),
    )
    program = graph.bind(config, [])
    assert program.engines == {"critic", "ref", "actor"}
    assert program.node("by_role").engines == ("actor",)


def test_the_program_does_not_change_with_its_graph(config):
    graph = one(discounted, node_role="ADVANTAGE")
    program = graph.bind(config, REWARDS)
    graph.update_node("x", lam=0.1)
    graph.remove_node("x")
    assert program.node("x").options["lam"] == 0.95
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.nodes = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.nodes[0].plane = "learning"


def test_one_graph_binds_many_times(config):
    @node(writes="returns", when="algorithm.use_kl_in_reward")
    def sometimes(ctx): ...

    graph = graph_of(("a", sometimes, [], {}), ("b", lambda ctx: None, ["a"], {}))
    on = SimpleNamespace(algorithm=SimpleNamespace(use_kl_in_reward=True))
    assert [n.node_id for n in graph.bind(config, []).nodes] == ["b"]
    assert [n.node_id for n in graph.bind(on, []).nodes] == ["a", "b"]
    assert [n.node_id for n in graph.bind(config, []).nodes] == ["b"]


# ---- inert keys -------------------------------------------------------------------------------------------


def test_a_function_that_receives_its_group_takes_all_of_it_unless_it_says_what(config):
    def whole(config): ...

    @node(takes="algorithm.gamma")
    def part(config): ...

    assert one(whole, node_role="ADVANTAGE").bind(config, []).takes == {"algorithm"}
    assert one(part, node_role="ADVANTAGE").bind(config, []).takes == {"algorithm.gamma"}
    assert one(lambda batch, ctx: None).bind(config, []).takes == {""}


def test_inert_keys():
    taken = {"algorithm.kl_ctrl", "algorithm.gamma"}
    set_keys = [
        "algorithm.gama",
        "algorithm.gamma",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl",
        "algorithm.kl_ctrl_more",
        "algorithm.lam",
        "algorithm.lam",
        "trainer.seed",
        "algorithm",
    ]
    assert inert_keys(taken, set_keys, ["trainer"]) == ["algorithm.gama", "algorithm.kl_ctrl_more", "algorithm.lam"]
    assert inert_keys([""], set_keys) == []
    assert inert_keys([], ["a.b"]) == ["a.b"]
