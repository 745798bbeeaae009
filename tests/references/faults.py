"""Faults in formulas: each is a small change of one line of the package. No run can notice them,
because a run has no second formula to compare with; the default tests must fail with each.

Faults in plumbing, which a run must notice itself, are in `tests/e2e`.
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
NORMALIZATION = "algorithms/normalization.py"
FILTER = "algorithms/group_filter.py"
WEIGHTS = "algorithms/sample_weights.py"
KL = "algorithms/kl.py"
CORRECTION = "algorithms/rollout_correction.py"
NODES = "pipelines/nodes/advantages.py"
METRICS = "runtime/step_metrics.py"
SAMPLE_ROWS = "runtime/sample_rows.py"
VALIDATION = "runtime/validation_results.py"
BEHAVIOUR_WEIGHTS = "algorithms/losses/behaviour_weights.py"
DIVERGENCE_BOUND = "algorithms/losses/divergence_bound.py"
TOKEN_SELECTION = "algorithms/losses/token_selection.py"
METHOD = "algorithms/methods/{}.py"
MISMATCH = "algorithms/mismatch_check.py"
SRPO = "acting/srpo.py"
ROUTER = "rewards/router.py"

DETACHED = "    difference = log_ratio(log_probs, old_log_probs, loss_mask)"
THEN_WEIGHT = "\n    ratio = difference.exp()\n    weight"

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
        GROUPS, "self.sum(near**2) / (self.size - 1)", "self.sum(near**2) / self.size"
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
        FILTER,
        "if bool(known.max() == known.min()):",
        "if bool(known.max() - known.min() < 0.6):",
    ),
    "a group that is kept though its scores are equal": FormulaFault(
        FILTER, "if bool(known.max() == known.min()):", "if False:"
    ),
    "a penalty of long responses that is halved": FormulaFault(
        ROUTER,
        "return -min(max(excess, 0.0), 1.0)",
        "return -0.5 * min(max(excess, 0.0), 1.0)",
    ),
    "a biased pass@k": FormulaFault(
        VALIDATION,
        "return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)",
        "return 1.0 - (1.0 - num_correct / num_samples) ** k",
    ),
    "a mean score over all samples": FormulaFault(
        METRICS,
        "return [sample.score for sample in samples if sample.score is not None]",
        "return [sample.score or 0.0 for sample in samples]",
    ),
    "a ratio of the wrong direction": FormulaFault(
        REDUCTIONS, "    return current - old\n", "    return old - current\n"
    ),
    "old log-probs that carry a gradient": FormulaFault(
        REDUCTIONS, "        old = current.detach()\n", "        old = current\n"
    ),
    "a variance over n": FormulaFault(
        REDUCTIONS, "squares / (count - 1).clamp(min=1)", "squares / count.clamp(min=1)"
    ),
    "means over the tokens of one rank": FormulaFault(
        REDUCTIONS,
        "    return value if reduce is None else reduce.sum(value)",
        "    return value",
    ),
    "a sequence's mean over the padded length": FormulaFault(
        REDUCTIONS,
        "per_sequence / mask.sum(dim=-1, keepdim=True).clamp(min=1)",
        "per_sequence / 7.0",
    ),
    "token-mean over sequences": FormulaFault(
        REDUCTIONS,
        'return mask / max(counts["tokens"], 1.0)',
        'return mask / max(counts["rows"], 1.0)',
    ),
    "GSPO with the ratio of each token": FormulaFault(
        METHOD.format("gspo"), "torch.exp((sequence + token_part)", "torch.exp((difference)"
    ),
    "GSPO with the gradient of the whole sequence": FormulaFault(
        METHOD.format("gspo"),
        "sequence = (difference.sum(dim=-1, keepdim=True) / lengths).detach()",
        "sequence = difference.sum(dim=-1, keepdim=True) / lengths",
    ),
    "GMPO with the clips exchanged": FormulaFault(
        METHOD.format("gmpo"),
        "difference.clamp(max=clip_ratio_high), difference.clamp(min=-clip_ratio_low)",
        "difference.clamp(max=clip_ratio_low), difference.clamp(min=-clip_ratio_high)",
    ),
    "GMPO by the sum of log-ratios": FormulaFault(
        METHOD.format("gmpo"),
        "(pessimistic.sum(dim=-1, keepdim=True) / lengths).exp()",
        "pessimistic.sum(dim=-1, keepdim=True).exp()",
    ),
    "DPPO that excludes tokens in both directions": FormulaFault(
        METHOD.format("dppo_kl"),
        "rises = (divergence <= clip_ratio_high) | (policy <= old)",
        "rises = divergence <= clip_ratio_high",
    ),
    "DPPO with the weight's gradient": FormulaFault(
        DIVERGENCE_BOUND,
        f"{DETACHED}.detach()",
        DETACHED,
    ),
    "DPPO by the reverse KL": FormulaFault(
        METHOD.format("dppo_kl"),
        "divergence = -old * difference",
        "divergence = -policy * difference",
    ),
    "CPGD with a clip that is not of logarithms": FormulaFault(
        METHOD.format("cpgd"),
        "ceiling = old + math.log1p(clip_ratio_high)",
        "ceiling = old + clip_ratio_high",
    ),
    "CPGD's drift without its bound": FormulaFault(
        METHOD.format("cpgd"), "MAX_DRIFT = 2.0", "MAX_DRIFT = 2e9"
    ),
    "DRO without the half": FormulaFault(METHOD.format("dro"), "+ 0.5 * beta *", "+ beta *"),
    "TOPR that tapers good responses": FormulaFault(
        METHOD.format("topr"), "good = (score > 0)[:, None]", "good = (score < 0)[:, None]"
    ),
    "TOPR with a ratio above 1": FormulaFault(
        METHOD.format("topr"), "tapered = ratio.clamp(0.0, 1.0)", "tapered = ratio.clamp(0.0, 2.0)"
    ),
    "SAPO's temperatures exchanged": FormulaFault(
        METHOD.format("sapo"),
        "torch.full_like(advantages, tau_pos), torch.full_like(advantages, tau_neg)",
        "torch.full_like(advantages, tau_neg), torch.full_like(advantages, tau_pos)",
    ),
    "CISPO with a gradient through its weight": FormulaFault(
        METHOD.format("cispo"),
        f"{DETACHED}.detach(){THEN_WEIGHT}",
        f"{DETACHED}{THEN_WEIGHT}",
    ),
    "CISPO that is always clipped below": FormulaFault(
        METHOD.format("cispo"),
        "1.0 - clip_ratio_low if clip_below else 0.0",
        "1.0 - clip_ratio_low",
    ),
    "a proximal policy in the place of the old one": FormulaFault(
        METHOD.format("decoupled_ppo"),
        "difference = log_ratio(log_probs, prox_log_probs, loss_mask)",
        "difference = log_ratio(log_probs, old_log_probs, loss_mask)",
    ),
    "behaviour weights with a gradient of the wrong sign": FormulaFault(
        METHOD.format("decoupled_ppo"), "weight = behaviour.exp()", "weight = (-behaviour).exp()"
    ),
    "behaviour weights that are not capped": FormulaFault(
        METHOD.format("decoupled_ppo"),
        "above = weight > behav_imp_weight_cap",
        "above = weight > 1e9",
    ),
    "a rejection's bound that is not applied": FormulaFault(
        BEHAVIOUR_WEIGHTS,
        "outside = outside | (measured < rule.lower)",
        "outside = outside | (measured < -99.0)",
    ),
    "Clip-Cov with a gradient on selected tokens": FormulaFault(
        METHOD.format("clip_cov"),
        "loss = torch.where(selected, torch.zeros_like(loss), loss)",
        "loss = loss * 1.0",
    ),
    "KL-Cov's penalty on all tokens": FormulaFault(
        METHOD.format("kl_cov"),
        "torch.where(selected, ppo_kl_coef * difference.abs(), torch.zeros_like(difference))",
        "ppo_kl_coef * difference.abs()",
    ),
    "KL-Cov of the smallest covariances": FormulaFault(
        METHOD.format("kl_cov"),
        "    return largest(covariance, token_draws(uid, loss_mask)",
        "    return largest(-covariance, token_draws(uid, loss_mask)",
    ),
    "a covariance without the mean of the advantages": FormulaFault(
        TOKEN_SELECTION,
        "under_mask(parts[0], loss_mask) *",
        "under_mask(advantages.double(), loss_mask) *",
    ),
    "a share that is rounded up": FormulaFault(
        TOKEN_SELECTION, "max(int(share * float(tokens)), 1)", "int(share * float(tokens)) + 1"
    ),
    "a group of one that gets nothing": FormulaFault(
        GROUPS, 'if rule.alone == "zero":', 'if rule.alone != "none":'
    ),
    "samples without a score in the baseline": FormulaFault(
        GROUPS,
        "under_mask(values.double(), self.valid))[self.group]",
        "values.double().nan_to_num())[self.group]",
    ),
    "rewards outside the mask in the score": FormulaFault(
        GROUPS,
        "under_mask(token_level_rewards.double(), response_mask).sum(dim=-1)",
        "token_level_rewards.double().nan_to_num(0.5).sum(dim=-1)",
    ),
    "a reward on the first token": FormulaFault(
        GROUPS,
        "(keep.flip(-1).cumsum(dim=-1).flip(-1) == 1)",
        "(keep.cumsum(dim=-1) == 1)",
    ),
    "leave-one-out that leaves nothing out": FormulaFault(
        GROUPS, "total = total - weights * near", "total = total - 0.0 * near"
    ),
    "OPO by the plain mean": FormulaFault(
        GROUPS, "weights = lengths.double()", "weights = (lengths > 0).double()"
    ),
    "holes that discount": FormulaFault(
        GAE,
        "torch.where(keep[:, t], values[:, t] + decay * running, running)",
        "torch.where(keep[:, t], values[:, t] + decay * running, decay * running)",
    ),
    "the value of the same token as the next one": FormulaFault(
        GAE, "        out[:, t] = following\n", "        out[:, t] = values[:, t]\n"
    ),
    "a truncated response with the value 0 after it": FormulaFault(
        GAE,
        "torch.where(truncated.bool(), last_value(values, mask), after_last)",
        "torch.where(truncated.bool(), after_last, after_last)",
    ),
    "turns whose value is that of each token": FormulaFault(
        GAE, "        mask = first_tokens(turn_index)\n", "        mask = tokens\n"
    ),
    "agents one after another": FormulaFault(
        METHOD.format("marft"),
        "order = (turns * length + places).argsort(dim=1)",
        "order = places.expand_as(turns).argsort(dim=1)",
    ),
    "Dr.GRPO that scales": FormulaFault(
        GROUPS,
        '        case "none":\n            return GroupRule()',
        '        case "none":\n            return GroupRule(scale="std")',
    ),
    "GPG without its alpha": FormulaFault(
        METHOD.format("gpg"), "num_samples / num_counted.clamp(min=1) * centred", "centred"
    ),
    "pass@k for all best samples": FormulaFault(
        METHOD.format("grpo_passk"), "(groups.sum(is_best) == 1)", "(groups.sum(is_best) >= 1)"
    ),
    "a turn's return without the discount": FormulaFault(
        METHOD.format("grpo_turns"),
        "returns[:, turn] += turn_discount *",
        "returns[:, turn] += 1.0 *",
    ),
    "REINFORCE++ whose returns are whitened": FormulaFault(
        METHOD.format("reinforce_plus_plus"),
        "    return masked_whiten(returns, mask, reduce), returns\n",
        "    returns = masked_whiten(returns, mask, reduce)\n    return returns, returns.clone()\n",
    ),
    "ReMax without its baseline": FormulaFault(
        METHOD.format("remax"), "returns - reward_baselines.double()[:, None]", "returns"
    ),
    "GDPO without the weights of a domain": FormulaFault(
        METHOD.format("gdpo"), "of_sample.get(name, 1.0)", "1.0 + 0.0 * of_sample.get(name, 1.0)"
    ),
    "GDPO over samples without a part": FormulaFault(
        METHOD.format("gdpo"),
        "[name in parts for parts in reward_parts]",
        "[True for parts in reward_parts]",
    ),
    "k3 of the reverse direction": FormulaFault(
        KL,
        "log_ratio = (-difference).clamp(max=20.0)",
        "log_ratio = difference.clamp(max=20.0)",
    ),
    "k2 without the half": FormulaFault(KL, "0.5 * difference.square()", "difference.square()"),
    "a plus without k2's gradient": FormulaFault(
        KL, "return surrogate - surrogate.detach() + value.detach()", "return value"
    ),
    "a controller without its clip": FormulaFault(
        KL, "error = min(max(kl / target_kl - 1.0, -0.2), 0.2)", "error = kl / target_kl - 1.0"
    ),
    "a mean KL over samples without a score": FormulaFault(
        KL, "response_mask * counted[:, None], reduce", "response_mask, reduce"
    ),
    "the weight of another level": FormulaFault(
        CORRECTION, 'if self.rollout_is == "geometric":', 'if self.rollout_is == "sequence":'
    ),
    "a band that only cuts above": FormulaFault(
        CORRECTION, "(raw <= upper) & (raw >= lower)", "raw <= upper"
    ),
    "weights before the threshold in the normalisation": FormulaFault(
        CORRECTION,
        "factor = float(masked_mean(*_draws(weights, loss_mask, level), reduce))",
        "factor = float(masked_mean(*_draws(raw, loss_mask, level), reduce))",
    ),
    "a ratio of the engine over the trainer": FormulaFault(
        CORRECTION, '"k1": -log_ratio', '"k1": log_ratio'
    ),
    "a mean of a sequence that is a sum": FormulaFault(
        CORRECTION,
        "total = total / inside.sum(dim=-1, keepdim=True)",
        "total = total * 1.0",
    ),
    "a proximal position of the version before": FormulaFault(
        CORRECTION, "return behind / (behind + 1.0)", "return behind / behind.clamp(min=1.0)"
    ),
    "keys and values of old weights that are no cause": FormulaFault(
        MISMATCH, "(versions != first) & keeps_kv", "(versions != first) & False"
    ),
    "running moments without the values of before": FormulaFault(
        NORMALIZATION,
        "self.squares + squares + apart**2",
        "self.squares + squares + 0.0 * apart**2",
    ),
    "a mean over the batch in place of the group": FormulaFault(
        NORMALIZATION,
        'if self.level == "group":\n            return self.groups.sum',
        'if self.level == "grp":\n            return self.groups.sum',
    ),
    "hard prompts that weigh less": FormulaFault(
        WEIGHTS, "(band[1] - band[0]) * (1.0 - share)", "(band[1] - band[0]) * share"
    ),
    "weights whose mean is not 1": FormulaFault(
        WEIGHTS, "return inside * (count / total) if total > 0", "return inside if total > 0"
    ),
    "a difficulty that counts samples without a score": FormulaFault(
        WEIGHTS,
        "groups.sum(accuracy.double()) / groups.size.clamp(min=1)",
        "groups.sum(accuracy.double()) / 4.0",
    ),
    "a value loss that takes the smaller": FormulaFault(
        OBJECTIVES,
        "return torch.maximum(plain, clipped), stats",
        "return torch.minimum(plain, clipped), stats",
    ),
    "a pair's loss of the wrong sign": FormulaFault(
        OBJECTIVES, "margins = chosen - rejected", "margins = rejected - chosen"
    ),
    "an action's log-prob that is a mean": FormulaFault(
        OBJECTIVES,
        'summed["advantages"] = summed["advantages"] / summed["loss_mask"].clamp(min=1)',
        'summed["log_probs"] = summed["log_probs"] / summed["loss_mask"].clamp(min=1)',
    ),
    "statistics over micro-batches instead of tokens": FormulaFault(
        OBJECTIVES, 'tokens = max(counts["tokens"], 1.0)\n', 'tokens = max(counts["rows"], 1.0)\n'
    ),
    "domains that share one loss": FormulaFault(
        OBJECTIVES,
        "fields = part._fields(micro, log_probs, mask * rows[:, None])",
        "fields = part._fields(micro, log_probs, mask)",
    ),
    "a shift of the reward after its scale": FormulaFault(
        NODES,
        "[:, None] + reward_shift\n    ) * reward_scale",
        "[:, None] * reward_scale\n    ) + reward_shift",
    ),
    "a controller that is told of one rank": FormulaFault(
        NODES, "num_samples = int(reduce.sum(float(len(valid))))", "num_samples = int(len(valid))"
    ),
    "a coefficient that moves within the step": FormulaFault(
        NODES, '"actor/kl_coef": coefficient}', '"actor/kl_coef": ctx.state["value"]}'
    ),
    "whitening that counts samples without a score": FormulaFault(
        NODES,
        "counted = (response_mask > 0) & valid.bool()[:, None]",
        "counted = response_mask > 0",
    ),
    "advantages normalised by whitening too": FormulaFault(
        NODES, 'derived["whiten"] = False', 'derived["whiten"] = True'
    ),
    "masked samples in the baselines": FormulaFault(
        NODES, "        in_baselines = valid & keep\n", "        in_baselines = valid\n"
    ),
    "a share of clipped rewards over all samples": FormulaFault(
        NODES, "_share(rewards.abs() > bound, valid)", "_share(rewards.abs() > bound, valid | True)"
    ),
    "SRPO's rewards with far failures first": FormulaFault(
        SRPO, "settings.steepness * (distance - 0.5)", "settings.steepness * (0.5 - distance)"
    ),
    "SRPO without the border points of a cluster": FormulaFault(
        SRPO,
        "np.flatnonzero(near[point] & (labels < 0)).tolist()",
        "np.flatnonzero(near[point] & (labels < 0) & is_core).tolist()",
    ),
    "SRPO's distances that are not scaled": FormulaFault(
        SRPO, "(each - low) / (high - low)", "(each - low)"
    ),
    "a penalty that begins at the limit": FormulaFault(
        ROUTER, "(length - (limit - self.buffer_tokens)) /", "(length - limit) /"
    ),
    "equal groups among those of one score": FormulaFault(
        METRICS, "if len(scores) > 1:", "if len(scores) > 0:"
    ),
    "a deviation over n − 1": FormulaFault(
        METRICS,
        "math.fsum(squares) / len(squares)",
        "math.fsum(squares) / max(len(squares) - 1, 1)",
    ),
    "a staleness of the wrong sign": FormulaFault(
        METRICS,
        "sum((step - version) * n for version, n in versions.items())",
        "sum((version - step) * n for version, n in versions.items())",
    ),
    "parts over all samples": FormulaFault(
        METRICS,
        "found[name] = math.fsum(values) / len(values)",
        "found[name] = math.fsum(values) / len(parts)",
    ),
    "mean@k over prompts": FormulaFault(
        VALIDATION,
        "sum(map(sum, groups)) / (n * len(groups))",
        "sum(map(sum, groups)) / len(groups)",
    ),
    "an advantage over all tokens": FormulaFault(
        SAMPLE_ROWS, "mask.sum(-1).clamp(min=1)).tolist()", "mask.shape[-1]).tolist()"
    ),
    "a schedule without its warm-up": FormulaFault(
        "training/optimizer.py", "        if step < warmup:\n", "        if step < 0:\n"
    ),
}


ALGORITHMS = "tests/algorithms"
SHAPED = "tests/pipelines/test_shaped_steps.py"
TESTS = {
    OBJECTIVES: [f"{ALGORITHMS}/test_objective_terms.py", f"{ALGORITHMS}/test_value_loss.py"],
    REDUCTIONS: [f"{ALGORITHMS}/test_aggregation.py", f"{ALGORITHMS}/test_losses.py"],
    CLIPPED: [f"{ALGORITHMS}/test_losses.py"],
    TOKEN_SELECTION: [f"{ALGORITHMS}/test_token_selection.py", f"{ALGORITHMS}/test_losses.py"],
    BEHAVIOUR_WEIGHTS: [f"{ALGORITHMS}/test_losses.py"],
    DIVERGENCE_BOUND: [f"{ALGORITHMS}/test_losses.py"],
    GROUPS: [f"{ALGORITHMS}/test_estimators.py", SHAPED],
    GAE: [f"{ALGORITHMS}/test_estimators.py"],
    NORMALIZATION: [f"{ALGORITHMS}/test_normalization.py"],
    FILTER: [f"{ALGORITHMS}/test_filters.py"],
    WEIGHTS: [f"{ALGORITHMS}/test_filters.py"],
    KL: [f"{ALGORITHMS}/test_kl.py"],
    CORRECTION: [f"{ALGORITHMS}/test_corrections.py"],
    MISMATCH: [f"{ALGORITHMS}/test_mismatch_check.py"],
    SRPO: ["tests/acting/test_srpo.py"],
    NODES: [SHAPED],
    ROUTER: [f"{ALGORITHMS}/test_filters.py", "tests/rewards/test_router.py"],
    METRICS: ["tests/runtime/test_step_formulas.py", "tests/runtime/test_step_metrics.py"],
    SAMPLE_ROWS: ["tests/runtime/test_step_formulas.py"],
    VALIDATION: ["tests/runtime/test_step_formulas.py"],
    "training/optimizer.py": ["tests/training/test_schedule.py"],
}
"""The default tests of a file."""


def tests_of(fault: FormulaFault) -> list[str]:
    if fault.file in TESTS:
        return TESTS[fault.file]
    tests = ["test_estimators.py", "test_losses.py", "test_token_selection.py"]  # of a method
    return [f"{ALGORITHMS}/{name}" for name in tests]
