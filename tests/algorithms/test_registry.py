"""Names, signatures and scopes of estimators and losses."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from distflow.algorithms import AdvantageEstimator, register_adv_est, register_policy_loss
from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    describe_estimator,
    find_adv_est,
    find_policy_loss,
)
from distflow.graph import node


def test_built_ins_are_imported_when_they_are_asked_for_and_replace_no_estimator_of_the_users() -> (
    None
):
    """In a process of its own: here others have asked before. cpgd's module imports that of
    grpo."""
    code = (
        "import sys, distflow.algorithms.registry as a; prefix = "
        "'distflow.algorithms.methods.'\n"
        "loaded = lambda: sorted(m.removeprefix(prefix) for m in sys.modules if "
        "m.startswith(prefix))\n"
        "print(loaded()); a.find_adv_est('rloo'); print(loaded())\n"
        "import warnings; from distflow.algorithms.registry import find_adv_est, register_adv_est\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    @register_adv_est('grpo')\n"
        "    def mine(token_level_rewards, response_mask): ...\n"
        "    find_adv_est('cpgd')\n"
        "print(find_adv_est('grpo').fn.__name__, len(said))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "['rloo']",
        "mine 1",
    ]


@pytest.mark.parametrize("find", [find_adv_est, find_policy_loss])
def test_unknown_names_get_the_nearest(find: Any) -> None:
    with pytest.raises(ValueError, match="'gsopo' .*trainer.imports.*'gspo'"):
        find("gsopo")


def test_an_estimator_of_the_seeds_style() -> None:
    @register_adv_est("test_custom_adv")
    def custom(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards * response_mask, token_level_rewards

    try:
        ones = torch.ones(1, 2)
        assert find_adv_est("test_custom_adv").fn(ones, ones, index=3)[0].tolist() == [[1.0, 1.0]]
        assert find_adv_est("test_custom_adv").scope == "group"
        assert describe_estimator("test_custom_adv") == "test_custom_adv()"
    finally:
        del ADV_ESTIMATORS["test_custom_adv"]


def test_a_taken_name_is_replaced_with_a_warning() -> None:
    before = find_adv_est("rloo")
    try:
        with pytest.warns(UserWarning, match="'rloo' of distflow.*methods.rloo is replaced"):

            @register_adv_est(AdvantageEstimator.RLOO, scope="sample")
            def mine(token_level_rewards: Any, response_mask: Any) -> Any:
                return token_level_rewards, token_level_rewards

        assert find_adv_est("rloo").fn is mine
    finally:
        ADV_ESTIMATORS["rloo"] = before


def seed_with_more(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, extra: Any
) -> Any: ...
async def later(log_probs: Any, advantages: Any, loss_mask: Any) -> Any: ...
def by_position(log_probs: Any, advantages: Any, loss_mask: Any, /) -> Any: ...
def without_a_mask(log_probs: Any, advantages: Any) -> Any: ...
def column_as_option(log_probs: Any, loss_mask: Any, *, advantages: Any) -> Any: ...


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda logits, labels: None, "it takes no log_probs"),
        (lambda *columns: None, "it takes no log_probs"),
        (without_a_mask, "it takes no loss_mask"),
        (by_position, "'log_probs' cannot be passed by name; remove the /"),
        (column_as_option, "'advantages' is a column of the batch: put it before the *"),
        (seed_with_more, "there is no value for 'extra'"),
        (later, "it is async"),
        (3, "its parameters cannot be read"),
        (dict.fromkeys, "'iterable' cannot be passed by name"),
        (type, "its parameters cannot be read"),
    ],
)
def test_a_loss_that_could_not_be_called_is_refused_when_it_is_registered(
    fn: Any, why: str
) -> None:
    with pytest.raises(ValueError) as refused:
        register_policy_loss("test_neither")(fn)
    said = str(refused.value)
    assert why in said and "policy loss 'test_neither'" in said
    assert getattr(fn, "__qualname__", repr(fn)).removeprefix("dict.") in said
    assert "def loss(log_probs, advantages, loss_mask" in said
    assert "def loss(old_log_prob, log_prob, advantages, response_mask" in said
    assert "test_neither" not in POLICY_LOSSES


def test_a_loss_may_take_whatever_else_there_is() -> None:
    register_policy_loss("test_open")(
        lambda log_probs, advantages, **rest: (-log_probs * advantages, {})
    )

    try:
        assert find_policy_loss("test_open").reads == ("advantages",)
        assert PolicyObjective("test_open").reads == ("advantages", "loss_mask")
    finally:
        del POLICY_LOSSES["test_open"]


def test_an_option_without_a_default_must_be_given() -> None:
    @register_policy_loss("test_needy")
    def needy(log_probs: Any, advantages: Any, loss_mask: Any, *, weight: float) -> Any: ...

    try:
        with pytest.raises(ValueError, match=r"'weight'.*needy.*policy_loss_kwargs\.weight"):
            PolicyObjective("test_needy")
        assert PolicyObjective("test_needy", {"weight": 1.0}).options == {"weight": 1.0}
    finally:
        del POLICY_LOSSES["test_needy"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "dro",
            {"beta": "much"},
            "'beta' .*'dro' is 'much', .* float",
        ),
        ("dro", {"beta": None}, "'beta' .*'dro' is null, .* float"),
        ("dro", {"beta": True}, "'beta' .*'dro' is true, .* float"),
        ("cispo", {"clip_below": "false"}, "'clip_below' .*'false', .* bool"),
        ("topr", {"ratio_level": "batch"}, r"'ratio_level' .*'batch', .*'token' \| 'sequence'"),
        (
            "decoupled",
            {"behav_imp_weight_mode": 3},
            r"'behav_imp_weight_mode' .* 3, .*'mask' \| 'clamp'",
        ),
        ("decoupled", {"rejection_sampling": "token"}, "rejection_sampling .* mapping.*'token'"),
        ("clip_cov", {"clip_cov_lb": "low"}, "'clip_cov_lb' .*'low', .* float"),
        ("sapo", {"tau_pos": float("nan")}, "'tau_pos' .* nan, "),
    ],
)
def test_an_option_of_another_type_is_refused_before_the_start(
    name: str, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyObjective(name, options)


def test_options_may_be_what_yaml_makes_of_them() -> None:
    assert PolicyObjective("dro", {"beta": 1}).options == {"beta": 1.0}
    assert PolicyObjective("dro", {"beta": "1e-3"}).options == {"beta": 0.001}
    assert PolicyObjective("vanilla", {"clip_ratio_c": None}).options == {"clip_ratio_c": None}
    options = {"kl_cov_ratio": "1e-3", "ppo_kl_coef": 2}
    assert PolicyObjective("kl_cov", options).options == {"ppo_kl_coef": 2.0}
    assert find_policy_loss("kl_cov").for_selection(options) == {"kl_cov_ratio": 0.001}


def test_a_loss_of_ones_own_may_choose_tokens_and_check_its_options() -> None:
    @node(writes="selected_tokens")
    def first_tokens(loss_mask: Any, *, num_first: int = 1) -> Any: ...

    def check(num_first: int, gain: float) -> None:
        if num_first < 1:
            raise ValueError("num_first must be at least 1")

    @register_policy_loss("test_first", selects=first_tokens, check=check)
    def first(
        log_probs: Any, advantages: Any, loss_mask: Any, selected_tokens: Any, *, gain: float = 1.0
    ) -> Any: ...

    try:
        assert PolicyObjective("test_first", {"num_first": 2, "gain": 3.0}).options == {"gain": 3.0}
        with pytest.raises(ValueError, match="num_first must be at least 1"):
            PolicyObjective("test_first", {"num_first": 0})
        with pytest.raises(ValueError, match="'num_frist'.*'num_first'"):
            PolicyObjective("test_first", {"num_frist": 2})
    finally:
        del POLICY_LOSSES["test_first"]
