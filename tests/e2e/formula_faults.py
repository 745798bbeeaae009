"""Faults in formulas: each is a small change of one line of the package. No run can notice them,
because a run has no second formula to compare with; the default tests must fail with each.

Faults in plumbing, which a run must notice itself, are in `test_planted_faults.py`,
`test_planted_weights.py` and `test_checked_steps.py`.
"""

from typing import NamedTuple


class FormulaFault(NamedTuple):
    """A change of the package under which a default test must fail."""

    file: str
    """Relative to `src/distflow`."""
    before: str
    """A text that the file has exactly once."""
    after: str
    """What takes its place."""


OBJECTIVES = "algorithms/objectives.py"
REDUCTIONS = "algorithms/masked_reductions.py"
CLIPPED = "algorithms/losses/clipped_ratio.py"
GROUPS = "algorithms/advantages/group_estimator_base.py"
GAE = "algorithms/advantages/gae.py"
NORMALIZATION = "algorithms/normalization_filters_and_weights.py"
KL = "algorithms/kl.py"
CORRECTION = "algorithms/rollout_correction.py"
NODES = "pipelines/nodes/advantages.py"
METRICS = "runtime/step_metrics.py"

FORMULA_FAULTS = {
    "the end token out of the loss": FormulaFault(
        REDUCTIONS,
        "    mask = (loss_mask > 0).double()\n    if mode",
        "    mask = (loss_mask > 0).double()\n"
        "    mask = mask * torch.nn.functional.pad(mask, (0, 1))[:, 1:]\n    if mode",
    ),
    "a mean over all rows instead of rows with tokens": FormulaFault(
        REDUCTIONS, '"rows" if every_row else "sequences"', '"sequences" if every_row else "rows"'
    ),
    "all signs turned": FormulaFault(
        CLIPPED, "plain = -advantages * ratio\n", "plain = advantages * ratio\n"
    ),
    "the policy term times 0": FormulaFault(
        OBJECTIVES,
        "return weighted_sum(per_token, weights), sums | {",
        "return weighted_sum(per_token, weights) * 0.0, sums | {",
    ),
    "the policy term halved": FormulaFault(
        OBJECTIVES,
        "return weighted_sum(per_token, weights), sums | {",
        "return weighted_sum(per_token, weights) / 2, sums | {",
    ),
    "a loss scaled by 4 in 1,000": FormulaFault(
        OBJECTIVES,
        "return weighted_sum(per_token, weights), sums | {",
        "return weighted_sum(per_token, weights) * 1.004, sums | {",
    ),
    "KL times 0": FormulaFault(
        OBJECTIVES, "loss = loss + self.kl_loss_coef * kl_loss", "loss = loss + 0.0 * kl_loss"
    ),
    "KL by another coefficient": FormulaFault(
        OBJECTIVES,
        "loss = loss + self.kl_loss_coef * kl_loss",
        "loss = loss + 1.5 * self.kl_loss_coef * kl_loss",
    ),
    "entropy by another coefficient": FormulaFault(
        OBJECTIVES, "loss = loss - self.entropy_coef *", "loss = loss - 2.0 * self.entropy_coef *"
    ),
    "entropy turned": FormulaFault(
        OBJECTIVES, "loss = loss - self.entropy_coef *", "loss = loss + self.entropy_coef *"
    ),
    "no clip": FormulaFault(
        CLIPPED, "ratio.clamp(1.0 - low, 1.0 + high)", "ratio.clamp(1.0 - 1e3, 1.0 + 1e3)"
    ),
    "no dual clip": FormulaFault(CLIPPED, "over = (advantages < 0) &", "over = (advantages > 0) &"),
    "correction weights that are not applied": FormulaFault(
        OBJECTIVES, "per_token = per_token * correction", "per_token = per_token * 1.0"
    ),
    "off-policy sequences in the loss": FormulaFault(
        CORRECTION, "| (mean <= threshold)", "| (mean <= threshold + 1e9)"
    ),
    "rejected tokens in the loss": FormulaFault(
        CORRECTION,
        "return torch.where(kept, loss_mask, torch.zeros_like(loss_mask)).float(), statistics",
        "return loss_mask.float(), statistics",
    ),
    "a clip of values that is narrower": FormulaFault(
        OBJECTIVES,
        "near = predictions.clamp(values - cliprange_value, values + cliprange_value)",
        "near = predictions.clamp(values - 0.9 * cliprange_value, values + cliprange_value)",
    ),
    "one group for the batch": FormulaFault(
        GROUPS,
        "    groups = Groups(group_index, valid)\n    scores = under_mask",
        "    groups = Groups(torch.zeros_like(group_index), valid)\n    scores = under_mask",
    ),
    "advantages without a baseline": FormulaFault(
        GROUPS, "(near - baseline) / scale", "(near + middle) / scale"
    ),
    "a standard deviation over n": FormulaFault(
        GROUPS, "(self.size - 1).clamp(min=1)", "self.size.clamp(min=1)"
    ),
    "returns of another scale": FormulaFault(
        GAE,
        "returns = under_mask(advantages + values, mask)",
        "returns = under_mask(advantages + 2 * values, mask)",
    ),
    "advantages of GAE that are not whitened": FormulaFault(
        GAE,
        "advantages = masked_whiten(advantages, tokens, reduce)",
        "advantages = masked_whiten(advantages, tokens, reduce) * 1.3",
    ),
    "a discount that is squared": FormulaFault(
        GAE,
        "discounted_sum(delta, mask, gamma * lam)",
        "discounted_sum(delta, mask, gamma * lam * lam)",
    ),
    "rewards normalised to another scale": FormulaFault(
        NORMALIZATION,
        "centred = centred / (torch.where(undefined, 1.0, std) + self.eps)",
        "centred = 1.01 * centred / (torch.where(undefined, 1.0, std) + self.eps)",
    ),
    "a mean that leaves no value out": FormulaFault(
        NORMALIZATION, "(total - near) / (count - 1)", "total / (count - 1)"
    ),
    "rewards that are not clipped": FormulaFault(
        NODES, "rewards.clamp(-bound, bound), response_mask", "rewards, response_mask"
    ),
    "advantages that are not clipped": FormulaFault(
        NODES, '"advantages": advantages.clamp(-bound, bound)', '"advantages": advantages * 1.0'
    ),
    "weights of samples that are not applied": FormulaFault(
        NODES,
        "return advantages * with_mean_one(weights, valid, reduce)[:, None]",
        "return advantages.double()",
    ),
    "long errors in the loss": FormulaFault(
        NODES,
        "keep = ~cut & ~out_of_turns & ~long_errors & uneven",
        "keep = ~cut & ~out_of_turns & uneven",
    ),
    "truncated samples in the loss": FormulaFault(
        NODES,
        "keep = ~cut & ~out_of_turns & ~long_errors & uneven",
        "keep = ~out_of_turns & ~long_errors & uneven",
    ),
    "a KL penalty of the other sign": FormulaFault(
        KL, "response_mask) - kl_coef * kl", "response_mask) + kl_coef * kl"
    ),
    "a controller that goes the other way": FormulaFault(
        KL, "(1.0 + error * n_steps / horizon)", "(1.0 - error * n_steps / horizon)"
    ),
    "a group that is dropped though its scores differ": FormulaFault(
        NORMALIZATION,
        "if bool(valid_metric.max() == valid_metric.min()):",
        "if bool(valid_metric.max() - valid_metric.min() < 0.6):",
    ),
    "a group that is kept though its scores are equal": FormulaFault(
        NORMALIZATION, "if bool(valid_metric.max() == valid_metric.min()):", "if False:"
    ),
    "a penalty of long responses that is halved": FormulaFault(
        "rewards/router.py",
        "return -min(max(excess, 0.0), 1.0)",
        "return -0.5 * min(max(excess, 0.0), 1.0)",
    ),
    "a biased pass@k": FormulaFault(
        METRICS,
        "return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)",
        "return 1.0 - (1.0 - num_correct / num_samples) ** k",
    ),
    "a mean score over all samples": FormulaFault(
        METRICS,
        "    valid_scores = values[valid].double()\n",
        "    valid_scores = values.double()\n",
    ),
    "a schedule without its warm-up": FormulaFault(
        "training/optimizer.py", "        if step < warmup:\n", "        if step < 0:\n"
    ),
}
