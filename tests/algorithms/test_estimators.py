"""Every built-in estimator against its reference, on random batches, on one rank and on two."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algorithms.registry import find_adv_est
from distflow.builtin_names import ESTIMATORS
from tests.algorithms.batches import Drawn, batches, choose, find_reference, parts_of
from tests.algorithms.two_ranks import Ranks, run_on_ranks
from tests.references.advantages import REFERENCES
from tests.references.samples import Advantages, Sample

BY_STD: dict[str, Sequence[Any]] = {
    "norm_adv_by_std_in_grpo": (True, False),
    "adv_epsilon": (1e-6, 0.5),
}
GAE: dict[str, Sequence[Any]] = {
    "gamma": (1.0, 0.9, 0.0),
    "lam": (0.95, 0.5, 1.0, 0.0),
    "bootstrap_truncated": (True, False),
    "whiten": (True, False),
}
GRPO = {**BY_STD, "scale_rewards": (None, "group", "batch", "none")}
WEIGHTS = {"default": {"right": 2.0}, "code": {"right": 0.5, "form": 3.0}, "chat": {}}
OPTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "gae": {**GAE, "over_turns": (True, False)},
    "gae_marft": GAE,
    "grpo": GRPO,
    "cpgd": GRPO,
    "gspo": GRPO,
    "grpo_passk": BY_STD,
    "grpo_turns": {**BY_STD, "turn_discount": (1.0, 0.5, 0.0)},
    "gdpo": {
        **BY_STD,
        "reward_weights": (None, WEIGHTS),
        "whiten_over": ("tokens", "samples"),
    },
    "gpg": {
        "f_norm": (1.0, 2.5),
        "alpha_counts": ("groups", "rewards"),
    },
    "reinforce": {"gamma": (1.0, 0.7, 0.0)},
    "reinforce_plus_plus": {"gamma": (1.0, 0.7, 0.0)},
}


def columns_of(batch: Drawn) -> dict[str, Any]:
    """What a node hands to an estimator, in float32. Samples without a score hold poison."""
    rewards = torch.where(batch.valid[:, None], batch["rewards"].float(), math.nan)
    parts = []
    for own, is_valid in zip(batch.parts, batch.valid.tolist(), strict=True):
        parts.append(own if is_valid else {"right": math.nan})
    return {
        "token_level_rewards": rewards,
        "response_mask": batch.mask,
        "group_index": batch.group,
        "valid": batch.valid,
        "values": torch.where(batch.valid[:, None], batch["values"].float(), math.inf),
        "truncated": batch.truncated,
        "turn_index": batch.turns,
        "turn_order": batch.orders,
        "reward_baselines": torch.where(batch.valid, batch.baselines.float(), math.nan),
        "reward_parts": parts,
        "domain": batch.domains,
    }


def samples_of(batch: Drawn) -> list[Sample]:
    """The samples with a score."""
    found = []
    for row in batch.rows():
        is_token = batch.mask[row] > 0
        sample = Sample(
            group=int(batch.group[row]),
            rewards=batch.of_tokens(row, "rewards").tolist(),
            values=batch.of_tokens(row, "values").tolist(),
            turns=batch.turns[row][is_token].tolist(),
            orders=batch.orders[row][is_token].tolist(),
            truncated=bool(batch.truncated[row]),
            baseline=float(batch.baselines[row]),
            domain=batch.domains[row],
            parts=batch.parts[row],
        )
        found.append(sample)

    return found


def laid_out(batch: Drawn, advantages: Advantages) -> tuple[Tensor, Tensor]:
    """On the tokens of the samples with a score, 0 elsewhere."""
    found = []
    for rows in advantages:
        values = torch.zeros_like(batch.mask)
        for row, own in zip(batch.rows(), rows, strict=True):
            values[row][batch.mask[row] > 0] = torch.tensor(own, dtype=torch.float64)
        found.append(values)

    return found[0], found[1]


def estimate(
    name: str, columns: dict[str, Any], options: dict[str, Any], reduce: Ranks | None = None
) -> tuple[Tensor, Tensor]:
    estimator = find_adv_est(name)
    takes = inspect.signature(estimator.fn).parameters
    given_columns = {column: value for column, value in columns.items() if column in takes}
    over_ranks = {"reduce": reduce} if "reduce" in takes else {}
    found: tuple[Tensor, Tensor] = estimator.fn(**given_columns, **options, **over_ranks)  # type: ignore[assignment]
    return found


def select(columns: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    found = {}
    for name, column in columns.items():
        is_tensor = isinstance(column, Tensor)
        found[name] = column[rows] if is_tensor else [column[row] for row in rows]
    return found


def check_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for each, other in zip(found, wanted, strict=True):
        assert each.dtype is torch.float64
        torch.testing.assert_close(each, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=40)
@given(data=st.data())
def test_an_estimator_is_its_formula(name: str, data: Any) -> None:
    reference = find_reference(REFERENCES, name, "estimator", "tests/references/advantages.py")
    batch = data.draw(batches())
    strategies = OPTIONS.get(name, {})
    assert find_adv_est(name).options.keys() == strategies.keys(), (
        f"OPTIONS in {__file__} has other options of '{name}' than the estimator"
    )
    options = data.draw(choose(strategies))
    wanted = laid_out(batch, reference(samples_of(batch), **options))
    found = estimate(name, columns_of(batch), options)
    check_close(found, wanted)
    assert found[0] is not found[1]
    assert found[0].data_ptr() != found[1].data_ptr() or not found[0].numel()


@pytest.mark.parametrize(
    "name", [name for name in ESTIMATORS if find_adv_est(name).scope == "global"]
)
@settings(max_examples=15)
@given(data=st.data())
def test_over_two_ranks_it_is_the_same(name: str, data: Any) -> None:
    reference = find_reference(REFERENCES, name, "estimator", "tests/references/advantages.py")
    batch = data.draw(batches())
    options = data.draw(choose(OPTIONS.get(name, {})))
    first_rank = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    shares = parts_of(batch, first_rank)
    columns = columns_of(batch)
    wanted = laid_out(batch, reference(samples_of(batch), **options))

    def of_rank(rows: list[int]) -> Any:
        return lambda ranks: estimate(name, select(columns, rows), options, ranks)

    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        check_close(found, (wanted[0][rows], wanted[1][rows]))


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -1e-3, 123.456])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_nothing(name: str, reward: float, dtype: torch.dtype) -> None:
    lengths = torch.arange(1, 8)
    mask = (torch.arange(7)[None] < lengths[:, None]).to(dtype)
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = reward
    found, _ = find_adv_est(name).fn(rewards, mask, torch.zeros(7))
    assert not found.any()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("bs", "length"), [(0, 0), (0, 3), (2, 0)])
def test_a_batch_without_rows_or_tokens(name: str, bs: int, length: int) -> None:
    empty = torch.zeros(bs, length)
    columns: dict[str, Any] = dict.fromkeys(
        ("token_level_rewards", "response_mask", "values"), empty
    )
    columns |= dict.fromkeys(("turn_index", "turn_order"), torch.full((bs, length), -1))
    columns["group_index"] = torch.zeros(bs, dtype=torch.int64)
    columns["reward_baselines"] = torch.zeros(bs)
    columns["reward_parts"] = [{"math": 1.0}] * bs
    for found in estimate(name, columns, {}):
        assert found.shape == (bs, length)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gae", {"bootstrap_truncated": True}, "truncated"),
        ("gae", {"over_turns": True}, "over_turns needs turns"),
        ("grpo", {"scale_rewards": "std"}, "'std'.* group, batch or none"),
    ],
)
def test_options_that_cannot_be_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    ones = torch.ones(1, 2)
    columns = {
        "token_level_rewards": ones,
        "response_mask": ones,
        "values": ones,
        "group_index": torch.zeros(1),
    }
    with pytest.raises(ValueError, match=message):
        estimate(name, columns, options)
