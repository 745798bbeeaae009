"""Objectives: the same gradient and metrics however a mini-batch is split, wiring by parameter
names, dead terms."""

import math
from typing import Any

import pytest
import torch

from distflow import builtin_names
from distflow.algorithms import register_policy_loss
from distflow.algorithms.masked_reductions import (
    LOSS_AGG_MODES,
    loss_counts,
    token_weights,
    weighted_sum,
)
from distflow.algorithms.objectives import PolicyObjective, SFTObjective, ValueObjective
from distflow.algorithms.registry import POLICY_LOSSES, find_policy_loss, read_policy_loss
from distflow.data.batch import Batch
from tests.algorithms.toy_policy import (
    LONGEST,
    gradient,
    outputs,
    random_split,
    scale_of,
    toy_batch,
    toy_weights,
)

ROWS = 13


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(builtin_names.POLICY_LOSSES))
def test_the_gradient_does_not_depend_on_the_micro_batches(name: str, mode: str) -> None:
    objective = PolicyObjective(
        name,
        loss_agg_mode=mode,
        loss_scale_factor=scale_of(mode),
        entropy_coef=0.01,
        kl_loss_type="kl+",
        kl_loss_coef=0.1,
        weights_field="rollout_is_weights",
        off_policy_mask_threshold=0.2,
    )
    batch = toy_batch(seed=3, bs=ROWS)
    counts = objective.counts(batch)
    wanted, wanted_sums = gradient(objective, [batch], counts)
    assert wanted.abs().max() > 1e-3
    parts = random_split(batch, seed=LOSS_AGG_MODES.index(mode))
    assert {k: sum(objective.counts(p)[k] for p in parts) for k in counts} == counts
    actual, sums = gradient(objective, parts, counts)
    torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)
    metrics = objective.finish(sums, counts)
    wanted_metrics = objective.finish(wanted_sums, counts)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-11, abs=1e-13)


def of_domains(mode: str) -> PolicyObjective:
    """PPO with a tight clip, and other losses in two domains."""
    shared: dict[str, Any] = {"loss_agg_mode": mode, "loss_scale_factor": scale_of(mode)}
    clip = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": None}
    own = {
        "code": PolicyObjective("gspo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, **shared),
        "chat": PolicyObjective("sapo", {"tau_neg": 2.0}, entropy_coef=9.0, **shared),
    }
    return PolicyObjective("vanilla", clip, entropy_coef=0.01, domains=own, **shared)


def loss_by_hand(batch: Batch, log_probs: torch.Tensor, row: int) -> list[torch.Tensor]:
    """The policy loss of each token of a row under the mask, by its domain."""
    places = [t for t in range(log_probs.shape[1]) if batch["loss_mask"][row, t] > 0]
    now = [log_probs[row, t] for t in places]
    old, advantages = (
        [batch[name][row, t].double() for t in places] for name in ("old_log_probs", "advantages")
    )
    ratios = [(a - b).exp() for a, b in zip(now, old, strict=True)]
    # one ratio, whose gradient reaches each token by the token's own log-prob
    if batch["domain"][row] == "code":
        mean = sum(float(a.detach() - b) for a, b in zip(now, old, strict=True)) / max(len(now), 1)
        ratios = [(mean + a - a.detach()).exp() for a in now]
    losses = []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        if batch["domain"][row] == "chat":
            tau = 1.0 if advantage > 0 else 2.0
            losses.append(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage)
        else:
            low, high = (0.8, 1.2) if batch["domain"][row] == "code" else (0.9, 1.3)
            losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high)))
    return losses


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_each_domain_has_its_own_loss_and_all_tokens_one_mean(mode: str) -> None:
    batch = toy_batch(seed=3, bs=ROWS)
    objective = of_domains(mode)
    batch["domain"] = [("math", "code", "chat", "code", "other")[row % 5] for row in range(ROWS)]
    for name in ("old_log_probs", "advantages", "loss_mask"):
        batch[name] = batch.flat(name).double()
    counts = objective.counts(batch)
    found, sums = gradient(objective, random_split(batch, seed=1), counts)

    weights = toy_weights()
    log_probs, entropy = (outputs(weights, batch)[name] for name in ("log_probs", "entropy"))
    rows = [loss_by_hand(batch, log_probs, row) for row in range(ROWS)]
    bonus = [entropy[row][batch["loss_mask"][row] > 0] for row in range(ROWS)]
    counted = [row for row in range(ROWS) if rows[row]]
    divisor = {
        "token-mean": lambda row: sum(map(len, rows)),
        "seq-mean-token-sum": lambda row: len(counted),
        "seq-mean-token-mean": lambda row: len(counted) * len(rows[row]),
        "seq-mean-token-sum-norm": lambda row: len(counted) * LONGEST,
    }[mode]
    shares = {row: torch.stack(rows[row]).sum() / divisor(row) for row in counted}
    loss = sum(shares.values()) - 0.01 * sum(bonus[row].sum() / divisor(row) for row in counted)
    (wanted,) = torch.autograd.grad(loss, weights)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert sums["loss"] == pytest.approx(loss.item(), rel=1e-9)
    for domain in ("code", "chat"):
        own = sum(share.item() for row, share in shares.items() if batch["domain"][row] == domain)
        assert sums[f"pg_loss/{domain}"] == pytest.approx(own, rel=1e-9)
    assert {"domain", "advantages"} <= {*objective.reads} and "old_log_probs" in objective.optional


