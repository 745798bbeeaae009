"""Where today's systems disagree, ours is settled; one test for each point that concerns
algorithms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms import agg_loss, masked_whiten
from distflow.algorithms.kl import adapted_coefficient, kl_estimate
from distflow.algorithms.masked_reductions import loss_counts, token_weights
from distflow.algorithms.normalization_filters_and_weights import drop_reason
from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.registry import find_adv_est, find_policy_loss
from distflow.algorithms.rollout_correction import Correction, compute_rollout_weights
from distflow.rewards.router import Overlong


def outcome(rewards: list[float], **options: Any) -> list[float]:
    """GRPO of one group with one token a sample."""
    n = len(rewards)
    column = torch.tensor(rewards)[:, None]
    return (
        find_adv_est("grpo")
        .fn(column, torch.ones(n, 1), torch.zeros(n), **options)[0]
        .flatten()
        .tolist()
    )


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_standard_deviation_of_a_group() -> None:
    """Unbiased, with 1e-6 on the standard deviation."""
    wanted = 1.0 / (math.sqrt(2.0) + 1e-6)
    assert outcome([2.0, 0.0]) == pytest.approx([wanted, -wanted], rel=1e-7)
    assert outcome([2.0, 0.0], adv_epsilon=1.0) == pytest.approx(
        [1 / (math.sqrt(2) + 1), -1 / (math.sqrt(2) + 1)]
    )


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1e-3, 123.456])
@pytest.mark.parametrize("n", [2, 3, 5, 7, 16])
def test_all_rewards_of_a_group_equal(estimator: str, reward: float, n: int) -> None:
    fn = find_adv_est(estimator).fn
    lengths = torch.arange(1, n + 1)
    mask = (torch.arange(n)[None] < lengths[:, None]).float()
    for dtype in (torch.float32, torch.float64):
        actual, _ = fn(
            mask.to(dtype) * 0 + torch.eye(n, dtype=dtype)[0] * reward, mask, torch.zeros(n)
        )
        assert torch.equal(actual, torch.zeros(n, n))


def test_group_of_one() -> None:
    one = torch.tensor([[0.5]])
    assert outcome([0.5]) == pytest.approx([0.5 / (1 + 1e-6)])
    assert outcome([0.5], norm_adv_by_std_in_grpo=False) == [0.5]
    assert find_adv_est("rloo").fn(one, torch.ones(1, 1), torch.zeros(1))[0].tolist() == [[0.0]]


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]
)
def test_a_sample_whose_verdict_is_timeout_or_error(estimator: str) -> None:
    """Advantage 0, and the others as if it were not there, whatever its reward says."""
    fn = find_adv_est(estimator).fn
    rewards = torch.tensor([[1.0, 0.0], [math.nan, 0.0], [0.25, 0.0], [0.0, 0.5]])
    valid = torch.tensor([True, False, True, True])
    keep = [0, 2, 3]
    whole, _ = fn(rewards, torch.ones(4, 2), torch.zeros(4), valid)
    without, _ = fn(rewards[keep], torch.ones(3, 2), torch.zeros(3))
    assert torch.equal(whole[keep], without)
    assert whole[1].tolist() == [0.0, 0.0]
    assert drop_reason(rewards.sum(-1)[:2], valid[:2]) == "too_few_scores"


def test_token_mean() -> None:
    assert float(agg_loss(tensor([1, 2, 9], [6, 9, 9]), tensor([1, 1, 0], [1, 0, 0]))) == 3.0


def test_seq_mean_token_sum_norm() -> None:
    """The mean over rows of sum / T, T an option."""
    loss = tensor([1, 2, 9], [6, 9, 9])
    mask = tensor([1, 1, 0], [1, 0, 0])
    mode = "seq-mean-token-sum-norm"
    assert float(agg_loss(loss, mask, mode)) == pytest.approx((3 / 3 + 6 / 3) / 2)
    assert float(agg_loss(loss, mask, mode, loss_scale_factor=100)) == pytest.approx(
        (0.03 + 0.06) / 2
    )


@pytest.mark.parametrize(
    "mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_all_masked_rows_are_left_out(mode: str) -> None:
    loss = tensor([1, 2], [3, 4], [5, 6])
    mask = tensor([1, 1], [0, 0], [1, 0])
    assert float(agg_loss(loss, mask, mode)) == pytest.approx(
        float(agg_loss(loss[[0, 2]], mask[[0, 2]], mode))
    )


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_whole_batch_masked(mode: str) -> None:
    loss = torch.full((2, 3), math.nan).requires_grad_()
    total = agg_loss(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert float(total.detach()) == 0.0
    assert torch.equal(loss.grad, torch.zeros(2, 3))


def test_nan_or_inf_in_padding() -> None:
    """Never read, and no gradient there; every loss and estimator is tried with poison in its own
    tests."""
    log_probs = tensor([-1.0, math.nan], [math.inf, -2.0]).requires_grad_()
    loss, _ = find_policy_loss("vanilla").fn(
        log_probs,
        tensor([1.0, math.inf], [math.nan, 1.0]),
        torch.eye(2),
        tensor([-1.0, math.nan], [-math.inf, -2.0]),
    )
    total = agg_loss(loss, torch.eye(2))
    total.backward()
    assert float(total.detach()) == -1.0
    assert log_probs.grad.tolist() == [[-0.5, 0.0], [0.0, -0.5]]


def test_log_ratio() -> None:
    """Clamped to ±20."""
    loss, stats = find_policy_loss("vanilla").fn(
        tensor([0.0, -100.0]),
        tensor([-1.0, 1.0]),
        torch.ones(1, 2),
        tensor([-100.0, 0.0]),
        clip_ratio_c=None,
    )
    assert loss.tolist() == [pytest.approx([math.exp(20), -math.exp(-20)])]
    assert stats["ppo_kl"].tolist() == [[-20.0, 20.0]]


def test_dual_clip() -> None:
    """c = 3 unless set, None turns it off."""

    def loss(**options: Any) -> float:
        return float(
            find_policy_loss("vanilla").fn(
                tensor([2.0]), tensor([-1.0]), torch.ones(1, 1), tensor([0.0]), **options
            )[0]
        )

    assert loss() == 3.0
    assert loss(clip_ratio_c=5.0) == 5.0
    assert loss(clip_ratio_c=None) == pytest.approx(math.exp(2))


def test_gspo() -> None:
    """The gradient of the ratio's token part only, the sequence's log-ratio capped at 10."""
    log_probs = tensor([-1.0, -2.0]).requires_grad_()
    loss, _ = find_policy_loss("gspo").fn(
        log_probs, tensor([1.0, 3.0]), torch.ones(1, 2), tensor([-1.1, -2.1])
    )
    s = math.exp(0.1)
    assert loss.detach().tolist() == [pytest.approx([-s, -3 * s])]
    loss.sum().backward()
    assert log_probs.grad.tolist() == [pytest.approx([-s, -3 * s])]
    far, _ = find_policy_loss("gspo").fn(
        tensor([0.0]), tensor([-1.0]), torch.ones(1, 1), tensor([-30.0])
    )
    assert float(far) == pytest.approx(math.exp(10))


def test_gmpo() -> None:
    """Every row counts, also one without a token; no clamp of the log-ratio but the loss's own."""
    counts = loss_counts(torch.tensor([[1.0], [0.0]]))
    weights = token_weights(
        torch.tensor([[1.0], [0.0]]), "seq-mean-token-mean", counts, every_row=True
    )
    assert find_policy_loss("gmpo").every_row and weights.tolist() == [[0.5], [0.0]]
    loss, _ = find_policy_loss("gmpo").fn(
        tensor([0.0]), tensor([-1.0]), torch.ones(1, 1), tensor([-30.0])
    )
    assert float(loss) == pytest.approx(math.exp(30))


