"""Every estimator against loops in plain Python: holes, poisoned padding, invalid samples, groups
of one."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms.registry import describe_estimator, find_adv_est
from distflow.builtin_names import ESTIMATORS

Rows = list[list[float]]


# ----------------------------------------------------------------------------------------------------------  # noqa: E501
# references


def row_scores(case: Any) -> list[float]:
    """A row's reward is the sum over the policy's tokens."""
    rows = zip(case.rows("rewards"), case.mask.tolist(), strict=True)
    return [sum(r for r, m in zip(row, mask, strict=True) if m) for row, mask in rows]


def members(case: Any, row: int) -> list[int]:
    return [i for i in range(len(case.group)) if case.group[i] == case.group[row] and case.valid[i]]


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def spread(per_row: list[float], case: Any) -> Rows:
    mask = case.counted.tolist()
    return [[a if m else 0.0 for m in row] for a, row in zip(per_row, mask, strict=True)]


def whiten(rows: Rows, mask: Rows) -> Rows:
    inside = [
        x for row, keep in zip(rows, mask, strict=True) for x, m in zip(row, keep, strict=True) if m
    ]
    mean = sum(inside) / len(inside)
    scale = 1 / math.sqrt(std(inside) ** 2 + 1e-8)
    return [
        [(x - mean) * scale if m else 0.0 for x, m in zip(row, keep, strict=True)]
        for row, keep in zip(rows, mask, strict=True)
    ]


def by_group(case: Any, rule: Callable[[float, list[float], int], float]) -> Rows:
    """rule(own score, scores of the valid samples of the group, row) -> advantage of the row."""
    scores = row_scores(case)
    per_row = []
    for row, score in enumerate(scores):
        group = [scores[i] for i in members(case, row)]
        per_row.append(rule(score, group, row) if case.valid[row] else 0.0)
    return spread(per_row, case)


def grpo(case: Any, norm: bool = True, eps: float = 1e-6) -> Rows:
    def rule(own: float, group: list[float], row: int) -> float:
        mean, deviation = (sum(group) / len(group), std(group)) if len(group) > 1 else (0.0, 1.0)
        return (own - mean) / (deviation + eps) if norm else own - mean

    return by_group(case, rule)


def rloo(case: Any) -> Rows:
    return by_group(
        case, lambda own, g, row: own - (sum(g) - own) / (len(g) - 1) if len(g) > 1 else 0.0
    )


def opo(case: Any) -> Rows:
    scores, lengths = row_scores(case), case.mask.sum(-1).tolist()

    def rule(own: float, group: list[float], row: int) -> float:
        if len(group) == 1:
            return own
        rows = members(case, row)
        return own - sum(lengths[i] * scores[i] for i in rows) / sum(lengths[i] for i in rows)

    return by_group(case, rule)


def grpo_by_batch(case: Any, eps: float = 1e-6) -> Rows:
    """Over the standard deviation of all rewards; a group of one is its own mean."""
    scores = row_scores(case)
    scale = std([s for s, ok in zip(scores, case.valid.tolist(), strict=True) if ok]) + eps
    return by_group(case, lambda own, g, row: (own - sum(g) / len(g)) / scale)


def gpg(case: Any, f_norm: float = 1.0, alpha_counts: str = "groups") -> Rows:
    scores = row_scores(case)
    judged = [row for row, ok in enumerate(case.valid.tolist()) if ok]
    if alpha_counts == "groups":  # B − M: samples whose group does not all have one reward
        groups = {row: [scores[i] for i in members(case, row)] for row in judged}
        counted = sum(len(set(g)) > 1 or (len(g) == 1 and g[0] != 0) for g in groups.values())
    else:
        counted = sum(scores[row] != 0 for row in judged)
    alpha = len(judged) / max(counted, 1)
    return by_group(
        case, lambda own, g, row: alpha * (own - (sum(g) / len(g) if len(g) > 1 else 0.0)) / f_norm
    )


def passk(case: Any, norm: bool = True) -> Rows:
    def rule(own: float, group: list[float], row: int) -> float:
        ordered = sorted(group)
        if len(group) < 2 or own != ordered[-1] or ordered[-1] == ordered[-2]:
            return 0.0
        return (own - ordered[-2]) / (std(group) + 1e-6 if norm else 1.0)

    return by_group(case, rule)


def rewards_to_go(case: Any, gamma: float) -> Rows:
    out = []
    for rewards, keep in zip(case.rows("rewards"), case.counted.tolist(), strict=True):
        row = [0.0] * len(rewards)
        running = 0.0
        for t in reversed(range(len(rewards))):
            if keep[t]:
                running = rewards[t] + gamma * running
                row[t] = running
        out.append(row)
    return out


def gae(
    case: Any, gamma: float, lam: float, truncated: list[bool] | None = None
) -> tuple[Rows, Rows]:
    """The textbook sum over the tokens that the policy made, as if nothing stood between them."""
    advantages = []
    returns = []
    for i, keep in enumerate(case.counted.tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        r = [case.rows("rewards")[i][t] for t in tokens]
        v = [case.rows("values")[i][t] for t in tokens]
        after = v[-1] if tokens and truncated is not None and truncated[i] else 0.0
        delta = [r[k] + gamma * ((v[1:] + [after])[k]) - v[k] for k in range(len(tokens))]
        row_a = [0.0] * len(keep)
        row_r = [0.0] * len(keep)
        for k, t in enumerate(tokens):
            row_a[t] = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(tokens)))
            row_r[t] = row_a[t] + v[k]
        advantages.append(row_a)
        returns.append(row_r)
    return whiten(advantages, case.counted.tolist()), returns


# ---------------------------------------------------------------------------------------------------------------  # noqa: E501
# checks


def run(name: str, case: Any, **options: Any) -> tuple[Tensor, Tensor]:
    columns = {
        "token_level_rewards": case["rewards"].float(),
        "response_mask": case.mask.float(),
        "group_index": case.group,
        "valid": case.valid,
        "values": case["values"].float(),
        "reward_baselines": case["scores"][:, 0].nan_to_num(0.0, 0.0, 0.0).float(),
    }
    takes = inspect.signature(find_adv_est(name).fn).parameters
    return find_adv_est(name).fn(**{k: v for k, v in columns.items() if k in takes}, **options)


def assert_close(actual: Tensor, wanted: Rows) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(
        actual.double(), torch.tensor(wanted, dtype=torch.float64), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("grpo", grpo, {}),
        ("cpgd", grpo, {}),
        ("gspo", grpo, {}),
        ("grpo", lambda case: grpo(case, norm=False), {"norm_adv_by_std_in_grpo": False}),
        ("grpo", lambda case: grpo(case, eps=0.5), {"adv_epsilon": 0.5}),
        ("rloo", rloo, {}),
        ("opo", opo, {}),
        ("gpg", gpg, {}),
        ("gpg", lambda case: gpg(case, 2.5), {"f_norm": 2.5}),
        ("gpg", lambda case: gpg(case, alpha_counts="rewards"), {"alpha_counts": "rewards"}),
        ("grpo", grpo, {"scale_rewards": "group"}),
        ("grpo", lambda case: grpo(case, norm=False), {"scale_rewards": "none"}),
        ("grpo", grpo_by_batch, {"scale_rewards": "batch"}),
        (
            "gspo",
            lambda case: grpo_by_batch(case, 0.3),
            {"scale_rewards": "batch", "adv_epsilon": 0.3},
        ),
        ("grpo_passk", passk, {}),
        ("grpo_passk", lambda case: passk(case, norm=False), {"norm_adv_by_std_in_grpo": False}),
        ("reinforce", lambda case: rewards_to_go(case, 0.7), {"gamma": 0.7}),
        (
            "reinforce_plus_plus_baseline",
            lambda case: whiten(grpo(case, norm=False), case.counted.tolist()),
            {},
        ),
    ],
)
def test_estimators_whose_returns_are_their_advantages(
    case: Any, seed: int, name: str, reference: Any, options: dict[str, Any]
) -> None:
    batch = case(seed)
    batch.columns["rewards"] = batch["rewards"].float().double()
    # a group of equals
    batch.columns["rewards"][3:6] = torch.where(batch.mask[3:6] > 0, 0.0, batch["rewards"][3:6])
    actual, returns = run(name, batch, **options)
    assert_close(actual, reference(batch))
    assert torch.equal(returns, actual)
    assert returns is not actual


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.99, 1.0)])
def test_gae(case: Any, seed: int, gamma: float, lam: float) -> None:
    batch = case(seed)
    actual, returns = run("gae", batch, gamma=gamma, lam=lam)
    wanted, wanted_returns = gae(batch, gamma, lam)
    assert_close(actual, wanted)
    assert_close(returns, wanted_returns)


@pytest.mark.parametrize("seed", range(8))
def test_reinforce_plus_plus(case: Any, seed: int) -> None:
    batch = case(seed)
    actual, returns = run("reinforce_plus_plus", batch, gamma=0.8)
    assert_close(returns, rewards_to_go(batch, 0.8))
    assert_close(actual, whiten(rewards_to_go(batch, 0.8), batch.counted.tolist()))


@pytest.mark.parametrize("seed", range(8))
def test_remax(case: Any, seed: int) -> None:
    batch = case(seed)
    actual, returns = run("remax", batch)
    baselines = batch["scores"][:, 0].nan_to_num(0.0, 0.0, 0.0).tolist()
    to_go = rewards_to_go(batch, 1.0)
    keep = batch.counted.tolist()
    wanted = [
        [x - b if m else 0.0 for x, m in zip(row, mask, strict=True)]
        for row, mask, b in zip(to_go, keep, baselines, strict=True)
    ]
    assert_close(actual, wanted)
    assert_close(returns, to_go)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_batch_without_rows_or_tokens_is_no_special_case(name: str) -> None:
    for bs, length in ((0, 0), (0, 3), (2, 0)):
        columns = {
            "token_level_rewards": torch.zeros(bs, length),
            "response_mask": torch.zeros(bs, length),
            "group_index": torch.zeros(bs, dtype=torch.int64),
            "values": torch.zeros(bs, length),
            "turn_index": torch.full((bs, length), -1),
            "turn_order": torch.full((bs, length), -1),
            "reward_baselines": torch.zeros(bs),
            "reward_parts": [{"math": 1.0}] * bs,
        }
        takes = inspect.signature(find_adv_est(name).fn).parameters
        actual, returns = find_adv_est(name).fn(**{k: v for k, v in columns.items() if k in takes})
        assert actual.shape == returns.shape == (bs, length)
        assert not actual.isnan().any()


class TestByHand:
    """Figures worked with a pencil."""

    def test_gae(self) -> None:
        # δ = (0 + .5·1 − 2, 4 + 0 − 1) = (−1.5, 3); A = (−1.5 + .25·3, 3) = (−.75, 3), decay γλ =
        # .25.
        # Mean 1.125, unbiased variance 2·1.875² = 7.03125: whitened ∓.70710678. The hole between
        # them carries over.
        actual, returns = find_adv_est("gae").fn(
            torch.tensor([[0.0, 9.0, 4.0]]),
            torch.tensor([[1.0, 0.0, 1.0]]),
            torch.tensor([[2.0, 77.0, 1.0]]),
            gamma=0.5,
            lam=0.5,
        )
        assert returns.tolist() == [[1.25, 0.0, 4.0]]
        assert actual[0].tolist() == pytest.approx([-0.70710678, 0.0, 0.70710678], abs=1e-6)

    def test_grpo(self) -> None:
        # Rewards 1, 0, 0, 1: mean .5, unbiased std √(1/3) = .57735; ±.5 / .577351 = ±.866024.
        rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
        mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
        actual, _ = find_adv_est("grpo").fn(rewards, mask, torch.tensor([5, 5, 5, 5]))
        a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
        assert actual.flatten().tolist() == pytest.approx([a, 0, -a, -a, -a, -a, a, a])
        assert round(a, 5) == 0.86602

    def test_grpo_scaled_by_the_batch(self) -> None:
        # Groups (1, 0) and (3, 1): ±.5, ±1; all four: mean 1.25, squares .0625 + 1.5625 + 3.0625 +
        # .0625 = 4.75, / 3.
        rewards = torch.tensor([[1.0], [0.0], [3.0], [1.0]])
        arguments = (rewards, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]))
        actual, _ = find_adv_est("grpo").fn(*arguments, scale_rewards="batch")
        s = math.sqrt(4.75 / 3) + 1e-6
        assert actual.flatten().tolist() == pytest.approx([0.5 / s, -0.5 / s, 1 / s, -1 / s])
        for option in ("batches", "std"):
            with pytest.raises(ValueError, match="choose group, batch or none"):
                find_adv_est("grpo").fn(*arguments, scale_rewards=option)

    def test_gpg(self) -> None:
        # Groups (1, 0) and (1, 1): the second teaches nothing, B = 4, M = 2, α = 2. Three rewards
        # are not 0: α = 4/3.
        arguments = (
            torch.tensor([[1.0], [0.0], [1.0], [1.0]]),
            torch.ones(4, 1),
            torch.tensor([0, 0, 1, 1]),
        )
        actual, _ = find_adv_est("gpg").fn(*arguments)
        assert actual.flatten().tolist() == [1.0, -1.0, 0.0, 0.0]
        actual, _ = find_adv_est("gpg").fn(*arguments, alpha_counts="rewards")
        assert actual.flatten().tolist() == pytest.approx([2 / 3, -2 / 3, 0.0, 0.0])

    def test_rloo(self) -> None:
        # Rewards 1, 0, .5: 1 − .25, 0 − .75, .5 − .5.
        rewards = torch.tensor([[1.0], [0.0], [0.5]])
        actual, _ = find_adv_est("rloo").fn(rewards, torch.ones(3, 1), torch.zeros(3))
        assert actual.flatten().tolist() == [0.75, -0.75, 0.0]

    def test_opo(self) -> None:
        # Rewards 1 on three tokens, 0 on one: baseline 3/4.
        rewards = torch.tensor([[1.0, 0, 0], [0.0, 0, 0]])
        mask = torch.tensor([[1.0, 1, 1], [1.0, 0, 0]])
        actual, _ = find_adv_est("opo").fn(rewards, mask, torch.zeros(2))
        assert actual.tolist() == [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]

    def test_passk(self) -> None:
        rewards = torch.tensor([[3.0], [1.0], [2.0]])
        actual, _ = find_adv_est("grpo_passk").fn(rewards, torch.ones(3, 1), torch.zeros(3))
        assert actual.flatten().tolist() == pytest.approx([1.0 / (1.0 + 1e-6), 0.0, 0.0])


def test_the_order_of_samples_and_the_names_of_groups_do_not_matter(case: Any) -> None:
    batch = case(3)
    straight, _ = run("grpo", batch)
    order = torch.randperm(len(batch.group), generator=torch.Generator().manual_seed(0))
    batch.columns = {name: column[order] for name, column in batch.columns.items()}
    batch.mask = batch.mask[order]
    batch.valid = batch.valid[order]
    batch.group = -1000 - batch.group[order]
    shuffled, _ = run("grpo", batch)
    torch.testing.assert_close(shuffled, straight[order])


def test_bootstrapping_without_the_field_is_refused() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="truncated"):
        find_adv_est("gae").fn(ones, ones, ones, bootstrap_truncated=True)


def test_descriptions_show_the_values() -> None:
    described = describe_estimator("grpo", {"adv_epsilon": 0.01})
    assert described == "grpo: (reward − mean of its group) / (std of its group + 0.01)"
    assert (
        describe_estimator("grpo", {"norm_adv_by_std_in_grpo": False})
        == "grpo: reward − mean of its group"
    )
    assert describe_estimator("rloo") == "rloo: reward − mean of the others of its group"
    assert "gamma 0.9, lambda 0.5" in describe_estimator(
        "gae", {"gamma": 0.9, "lam": 0.5, "clip_ratio": 1}
    )
    for name in ESTIMATORS:
        assert describe_estimator(name).startswith(f"{name}: ")