UNITS = {
    "token": [[[0], [1], [2], [3], [5]], [[0], [1], [2]]],
    "action": [[[0, 1], [2, 3], [5]], [[0, 1], [2]]],
    "chunk": [[[0, 1, 2, 3], [5]], [[0, 1, 2]]],
}
"""Of each sample's tokens; token 4 is given, and of the second chunk one token had no effect."""


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("level", UNITS)
def test_a_level_sums_the_log_probs_of_an_action_or_a_chunk(level: str, mode: str) -> None:
    now = [[-1.0, -0.5, -2.0, -0.25, -9.0, -0.75, -9.0], [-0.25, -1.5, -0.875]]
    # exact in float32
    old = [[-1.125, -0.625, -2.125, -0.125, -9.0, -0.625, -9.0], [-0.125, -1.375, -1.25]]
    advantages = (1.5, -2.0)
    low = 0.85
    high = 1.15
    batch = Batch(torch.ones(2, dtype=torch.int64), torch.tensor([7, 3]))
    batch["turn_index"] = torch.tensor([0, 0, 0, 0, -1, 1, -1, 0, 0, 0])
    batch["loss_mask"] = torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 1, 1, 1])
    batch["old_log_probs"] = torch.tensor(sum(old, []), dtype=torch.float64)
    batch["advantages"] = torch.tensor(
        [advantages[0]] * 7 + [advantages[1]] * 3, dtype=torch.float64
    )
    clip = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15}
    objective = PolicyObjective(
        "vanilla", clip, loss_agg_mode=mode, logprob_level=level, action_dim=2
    )
    padded = torch.tensor(
        [now[0], [*now[1], 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    ).requires_grad_()
    counts = objective.counts(batch)
    loss, sums = objective(
        {"log_probs": padded, "entropy": torch.zeros_like(padded)}, batch, counts
    )
    loss.backward()

    units = UNITS[level]
    wanted = torch.zeros(2, 7, dtype=torch.float64)
    total = 0.0
    kls = 0.0
    clipped = 0
    for row, own in enumerate(units):
        for unit in own:
            weight = 1 / sum(map(len, units)) if mode == "token-mean" else 0.5 / len(own)
            gap = math.fsum(now[row][t] - old[row][t] for t in unit)
            plain = -advantages[row] * math.exp(gap)
            bound = -advantages[row] * min(max(math.exp(gap), low), high)
            total = total + weight * max(plain, bound)
            kls = kls - gap
            clipped = clipped + (bound > plain)
            wanted[row, unit] = 0.0 if bound > plain else weight * plain
    assert loss.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(padded.grad, wanted, rtol=1e-12, atol=0.0)
    metrics = objective.finish({name: float(value) for name, value in sums.items()}, counts)
    assert metrics["ppo_kl"] == pytest.approx(kls / sum(map(len, units)))
    assert metrics["pg_clipfrac"] == pytest.approx(clipped / sum(map(len, units)))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("level", ["action", "chunk"])
def test_levels_do_not_depend_on_the_micro_batches(level: str, mode: str) -> None:
    scale = scale_of(mode)
    objective = PolicyObjective(
        loss_agg_mode=mode, loss_scale_factor=scale, logprob_level=level, action_dim=2
    )
    batch = toy_batch(seed=3, bs=ROWS)
    batch["turn_index"] = torch.cat(
        [torch.arange(length) // 3 for length in batch.lengths("response").tolist()]
    )
    counts = objective.counts(batch)
    wanted, wanted_sums = gradient(objective, [batch], counts)
    parts = random_split(batch, seed=LOSS_AGG_MODES.index(mode))
    assert {k: sum(objective.counts(p)[k] for p in parts) for k in counts} == counts
    actual, sums = gradient(objective, parts, counts)
    torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)
    assert objective.finish(sums, counts) == pytest.approx(
        objective.finish(wanted_sums, counts), rel=1e-11, abs=1e-13
    )


def test_losses_of_tokens_alone_have_no_other_level() -> None:
    with pytest.raises(ValueError, match="policy loss 'decoupled' is of tokens alone"):
        PolicyObjective("decoupled", logprob_level="chunk")


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_gradient_of_the_critic_does_not_depend_on_the_micro_batches(mode: str) -> None:
    objective = ValueObjective(0.3, mode, scale_of(mode))
    batch = toy_batch(seed=4, bs=ROWS)
    counts = objective.counts(batch)
    wanted, wanted_sums = gradient(objective, [batch], counts)
    actual, sums = gradient(objective, random_split(batch, 0), counts)
    torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)
    metrics = objective.finish(sums, counts)
    assert metrics == pytest.approx(objective.finish(wanted_sums, counts))
    assert set(metrics) == {"loss", "vf_loss", "vf_clipfrac", "vpred_mean"}


def test_supervised_fine_tuning_is_the_mean_negative_log_likelihood() -> None:
    objective = SFTObjective()
    batch = toy_batch(seed=5, bs=ROWS)
    counts = objective.counts(batch)
    _, sums = gradient(objective, random_split(batch, 1), counts)
    log_probs = outputs(toy_weights(), batch)["log_probs"]
    mask = batch["loss_mask"]
    tokens = [
        -float(x) for x, m in zip(log_probs.detach().flatten(), mask.flatten(), strict=True) if m
    ]
    assert objective.finish(sums, counts)["loss"] == pytest.approx(sum(tokens) / len(tokens))


def brute_force_loss(
    batch: Batch, mode: str, entropy_coef: float, kl_coef: float
) -> dict[str, float]:
    """gpg − entropy + k2 in plain Python."""
    out = outputs(toy_weights(), batch)
    rows: dict[str, list[list[float]]] = {"pg": [], "entropy": [], "kl": []}
    for i, keep in enumerate(batch["loss_mask"].tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        lp = [float(out["log_probs"][i, t].detach()) for t in tokens]
        rows["pg"].append(
            [-x * float(batch["advantages"][i, t]) for x, t in zip(lp, tokens, strict=True)]
        )
        rows["entropy"].append([float(out["entropy"][i, t].detach()) for t in tokens])
        rows["kl"].append(
            [
                0.5 * (x - float(batch["ref_log_prob"][i, t])) ** 2
                for x, t in zip(lp, tokens, strict=True)
            ]
        )

    def aggregate(values: list[list[float]]) -> float:
        live = [row for row in values if row]
        if mode == "token-mean":
            return sum(map(sum, live)) / sum(map(len, live))
        per_row = [sum(row) / (len(row) if mode == "seq-mean-token-mean" else 1) for row in live]
        return sum(per_row) / len(live) / (LONGEST if mode == "seq-mean-token-sum-norm" else 1)

    pg, entropy, kl = (aggregate(rows[name]) for name in ("pg", "entropy", "kl"))
    flat = [x for row in rows["entropy"] for x in row]
    return {
        "loss": pg - entropy_coef * entropy + kl_coef * kl,
        "pg_loss": pg,
        "entropy": sum(flat) / len(flat),
        "kl_loss": kl,
        "loss_term/pg": aggregate([[abs(x) for x in row] for row in rows["pg"]]),
        "loss_term/entropy": entropy_coef * entropy,
        "loss_term/kl": kl_coef * kl,
    }


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_metrics_are_those_of_the_whole_mini_batch(mode: str) -> None:
    objective = PolicyObjective(
        "gpg",
        loss_agg_mode=mode,
        loss_scale_factor=scale_of(mode),
        entropy_coef=0.05,
        kl_loss_type="mse",
        kl_loss_coef=0.3,
    )
    batch = toy_batch(seed=6, bs=ROWS)
    counts = objective.counts(batch)
    _, sums = gradient(objective, random_split(batch, 2), counts)
    metrics = objective.finish(sums, counts)
    assert metrics.pop("log_ratio_abs") > 0
    assert metrics == pytest.approx(brute_force_loss(batch, mode, 0.05, 0.3))


def test_a_term_whose_tokens_cancel_is_not_dead() -> None:
    """The plain log ratio is of either sign; what the term contributed is the sum of its absolute
    values."""
    objective = PolicyObjective("gpg", kl_loss_type="kl", kl_loss_coef=-0.3)
    batch = toy_batch(seed=6, bs=ROWS)
    counts = objective.counts(batch)
    _, sums = gradient(objective, random_split(batch, 2), counts)
    metrics = objective.finish(sums, counts)
    mask = batch["loss_mask"] > 0
    ratio = (outputs(toy_weights().detach(), batch)["log_probs"] - batch["ref_log_prob"])[
        mask
    ].double()
    assert (ratio > 0).any() and (ratio < 0).any()
    assert metrics["kl_loss"] == pytest.approx(float(ratio.mean()), rel=1e-6)
    assert metrics["loss_term/kl"] == pytest.approx(0.3 * float(ratio.abs().mean()), rel=1e-6)


def test_statistics_are_means_over_the_tokens_of_the_mini_batch() -> None:
    objective = PolicyObjective("vanilla", {"clip_ratio_low": 0.1})
    batch = toy_batch(seed=7, bs=ROWS)
    counts = objective.counts(batch)
    _, sums = gradient(objective, random_split(batch, 3), counts)
    metrics = objective.finish(sums, counts)
    mask = batch["loss_mask"] > 0
    _, stats = find_policy_loss("vanilla").fn(
        outputs(toy_weights(), batch)["log_probs"],
        batch["advantages"],
        batch["loss_mask"],
        batch["old_log_probs"],
        clip_ratio_low=0.1,
    )
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        assert metrics[name] == pytest.approx(float(stats[name][mask].double().mean()))
    assert 0 < metrics["pg_clipfrac"] < 1


@pytest.mark.parametrize(
    ("name", "anchor"), [("vanilla", "old_log_probs"), ("decoupled", "prox_log_probs")]
)
def test_the_distance_to_the_anchor_is_a_mean_over_the_loss_masks_tokens(
    name: str, anchor: str
) -> None:
    objective = PolicyObjective(name)
    batch = toy_batch(seed=7, bs=ROWS)
    counts = objective.counts(batch)
    _, sums = gradient(objective, random_split(batch, 2), counts)
    new, old, mask = (
        x.double()
        for x in (
            outputs(toy_weights().detach(), batch)["log_probs"],
            batch[anchor],
            batch["loss_mask"],
        )
    )
    gaps = [
        abs(float(a - b))
        for a, b, m in zip(new.flatten(), old.flatten(), mask.flatten(), strict=True)
        if m
    ]
    assert objective.finish(sums, counts)["log_ratio_abs"] == pytest.approx(
        sum(gaps) / len(gaps), rel=1e-6
    )


def test_a_distance_beyond_the_clamp_is_told_and_its_loss_and_gradient_are_finite() -> None:
    objective = PolicyObjective("vanilla")
    batch = toy_batch(seed=7, bs=ROWS)
    counts = objective.counts(batch)
    for gap in (100.0, -100.0):
        batch["old_log_probs"] = (
            outputs(toy_weights(), batch)["log_probs"].detach().nan_to_num() - gap
        )
        found, sums = gradient(objective, [batch], counts)
        metrics = objective.finish(sums, counts)
        assert metrics["log_ratio_abs"] == pytest.approx(100.0, rel=1e-5)
        assert bool(found.isfinite().all()) and all(abs(value) < 1e10 for value in metrics.values())


def test_without_old_log_probs_there_is_no_distance() -> None:
    batch = toy_batch(seed=7, bs=ROWS)
    batch = batch.only(name for name in batch.names if name != "old_log_probs")
    objective = PolicyObjective("gpg")
    _, sums = gradient(objective, [batch], objective.counts(batch))
    assert "log_ratio_abs" not in objective.finish(sums, objective.counts(batch))


def test_a_dead_term_is_exactly_zero_and_a_live_one_is_not() -> None:
    batch = toy_batch(seed=8, bs=ROWS)
    objective = PolicyObjective(
        "vanilla", entropy_coef=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1
    )
    counts = objective.counts(batch)
    live = objective.finish(gradient(objective, [batch], counts)[1], counts)
    assert all(live[f"loss_term/{name}"] > 0 for name in ("pg", "entropy", "kl"))

    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch["ref_log_prob"] = outputs(toy_weights(), batch)["log_probs"].nan_to_num()
    weights = toy_weights()
    out = outputs(weights, batch)
    out["log_probs"] = out["log_probs"].float()
    dead = objective.finish(objective(out, batch, counts)[1], counts)
    assert dead["loss_term/pg"] == 0.0
    assert dead["loss_term/kl"] == 0.0
    assert dead["loss_term/entropy"] > 0


def test_advantages_that_cancel_are_no_dead_term() -> None:
    """On policy a centred group's loss is 0 in value, while its gradient is not."""
    batch = toy_batch(seed=9, bs=2).select([0, 0])
    batch["advantages"] = torch.tensor([[1.0], [-1.0]]) * batch["response_mask"]
    batch["old_log_probs"] = outputs(toy_weights(), batch)["log_probs"].nan_to_num()
    objective = PolicyObjective("vanilla")
    counts = objective.counts(batch)
    _, sums = gradient(objective, [batch], counts)
    metrics = objective.finish(sums, counts)
    assert abs(metrics["pg_loss"]) < 1e-6
    assert metrics["loss_term/pg"] == pytest.approx(1.0, rel=1e-6)


def test_invalid_samples_have_no_gradient() -> None:
    batch = toy_batch(seed=10, bs=ROWS)
    objective = PolicyObjective("vanilla", entropy_coef=0.01)
    wanted, _ = gradient(objective, [batch], objective.counts(batch))
    poisoned = batch.select(range(len(batch)))
    advantages = poisoned["advantages"]
    advantages[~poisoned["valid"]] = 1e6
    poisoned["advantages"] = advantages
    actual, _ = gradient(objective, [poisoned], objective.counts(poisoned))
    assert torch.equal(actual, wanted)


def test_terms_that_are_off_are_not_read() -> None:
    batch = toy_batch(seed=11, bs=5)
    objective = PolicyObjective("gpg")
    assert objective.reads == ("advantages", "loss_mask")
    bare = batch.only(["response_ids", "response_mask", "advantages"])
    counts = objective.counts(bare)
    metrics = objective.finish(gradient(objective, [bare], counts)[1], counts)
    assert set(metrics) == {"loss", "pg_loss", "entropy", "loss_term/pg"}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gmpo_counts_every_row_as_its_peers_do(mode: str) -> None:
    """The mean of verl's `geo_mean`: over all rows, those without a token as 0. Entropy is not
    concerned."""
    objective = PolicyObjective(
        "gmpo", loss_agg_mode=mode, loss_scale_factor=scale_of(mode), entropy_coef=0.1
    )
    batch = toy_batch(seed=3, bs=ROWS)
    counts = objective.counts(batch)
    assert counts["rows"] == ROWS > counts["sequences"]
    _, sums = gradient(objective, random_split(batch, 4), counts)
    found = objective.finish(sums, counts)
    rows = []
    tokens = []
    log_probs = outputs(toy_weights().detach(), batch)["log_probs"]
    for i, keep in enumerate(batch["loss_mask"].tolist()):
        inside = [t for t, m in enumerate(keep) if m]
        total = 0.0
        for t in inside:
            d = float(log_probs[i, t]) - float(batch["old_log_probs"][i, t])
            a = float(batch["advantages"][i, t])
            total += min(d, 0.2) if a > 0 else max(d, -0.2)
        length = max(len(inside), 1)
        mean = sum(float(batch["advantages"][i, t]) for t in inside) / length
        rows.append(-mean * math.exp(total / length))
        tokens.append(len(inside))
    sums_of_rows = [row * count for row, count in zip(rows, tokens, strict=True)]
    wanted = {
        "token-mean": sum(sums_of_rows) / sum(tokens),
        "seq-mean-token-sum": sum(sums_of_rows) / ROWS,
        "seq-mean-token-mean": sum(rows) / ROWS,
        "seq-mean-token-sum-norm": sum(sums_of_rows) / ROWS / LONGEST,
    }[mode]
    assert found["pg_loss"] == pytest.approx(wanted, rel=1e-6)
    entropy = PolicyObjective(
        "gpg", loss_agg_mode=mode, loss_scale_factor=scale_of(mode), entropy_coef=0.1
    )
    _, sums = gradient(entropy, [batch], counts)
    assert found["loss_term/entropy"] == pytest.approx(
        entropy.finish(sums, counts)["loss_term/entropy"]
    )


@pytest.mark.parametrize("threshold", [0.05, 0.3, 5.0])
def test_off_policy_sequences_get_no_loss_where_the_advantage_is_negative(threshold: float) -> None:
    """TRL's `off_policy_mask_threshold`: the mean log π_rollout − log π of the sequence;
    denominators stay."""
    objective = PolicyObjective(
        "gpg",
        off_policy_mask_threshold=threshold,
        kl_loss_type="kl",
        kl_loss_coef=0.3,
        entropy_coef=0.1,
    )
    assert set(objective.reads) >= {"rollout_log_probs", "advantages"}
    batch = toy_batch(seed=6, bs=ROWS)
    counts = objective.counts(batch)
    actual, sums = gradient(objective, random_split(batch, 2), counts)
    metrics = objective.finish(sums, counts)

    log_probs = outputs(toy_weights().detach(), batch)["log_probs"]
    keep = batch["loss_mask"].clone()
    for i, row in enumerate(keep.tolist()):
        inside = [t for t, m in enumerate(row) if m]
        gaps = [float(batch["rollout_log_probs"][i, t]) - float(log_probs[i, t]) for t in inside]
        if inside and sum(gaps) / len(gaps) > threshold:
            keep[i] = keep[i] * (batch["advantages"][i] >= 0)
    dropped = float((batch["loss_mask"] - keep).sum() / batch["loss_mask"].sum())
    assert (dropped > 0) == (threshold < 5.0)
    assert metrics["off_policy_masked"] == pytest.approx(dropped)
    plain = PolicyObjective("gpg", kl_loss_type="kl", kl_loss_coef=0.3, entropy_coef=0.1)
    batch["advantages"] = batch["advantages"] * keep  # gpg is linear in the advantage
    wanted, _ = gradient(plain, [batch], counts)
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


def test_what_an_off_policy_mask_drops_is_not_read() -> None:
    """A loss that overflowed there is no NaN."""
    register_policy_loss("test_inf")(
        lambda log_probs, advantages, loss_mask: (
            torch.where(advantages < 0, math.inf, -log_probs),
            {},
        )
    )
    try:
        objective = PolicyObjective("test_inf", off_policy_mask_threshold=1e-6)
        batch = toy_batch(seed=6, bs=ROWS)
        batch["rollout_log_probs"] = torch.full_like(batch["rollout_log_probs"], 50.0)
        found, sums = gradient(objective, [batch], objective.counts(batch))
        assert bool(found.isfinite().all()) and math.isfinite(sums["loss"])
    finally:
        del POLICY_LOSSES["test_inf"]


def test_a_loss_of_ones_own_is_wired_by_its_parameter_names() -> None:
    @register_policy_loss("test_own_loss")
    def own_loss(
        log_probs: Any,
        advantages: Any,
        loss_mask: Any,
        returns: Any,
        values: Any = None,
        *,
        power: float = 1.0,
    ) -> Any:
        assert values is not None
        return -log_probs.exp() * advantages * returns.abs() ** power, {"seen": returns}

    try:
        objective = PolicyObjective("test_own_loss", {"power": 2.0})
        batch = toy_batch(seed=12, bs=ROWS)
        assert objective.reads == ("advantages", "loss_mask", "returns")
        counts = objective.counts(batch)
        wanted, _ = gradient(objective, [batch], counts)
        actual, sums = gradient(objective, random_split(batch, 5), counts)
        torch.testing.assert_close(actual, wanted)
        assert actual.isfinite().all()
        mask = batch["loss_mask"] > 0
        seen = objective.finish(sums, counts)["seen"]
        assert seen == pytest.approx(float(batch["returns"][mask].double().mean()))
        with pytest.raises(ValueError, match="'powr'.*did you mean 'power'"):
            PolicyObjective("test_own_loss", {"powr": 2.0})
    finally:
        del POLICY_LOSSES["test_own_loss"]


@pytest.mark.parametrize("returned", [lambda x: x, lambda x: (x, x), lambda x: (x, {}, {})])
def test_a_loss_of_ones_own_that_returns_something_else_is_told_what_to_return(
    returned: Any,
) -> None:
    register_policy_loss("test_odd")(lambda log_probs, advantages, loss_mask: returned(log_probs))
    batch = toy_batch(seed=5, bs=ROWS)
    try:
        objective = PolicyObjective("test_odd")
        with pytest.raises(ValueError, match="'test_odd' must return"):
            gradient(objective, [batch], objective.counts(batch))
    finally:
        del POLICY_LOSSES["test_odd"]


def test_correction_weights_multiply_each_token() -> None:
    batch = toy_batch(seed=13, bs=ROWS)
    objective = PolicyObjective("gpg", weights_field="rollout_is_weights")
    counts = objective.counts(batch)
    actual, _ = gradient(objective, [batch], counts)
    batch["advantages"] = batch["advantages"] * batch["rollout_is_weights"]
    wanted, _ = gradient(PolicyObjective("gpg"), [batch], counts)
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "vanila"}, "did you mean 'vanilla'"),
        ({"loss_agg_mode": "mean"}, "token-mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor"),
        ({"loss_scale_factor": 0.0}, "positive"),
        ({"options": {"clip_ratio_hihg": 0.1}}, "did you mean 'clip_ratio_high'"),
        ({"options": {"clip_ratio_c": 0.5}}, "clip_ratio_c must be above 1"),
        ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold must be positive"),
        ({"kl_loss_type": "low_var"}, "did you mean 'low_var_kl'"),
        ({"kl_loss_type": "full"}, "low_var_kl"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**arguments)


