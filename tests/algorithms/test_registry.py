"""Names, signatures and scopes of estimators and losses."""

from typing import Any

import pytest
import torch

import distflow.config.names as names
from distflow.algorithms import (
    ADV_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    AdvantageEstimator,
    describe_estimator,
    find_adv_est,
    find_policy_loss,
    register_adv_est,
    register_policy_loss,
)
from distflow.graph import spec_of


def test_the_names_of_the_config_are_those_of_the_registries() -> None:
    assert set(ADV_ESTIMATORS) == set(names.ESTIMATORS) == {member.value for member in AdvantageEstimator}
    assert set(POLICY_LOSSES) == set(names.POLICY_LOSSES)
    assert tuple(names.LOSS_AGG_MODES) == LOSS_AGG_MODES


def test_who_whitens_or_counts_over_the_batch_is_global() -> None:
    scopes = {name: estimator.scope for name, estimator in ADV_ESTIMATORS.items()}
    assert {name for name, scope in scopes.items() if scope == "global"} == {
        "gae",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    }
    assert {name for name, scope in scopes.items() if scope == "sample"} == {"reinforce", "remax"}


def test_an_estimator_carries_its_contract_to_the_graph() -> None:
    spec = spec_of(find_adv_est("gae").fn)
    assert spec.scope == "global"
    assert spec.writes == ("advantages", "returns")
    assert find_adv_est("gae").options == {"gamma": 1.0, "lam": 0.95, "bootstrap_truncated": False}


@pytest.mark.parametrize("find", [find_adv_est, find_policy_loss])
def test_unknown_names_get_the_nearest(find: Any) -> None:
    with pytest.raises(ValueError, match="trainer.imports; did you mean 'gspo'"):
        find("gsopo")


def test_an_estimator_of_the_seeds_style() -> None:
    @register_adv_est("test_custom_adv")
    def custom(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards * response_mask, token_level_rewards

    try:
        ones = torch.ones(1, 2)
        assert find_adv_est("test_custom_adv").fn(ones, ones, index=3)[0].tolist() == [[1.0, 1.0]]
        assert find_adv_est("test_custom_adv").scope == "group"
        assert describe_estimator("test_custom_adv").startswith("test_custom_adv: ")
    finally:
        del ADV_ESTIMATORS["test_custom_adv"]


def test_a_taken_name_is_replaced_with_a_warning() -> None:
    before = ADV_ESTIMATORS["rloo"]
    try:
        with pytest.warns(UserWarning, match="'rloo' of distflow.*rloo is replaced"):

            @register_adv_est(AdvantageEstimator.RLOO, scope="sample")
            def mine(token_level_rewards: Any, response_mask: Any) -> Any:
                return token_level_rewards, token_level_rewards

        assert find_adv_est("rloo").fn is mine
    finally:
        ADV_ESTIMATORS["rloo"] = before


def test_a_loss_that_fits_neither_signature_is_refused() -> None:
    with pytest.raises(ValueError, match="old_log_prob, log_prob, advantages, response_mask"):
        register_policy_loss("test_neither")(lambda logits, labels: None)
    assert "test_neither" not in POLICY_LOSSES
