"""What a bound node's function is called with."""

import pytest

from distflow.config import Config
from distflow.graph import Pipeline, PipelineError, node
from distflow.runtime.compiled_node import compile_inputs

LOADED = ["prompts", "responses", "group_index", "values"]
COLUMNS = {"prompts": ["p"], "responses": ["r"], "index": [0]}


@pytest.fixture
def config():
    return Config()


def bound_of(fn, config=None, **settings):
    return Pipeline("p").add_node("x", fn, **settings).build().bind(config, LOADED).node("x")


def inputs_of(fn, resources=(), columns=COLUMNS, call=(), **settings):
    return compile_inputs(bound_of(fn, **settings), dict(resources))(columns, dict(call))


def test_columns_by_the_names_that_the_function_uses():
    assert inputs_of(lambda prompts, index: None) == {"prompts": ["p"], "index": [0]}


def test_an_optional_column_that_is_not_there_is_left_to_the_default():
    def f(prompts, values="default"): ...

    assert inputs_of(f) == {"prompts": ["p"]}
    assert inputs_of(f, columns={**COLUMNS, "values": [1.0]}) == {"prompts": ["p"], "values": [1.0]}


def test_a_required_column_that_is_not_there_is_no_silence():
    with pytest.raises(KeyError, match="values"):
        inputs_of(lambda values: None)


def test_columns_that_come_in_the_batch_are_not_passed():
    f = node(reads=("prompts", "responses"))(lambda responses, batch: None)
    assert inputs_of(f, call={"batch": "B"}) == {"responses": ["r"], "batch": "B"}


def test_engines_services_and_reduce():
    resources = {
        name: name.upper() for name in ("reward_fn", "tokenizer", "reduce", "critic", "ref")
    }
    assert inputs_of(lambda reduce, critic, *, reward_fn, tokenizer: None, resources) == {
        "reduce": "REDUCE",
        "critic": "CRITIC",
        "reward_fn": "REWARD_FN",
        "tokenizer": "TOKENIZER",
    }


def test_a_barrier_is_over_all_ranks_that_run_it_and_not_over_those_with_samples_alone():
    inputs = inputs_of(None, {"reduce": "REDUCE", "dp_group": "DP_GROUP"}, node_type="BARRIER_SYNC")
    assert inputs == {"reduce": "DP_GROUP"}


def test_a_name_for_an_engine_is_given_its_engine_and_no_column():
    assert inputs_of(lambda critic: None, {"critic": 1}, columns={"critic": 2}) == {"critic": 1}


def test_what_the_call_has_is_passed_as_far_as_it_is_wanted():
    call = {"batch": "B", "samples": "S", "group": "G", "ctx": "C"}
    assert inputs_of(lambda samples, ctx: None, call=call) == {"samples": "S", "ctx": "C"}
    assert inputs_of(lambda batch, group: None, call=call) == {"batch": "B", "group": "G"}


def test_options_and_the_config(config):
    def f(prompts, gamma, config, *, lam, scale=1.0): ...

    bound = bound_of(f, config, node_role="ADVANTAGE", lam=0.5)
    assert compile_inputs(bound, {})(COLUMNS, {}) == {
        "prompts": ["p"],
        "gamma": config.algorithm.gamma,
        "lam": 0.5,
        "scale": 1.0,
        "config": config.algorithm,
    }


def test_a_batch_reward_receives_its_batch_config_and_options(config):
    bound = bound_of(lambda batch, config, **kwargs: None, config, weight=2)
    assert compile_inputs(bound, {})({}, {"batch": "B", "ctx": "C"}) == {
        "batch": "B",
        "config": config.reward,
        "weight": 2,
    }


@pytest.mark.parametrize(
    ("settings", "engine"), [({"node_role": "CRITIC"}, "critic"), ({"engine": "ref"}, "ref")]
)
def test_the_parameter_engine_is_that_of_the_role_or_of_add_node(config, settings, engine):
    inputs = compile_inputs(
        bound_of(lambda engine: None, config, **settings), {"critic": "critic", "ref": "ref"}
    )
    assert inputs({}, {}) == {"engine": engine}


def test_the_parameter_engine_is_not_one_that_the_function_names_besides(config):
    bound = bound_of(lambda engine, ref: None, config, node_role="CRITIC")
    assert compile_inputs(bound, {"critic": 1, "ref": 2})({}, {}) == {"engine": 1, "ref": 2}


@pytest.mark.parametrize(
    ("fn", "missing"),
    [
        (lambda critic: None, "critic"),
        (lambda rollout: None, "rollout"),
        (lambda reward_fn: None, "reward_fn"),
        (lambda tokenizer: None, "tokenizer"),
        (node(role="REWARD", writes=())(lambda engine: None), "reward_model"),
    ],
)
def test_an_engine_or_a_service_that_the_worker_has_not(config, fn, missing):
    with pytest.raises(PipelineError, match=f"'x' .*'{missing}', .*'{missing}s'"):
        compile_inputs(bound_of(fn, config), {f"{missing}s": 1})


def test_the_parameter_engine_where_nobody_says_which():
    with pytest.raises(PipelineError, match="'x' .*engine"):
        compile_inputs(bound_of(lambda engine: None), {})
