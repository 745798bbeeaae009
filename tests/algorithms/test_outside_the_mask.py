"""What stands outside a mask is never read: poison there changes no result and no gradient, bit for
bit."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms import agg_loss, masked_mean, masked_whiten
from distflow.algorithms.kl import apply_kl_penalty
from distflow.algorithms.masked_reductions import LOSS_AGG_MODES, masked_var
from distflow.algorithms.normalization_filters_and_weights import (
    ALL_EQUAL,
    Normalization,
    drop_reason,
)
from distflow.algorithms.objectives import PolicyObjective, ValueObjective, compute_value_loss
from distflow.algorithms.registry import find_adv_est
from distflow.builtin_names import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES
from tests.algorithms.conftest import Case, make_case
from tests.algorithms.toy_policy import COLUMNS, gradient, toy_batch

KL_AND_ENTROPY: dict[str, Any] = {
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
}
POISONS = (float("nan"), float("inf"), float("-inf"), 1e30, 5.0)
Columns = Mapping[str, Any]
Function = Callable[[Columns], tuple[Tensor, ...]]


def columns_of(case: Case, fill: float, keep_invalid: bool = False) -> dict[str, Any]:
    """Every column that a function here may take; `fill` stands outside the mask and in samples
    without a verdict.

    keep_invalid: those samples keep what they have, for a function that gives something for them.
    """
    kept = (case.mask if keep_invalid else case.counted) > 0
    per_token = {name: torch.where(kept, column, fill) for name, column in case.columns.items()}
    per_sample = torch.where(
        case.valid, case.columns["scores"][:, 0].nan_to_num(0.5, 0.5, 0.5), fill
    )
    return {
        **per_token,
        "token_level_rewards": per_token["rewards"],
        "token_level_scores": per_token["scores"],
        "returns": per_token["rewards"],
        "reward_baselines": per_sample,
        "response_mask": case.mask,
        "loss_mask": case.mask * case.valid[:, None],
        "group_index": case.group,
        "turn_index": torch.where(
            case.mask > 0, (torch.nn.functional.pad(case.mask, (1, 0)).diff() > 0).cumsum(1) - 1, -1
        ),
        "turn_order": torch.where(case.mask > 0, (torch.arange(case.mask.shape[1]) // 2) % 3, -1),
        "valid": case.valid,
        "domain": ["a", "b", "c"] * (len(case.group) // 3),
        "reward_parts": [
            {"math": float(row % 4), "format": row % 3 / 2} if ok else {"math": fill}
            for row, ok in enumerate(case.valid.tolist())
        ],
        "truncated": torch.arange(len(case.group)) % 2 == 0,
    }


def results(function: Function, columns: Columns) -> dict[str, Tensor]:
    """Outputs, and the gradient of a random weighing of them (outside the mask too) by each column
    of numbers."""
    leaves = {
        n: c.clone().requires_grad_()
        for n, c in columns.items()
        if torch.is_tensor(c) and c.is_floating_point()
    }
    outputs = function({**columns, **leaves})
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    generator = torch.Generator().manual_seed(5)
    weighed = [
        (output * torch.randn(output.shape, dtype=torch.float64, generator=generator)).sum()
        for output in outputs
        if output.requires_grad
    ]
    if weighed:
        torch.stack(weighed).sum().backward()
    return found | {
        f"gradient by {n}": leaf.grad for n, leaf in leaves.items() if leaf.grad is not None
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[one.dtype]
    return one.dtype == other.dtype and torch.equal(one.view(integer), other.view(integer))


def check(
    function: Function, seed: int, per_token: bool = True, keep_invalid: bool = False
) -> None:
    """The function gives the same bits whatever stands outside, and 0 there."""
    case = make_case(seed)
    wanted = results(function, columns_of(case, 0.0, keep_invalid))
    for poison in POISONS:
        found = results(function, columns_of(case, poison, keep_invalid))
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert same_bits(value, wanted[name]), (poison, name)
            if per_token and name.startswith("output"):
                assert value.shape == case.mask.shape
            if value.shape == case.mask.shape:
                assert bool((value[case.mask == 0] == 0).all()), (poison, name)


def estimator(name: str, **options: Any) -> Function:
    fn = find_adv_est(name).fn
    takes = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return lambda columns: fn(**{n: columns[n] for n in takes}, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators(name: str, seed: int) -> None:
    check(estimator(name), seed)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bootstrapped": ("gae", {"bootstrap_truncated": True, "gamma": 0.9}),
    "Dr.GRPO": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "GAE not whitened": ("gae", {"whiten": False}),
    "scaled by the batch": ("grpo", {"scale_rewards": "batch"}),
    "GPG's other alpha": ("gpg", {"alpha_counts": "rewards"}),
    "GDPO over samples": (
        "gdpo",
        {"whiten_over": "samples", "reward_weights": {"default": {"math": 2.0}}},
    ),
    "pass@k without std": ("grpo_passk", {"norm_adv_by_std_in_grpo": False}),
    "over turns": ("gae", {"over_turns": True, "gamma": 0.9}),
    "discounted": ("reinforce", {"gamma": 0.5}),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_estimators_with_options(what: str) -> None:
    name, options = OPTIONS[what]
    check(estimator(name, **options), seed=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "low_var_kl+"])
def test_the_kl_penalty_and_its_mean(kind: str, mean: str, seed: int) -> None:
    names = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask", "valid")
    case = make_case(seed)

    def penalise(columns: Columns) -> tuple[Tensor, float]:
        return apply_kl_penalty(
            *(columns[name] for name in names), kl_coef=0.3, kl_penalty=kind, mean=mean
        )

    check(lambda columns: penalise(columns)[:1], seed, keep_invalid=True)
    assert len({penalise(columns_of(case, poison))[1] for poison in (0.0, *POISONS)}) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value_loss", VALUE_LOSSES)
@pytest.mark.parametrize("cliprange_value", [0.5, 1e-3, None])
def test_the_value_loss(cliprange_value: float | None, value_loss: str, seed: int) -> None:
    options = {"cliprange_value": cliprange_value, "value_loss": value_loss, "huber_delta": 0.7}

    def loss(columns: Columns) -> tuple[Tensor, ...]:
        names = ("log_probs", "values", "returns", "loss_mask")
        per_token, stats = compute_value_loss(*(columns[n] for n in names), **options)
        return (per_token, *stats.values())

    check(loss, seed)


@pytest.mark.parametrize("seed", range(3))
def test_moments_and_whitening(seed: int) -> None:
    def arguments(columns: Columns) -> tuple[Tensor, Tensor]:
        return columns["values"], columns["loss_mask"]

    check(lambda columns: (masked_whiten(*arguments(columns)),), seed)
    check(
        lambda columns: (masked_mean(*arguments(columns)), masked_var(*arguments(columns))),
        seed,
        per_token=False,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("mean_level", ["batch", "group", None])
@pytest.mark.parametrize("std_level", ["batch", "group", None])
def test_normalisations(mean_level: Any, std_level: Any, leave1out: bool, seed: int) -> None:
    norm = Normalization(mean_level, leave1out, std_level)
    names = ("values", "response_mask", "group_index", "valid")
    check(lambda columns: (norm(*(columns[name] for name in names)),), seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation(mode: str, seed: int) -> None:
    check(
        lambda columns: (agg_loss(columns["values"], columns["loss_mask"], mode),),
        seed,
        per_token=False,
    )


OBJECTIVES: dict[str, Callable[[], PolicyObjective | ValueObjective]] = {
    **{name: partial(PolicyObjective, name, **KL_AND_ENTROPY) for name in POLICY_LOSSES},
    **{
        f"{n} weighted": partial(PolicyObjective, n, weights_field="rollout_is_weights")
        for n in POLICY_LOSSES
    },
    **{f"values by {name}": partial(ValueObjective, value_loss=name) for name in VALUE_LOSSES},
}


@pytest.mark.parametrize("what", OBJECTIVES)
def test_objectives(what: str) -> None:
    """Gradients of the weights of a policy, and metrics."""
    objective = OBJECTIVES[what]()
    wanted = None
    for poison in (0.0, *POISONS):
        batch = toy_batch(seed=1, bs=9)
        for name in COLUMNS:
            batch[name] = torch.where(batch["loss_mask"] > 0, batch[name], poison)
        grad, sums = gradient(objective, [batch], objective.counts(batch))
        wanted = wanted or (grad, sums)
        assert same_bits(grad, wanted[0]) and sums == wanted[1] and bool(grad.isfinite().all())


@pytest.mark.parametrize("poison", POISONS)
def test_the_filter_of_groups(poison: float) -> None:
    valid = torch.tensor([True, False, True])
    assert drop_reason(torch.tensor([1.0, poison, 1.0]), valid) == ALL_EQUAL
    assert drop_reason(torch.tensor([1.0, poison, 0.0]), valid) is None


def test_a_reward_outside_the_mask_by_hand() -> None:
    """Rewards 1, 0, 0, 1: ±0.866, whatever stands on the second token, which no policy made."""
    mask = torch.tensor([[1.0, 0.0]] * 4)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 5.0], [0.0, -3.0], [1.0, float("nan")]])
    advantages, _ = find_adv_est("grpo").fn(rewards, mask, torch.zeros(4))
    assert advantages.flatten().tolist() == pytest.approx(
        [0.86602, 0, -0.86602, 0, -0.86602, 0, 0.86602, 0], abs=1e-5
    )
