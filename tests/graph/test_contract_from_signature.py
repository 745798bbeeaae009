"""The signature is the wiring: what each parameter stands for."""

import functools

import pytest

from distflow.graph import SCORE_FIELDS, Form, PipelineError, node
from distflow.graph import graph_node as node_class
from distflow.graph.contract_from_signature import REQUIRED
from distflow.graph.graph_node import Node


def contract_of(fn, *, known=(), **settings):
    return node_class.contract_of(Node("x", fn, **settings), frozenset(known))


def test_parameters_of_a_wired_function():
    def f(
        advantages,
        index,
        ref_log_prob=None,
        *,
        scale: float = 1.0,
        beta,
        actor,
        ctx,
        config,
        reduce,
        batch,
    ): ...

    contract = contract_of(f)
    assert contract.form is Form.WIRED
    assert contract.reads == ("advantages", "index") and contract.optional == ("ref_log_prob",)
    assert contract.by_keyword == ("advantages", "index", "ref_log_prob")
    assert contract.options == {"scale": 1.0, "beta": REQUIRED}
    assert contract.engines == ("actor",) and contract.reserved == (
        "batch",
        "ctx",
        "config",
        "reduce",
    )
    assert contract.writes == () and not contract.is_async


def test_engines_and_reserved_names_may_be_positional():
    def f(rollout, batch, ref, critic, reward_model): ...

    contract = contract_of(f)
    assert set(contract.engines) == {"rollout", "ref", "critic", "reward_model"}
    assert contract.reserved == ("batch",) and contract.reads == ()


def test_a_given_option_is_no_field():
    def f(token_level_rewards, gamma, lam=None): ...

    assert contract_of(f).reads == ("token_level_rewards", "gamma")
    contract = contract_of(f, options={"gamma": 1.0, "lam": 0.5})
    assert contract.reads == ("token_level_rewards",) and contract.optional == ()
    assert contract.options == {"gamma": REQUIRED, "lam": None}


@pytest.mark.parametrize("parameters", ["ctx, /", "*args", "advantages, *rest"])
def test_parameters_without_a_name_to_pass_are_refused(parameters):
    with pytest.raises(PipelineError, match="'x': '.*' cannot be passed by a name"):
        contract_of(eval(f"lambda {parameters}: None"))


def test_partial_turns_what_it_sets_into_options():
    def f(advantages, *, scale, shift=0.0): ...

    contract = contract_of(functools.partial(f, scale=2.0))
    assert contract.reads == ("advantages",) and contract.options == {"scale": 2.0, "shift": 0.0}


def test_batch_and_ctx_are_wired_like_any_other():
    contract = contract_of(lambda batch, ctx: None)
    assert (
        contract.form is Form.WIRED
        and contract.reads == ()
        and contract.reserved == ("batch", "ctx")
    )


def test_samples_a_group_and_services():
    def f(samples, group, reward_fn, responses, *, tokenizer): ...

    contract = contract_of(f)
    assert set(contract.reserved) == {"samples", "group"} and set(contract.services) == {
        "reward_fn",
        "tokenizer",
    }
    assert contract.reads == ("responses",) and contract.options == {} and contract.engines == ()


def test_seed_reward():
    def compute_custom_reward(batch, config, **kwargs): ...

    contract = contract_of(compute_custom_reward, options={"weight": 2})
    assert contract.form is Form.BATCH_REWARD and contract.open_options
    assert contract.writes == SCORE_FIELDS and contract.scope == "group"
    assert Node("x", compute_custom_reward).node_role.name == "REWARD"


def test_sample_reward():
    def compute_score(
        data_source, solution_str, ground_truth, extra_info=None, strict: bool = True, **kwargs
    ): ...

    contract = contract_of(compute_score)
    assert contract.form is Form.SAMPLE_REWARD
    assert contract.reads == ("data_source", "responses", "ground_truth") and contract.optional == (
        "extra_info",
    )
    assert contract.options == {"strict": True}
    assert contract.writes == ("scores",) and contract.scope == "group"

    def bare(data_source, solution_str, ground_truth): ...

    assert contract_of(bare).optional == ()


def test_open_signatures_need_reads():
    with pytest.raises(PipelineError, match=r"'x': '\*.*@node\(reads=\.\.\.\)"):
        contract_of(lambda **kwargs: None)


def test_open_signatures_with_reads():
    @node(reads=("advantages", "?values"))
    def by_name(**columns): ...

    contract = contract_of(by_name)
    assert (contract.reads, contract.optional) == (("advantages",), ("values",))
    assert contract.by_keyword == ("advantages", "values")


def test_reads_beyond_the_parameters_come_in_the_batch():
    @node(reads=("advantages", "?values", "returns"))
    def f(returns, batch, actor, *, scale=1.0): ...

    contract = contract_of(f)
    assert contract.reads == ("advantages", "returns") and contract.optional == ("values",)
    assert contract.by_keyword == ("returns",) and contract.options == {"scale": 1.0}

    assert contract_of(node(reads="advantages")(lambda samples: None)).reads == ("advantages",)

    @node(reads="advantages")
    def keyword_only(*, advantages, scale): ...

    contract = contract_of(keyword_only)
    assert contract.by_keyword == ("advantages",) and contract.options == {"scale": REQUIRED}


def test_reads_that_do_not_fit_the_parameters():
    @node(reads=("advantages",))
    def leaves_out(advantages, returns): ...

    @node(reads=("advantages", "valuess"))
    def no_parameter(advantages, values=None): ...

    with pytest.raises(PipelineError, match="'returns'"):
        contract_of(leaves_out)
    with pytest.raises(PipelineError, match="'valuess'.*'values'"):
        contract_of(no_parameter)


@pytest.mark.parametrize(
    ("fn", "settings", "scope"),
    [
        (lambda responses: None, {}, "sample"),
        (lambda responses, group_index: None, {}, "group"),
        (lambda responses, index=None: None, {}, "group"),
        (lambda responses: None, {"node_role": "REWARD"}, "group"),
        (lambda responses: None, {"node_role": "DYNAMIC_SAMPLING"}, "group"),
        (lambda responses, group_index, reduce: None, {}, "global"),
        (lambda responses, group_index: None, {"scope": "sample"}, "sample"),
        (node(scope="global")(lambda responses: None), {}, "global"),
        (node(scope="global")(lambda responses: None), {"scope": "group"}, "group"),
        (node(scope="group")(lambda responses, reduce: None), {}, "global"),
        (None, {"node_type": "BARRIER_SYNC"}, "global"),
    ],
)
def test_scope(fn, settings, scope):
    assert contract_of(fn, **settings).scope == scope


def test_writes_of_rewards_and_advantages_have_a_default():
    def f(responses): ...

    assert contract_of(f, node_role="REWARD").writes == SCORE_FIELDS
    assert contract_of(f, node_role="ADVANTAGE").writes == ("advantages", "returns")
    assert contract_of(f).writes == ()
    assert contract_of(node(writes=())(f), node_role="REWARD").writes == ()


def test_an_estimator_with_kwargs_gets_its_named_parameters():
    def compute_my_custom_advantage(token_level_rewards, response_mask, **kwargs): ...

    contract = contract_of(compute_my_custom_advantage, node_role="ADVANTAGE")
    assert contract.by_keyword == ("token_level_rewards", "response_mask")