def test_sapo() -> None:
    """4/τ · σ(τ(r − 1)), τ by the sign of A; at r = 1 the gradient is that of PPO."""
    log_probs = tensor([0.0, 0.0]).requires_grad_()
    loss, _ = find_policy_loss("sapo").fn(
        log_probs, tensor([1.0, -1.0]), torch.ones(1, 2), tensor([0.0, 0.0])
    )
    assert loss.detach().tolist() == [pytest.approx([-2.0, 2.0 / 1.05])]
    loss.sum().backward()
    assert log_probs.grad.tolist() == [pytest.approx([-1.0, 1.0])]


def test_cispo() -> None:
    """Both bounds, the lower one may be dropped."""

    def weight(ratio: float, **options: Any) -> float:
        old = tensor([-1.0 - math.log(ratio)])
        return float(
            find_policy_loss("cispo").fn(
                tensor([-1.0]), tensor([1.0]), torch.ones(1, 1), old, **options
            )[0]
        )

    assert weight(5.0) == pytest.approx(1.2)
    assert weight(0.1) == pytest.approx(0.8)
    assert weight(0.1, clip_below=False) == pytest.approx(0.1)


def test_gae_over_masked_holes() -> None:
    """A tool's tokens in between change nothing, whatever they hold."""
    mask = torch.tensor([[1.0, 1.0, 1.0]])
    plain = find_adv_est("gae").fn(
        torch.tensor([[0.1, 0.2, 1.0]]), mask, torch.tensor([[0.5, 0.4, 0.3]]), gamma=0.9, lam=0.8
    )
    holes = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 1.0]])
    rewards = torch.tensor([[0.1, 5.0, math.nan, 0.2, -3.0, 1.0]])
    values = torch.tensor([[0.5, 7.0, math.inf, 0.4, -9.0, 0.3]])
    spread = find_adv_est("gae").fn(rewards, holes, values, gamma=0.9, lam=0.8)
    for whole, part in zip(spread, plain, strict=True):
        torch.testing.assert_close(whole[holes > 0], part[0])
        assert (whole[holes == 0] == 0).all()