def test_a_missing_column_is_named() -> None:
    batch = toy_batch(seed=14, bs=3).only(["response_ids", "response_mask", "advantages"])
    objective = PolicyObjective("decoupled")
    with pytest.raises(KeyError, match="old_log_probs"):
        objective(outputs(toy_weights(), batch), batch, objective.counts(batch))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_token_weights_against_loops(case: Any, mode: str) -> None:
    mask = case(6).mask
    loss = torch.randn(9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [
        [x for x, m in zip(r, k, strict=True) if m]
        for r, k in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    live = [row for row in rows if row]
    wanted = {
        "token-mean": sum(map(sum, live)) / sum(map(len, live)),
        "seq-mean-token-sum": sum(map(sum, live)) / len(live),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in live) / len(live),
        "seq-mean-token-sum-norm": sum(map(sum, live)) / len(live) / 7,
    }[mode]
    weights = token_weights(mask, mode, loss_counts(mask))
    assert float(weighted_sum(loss, weights)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shape", ["scalar", "sample"])
def test_a_loss_without_a_number_for_each_token_is_refused(shape: str) -> None:
    def unfit(log_probs: Any, advantages: Any, loss_mask: Any) -> Any:
        loss = -log_probs * advantages * loss_mask
        return (loss.sum() if shape == "scalar" else loss.sum(-1, keepdim=True)), {}

    batch = toy_batch(0, 3)
    objective = PolicyObjective(read_policy_loss("unfit", unfit))
    given = {
        "log_probs": batch["old_log_probs"],
        "entropy": torch.zeros_like(batch["old_log_probs"]),
    }
    with pytest.raises(
        ValueError, match=r"'unfit' returned a loss of shape \(.*one number per token, \(3, "
    ):
        objective(given, batch, objective.counts(batch))