def test_gae_at_truncation() -> None:
    """The value after the end is 0; with the option it is the last known value where the answer was
    cut off."""
    rewards = torch.zeros(2, 2)
    mask = torch.ones(2, 2)
    values = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    truncated = torch.tensor([True, False])
    _, returns = find_adv_est("gae").fn(rewards, mask, values, None, truncated, gamma=0.5, lam=1.0)
    assert returns.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    _, returns = find_adv_est("gae").fn(
        rewards, mask, values, None, truncated, gamma=0.5, lam=1.0, bootstrap_truncated=True
    )
    assert returns.tolist() == [[0.5, 1.0], [0.0, 0.0]]


def test_whitening_of_advantages() -> None:
    white = masked_whiten(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    wanted = 1 / math.sqrt(2 + 1e-8)
    assert white.tolist() == [pytest.approx([-wanted, wanted, 0.0], rel=1e-12)]
    assert masked_whiten(torch.tensor([[5.0]]), torch.ones(1, 1)).tolist() == [[0.0]]


def test_reinforce_plus_plus_over_holes() -> None:
    """The return is carried: holes neither reset nor discount it."""
    _, returns = find_adv_est("reinforce_plus_plus").fn(
        torch.tensor([[1.0, 0.0, 0.0, 4.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]), gamma=0.5
    )
    assert returns.tolist() == [[3.0, 0.0, 0.0, 4.0]]


def test_kl_k3() -> None:
    """Log-ratio clamped to ±20, result to ±10; k1 and k2 are unclamped; + takes the gradient of
    k2."""
    far = torch.tensor([-50.0, 50.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    assert kl_estimate(far, zero, "low_var_kl").tolist() == [10.0, 10.0]
    assert kl_estimate(far, zero, "kl").tolist() == [-50.0, 50.0]
    assert kl_estimate(far, zero, "mse").tolist() == [1250.0, 1250.0]
    near = torch.tensor([0.5], dtype=torch.float64).requires_grad_()
    kl_estimate(near, zero[:1], "low_var_kl+").backward()
    assert near.grad.tolist() == [0.5]


def test_adaptive_kl() -> None:
    assert adapted_coefficient(1.0, 0.0, 1000, target_kl=0.1, horizon=10) == 0.0


def test_decoupled_ppo() -> None:
    """Ratio to the proximal policy, weight prox over old; a token above the cap stays in the
    denominator."""
    columns = {
        "log_probs": tensor([0.1, 0.0]),
        "prox_log_probs": tensor([0.0, 0.0]),
        "old_log_probs": tensor([-0.5, -2.0]),
        "advantages": tensor([1.0, 1.0]),
        "loss_mask": torch.ones(1, 2),
    }
    first = -math.exp(0.1) * math.exp(0.5)
    masked, stats = find_policy_loss("decoupled").fn(**columns, behav_imp_weight_cap=5.0)
    assert masked.tolist() == [pytest.approx([first, 0.0])]
    assert float(agg_loss(masked, columns["loss_mask"])) == pytest.approx(first / 2)
    assert stats["behave_capped"].tolist() == [[0.0, 1.0]]
    clamped, _ = find_policy_loss("decoupled").fn(
        **columns, behav_imp_weight_cap=5.0, behav_imp_weight_mode="clamp"
    )
    assert clamped.tolist() == [pytest.approx([first, -5.0])]


def test_truncated_importance_weights() -> None:
    """By token, sequence, geometric mean; capped from above; 0 outside a band."""
    old, rollout, mask = tensor([0.2, 0.6]), tensor([0.0, 0.0]), torch.ones(1, 2)

    def weights(*options: Any) -> list[float]:
        return compute_rollout_weights(old, rollout, mask, Correction(*options))[0][0].tolist()

    e = math.exp
    assert weights("token", 9.0) == pytest.approx([e(0.2), e(0.6)])
    assert weights("sequence", 9.0) == pytest.approx([e(0.8), e(0.8)])
    assert weights("geometric", 9.0) == pytest.approx([e(0.4), e(0.4)])
    assert weights("token", 1.5) == pytest.approx([e(0.2), 1.5])
    assert weights("token", (1.3, 1.9)) == pytest.approx([0.0, e(0.6)])


def test_topr() -> None:
    def weight(score: float, ratio: float) -> float:
        old = tensor([-1.0 - math.log(ratio)])
        return float(
            find_policy_loss("topr").fn(
                tensor([-1.0]), tensor([1.0]), torch.ones(1, 1), torch.tensor([score]), old
            )[0]
        )

    assert weight(1.0, 7.0) == 1.0
    assert weight(0.0, 7.0) == 1.0
    assert weight(-1.0, 0.25) == pytest.approx(0.25)
    assert weight(1.0, 0.25) == 1.0


def test_cpgd() -> None:
    old = tensor([-1.0, -1.0, -1.0, -1.0])
    loss, _ = find_policy_loss("cpgd").fn(
        tensor([0.0, -3.0, 0.0, -3.0]), tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(1, 4), old
    )
    assert loss.tolist() == [pytest.approx([1.0 - math.log(1.2), 3.0, 0.0, -1.0 + math.log(0.8)])]


def test_opo() -> None:
    """The baseline is the length-weighted mean reward."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    actual, _ = find_adv_est("opo").fn(rewards, mask, torch.zeros(2))
    assert actual[:, 0].tolist() == [0.25, -0.75]


def test_over_long_penalty() -> None:
    assert Overlong(20, 1.0).penalty(10**6, 100) == -1.0


@pytest.mark.parametrize("name", ["gspo", "sapo", "gmpo"])
def test_every_loss_honours_loss_agg_mode(name: str) -> None:
    assert "loss_agg_mode" not in find_policy_loss(name).options
    assert PolicyObjective(name, loss_agg_mode="token-mean").loss_agg_mode == "token-mean"
