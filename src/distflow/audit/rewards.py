"""Checks: the score is the weighted sum of its parts, on the sample's last token; the reward is the score minus the KL,
with the coefficient of the config or of the adaptive controller."""

import math

import torch
from torch import Tensor

from distflow.audit.recorded_data import NOT_APPLICABLE, RecordedStep, Sample, Wrong, check, check_close, doubles
from distflow.audit.reward_functions import functions_of
from distflow.config.derived_settings import algorithm_of, algorithms
from distflow.config.keys.algorithm import AlgorithmConfig, is_on
from distflow.config.keys.reward import on_error_of
from distflow.config.per_domain import response_limit
from distflow.rewards.score import Score

LIMIT = 1e-4


@check(
    "rewards",
    "a sample's score is the weighted sum of its own scores and the over-long penalty, on its last token; its rewards "
    "are the score minus the KL penalty",
    needs="scores of the built-in reward node",
    limit=f"{LIMIT:g} relative",
)
def audit_rewards(recorded: RecordedStep) -> str | None:
    if not recorded.is_ours("scores"):
        return "a user's node writes the scores" if recorded.is_written("scores") else NOT_APPLICABLE
    for sample in recorded.samples:
        if not bool(sample["valid"]):
            continue
        total = _total(recorded, sample)
        expected = torch.zeros(len(sample["response_ids"]), dtype=torch.float64)
        policy = (sample["response_mask"] > 0).nonzero()
        if len(policy):
            expected[int(policy[-1])] = total
        reason = f", by its scores {dict(sample['reward_parts'])}"
        check_close(sample, "token_level_scores", expected, LIMIT, reason)
        _same_baseline(recorded, sample)
        if _processes(algorithm_of(recorded.config, sample["domain"])):
            continue  # the auditor has no formula for it
        if recorded.is_ours("token_level_rewards"):
            expected = expected - _kl_penalty(recorded, sample)
        if recorded.is_ours("token_level_rewards") or not recorded.is_written("token_level_rewards"):
            check_close(sample, "token_level_rewards", expected, LIMIT, reason)
    if any(_processes(algorithm) for _, algorithm in algorithms(recorded.config)):
        return "the auditor has no formula for reward_norm, reward_shift, reward_scale, reward_clip and whiten_rewards"
    return None


@check(
    "kl_control",
    "the coefficient of the KL in the reward is the config's, or the adaptive controller's update from the last step's "
    "KL (arXiv:1909.08593)",
    needs="a pipeline with the KL in the reward, and the previous step in this process or its checkpoint",
    limit=f"{LIMIT:g} relative",
)
def audit_kl_control(recorded: RecordedStep) -> str | None:
    control = recorded.config.algorithm.kl_ctrl
    if not recorded.config.algorithm.use_kl_in_reward or not recorded.is_written("token_level_rewards"):
        return NOT_APPLICABLE
    if recorded.config.algorithm.domains:
        return "the auditor has no formula for coefficients by domain"
    _same_mean(recorded)
    found = recorded.metrics.get("actor/kl_coef")
    if found is None:
        return "the pipeline does not report its coefficient"
    before = recorded.run.state.get("kl_control")
    if control.type == "fixed" or (before is None and recorded.step == 0):
        expected = control.kl_coef
    elif before is None or before["step"] != recorded.step - 1:
        return "the previous step was not recorded"
    else:
        assert control.target_kl is not None and control.horizon is not None, "the config's rules ensure it"
        error = min(max(before["kl"] / control.target_kl - 1.0, -0.2), 0.2)
        expected = max(before["coefficient"] * (1.0 + error * before["samples"] / control.horizon), 0.0)
    if not abs(found - expected) <= LIMIT * max(abs(expected), 1e-12):
        raise Wrong(f"the KL in the reward has the coefficient {found:.6g}, but should have {expected:.6g}")
    return None


def kl(difference: Tensor, kind: str) -> Tensor:
    """Estimates of the KL by d = log π − log π_ref (Schulman's k1, k2, k3), `|d|`. A trailing + changes the gradient
    only, which is left to the caller."""
    match kind.removesuffix("+"):
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return difference**2 / 2
        case "low_var_kl" | "k3":
            bounded = difference.clamp(-20.0, 20.0)
            return ((-bounded).exp() + bounded - 1.0).clamp(-10.0, 10.0)
    raise ValueError(f"no formula for the KL estimate '{kind}'")


def _total(recorded: RecordedStep, sample: Sample) -> float:
    """The weighted sum of the sample's scores, or the score that reward.on_error gives in their place."""
    if sample["reward_errors"] is not None:
        fallback = on_error_of(recorded.config.reward, sample["domain"])
        if not isinstance(fallback, float):
            raise Wrong(f"sample {sample['uid']} has a score in spite of reward errors: {sample['reward_errors']}")
        return fallback
    weights, parts = functions_of(recorded, sample), sample["reward_parts"]
    total = sum(parts.get(name, math.nan) * weight for name, weight in weights.items())
    return total + _overlong(recorded, sample["domain"], len(sample["response_ids"]))


def _processes(algorithm: AlgorithmConfig) -> bool:
    moved = algorithm.reward_shift != 0 or algorithm.reward_scale != 1 or algorithm.reward_clip is not None
    return moved or is_on(algorithm.reward_norm) or algorithm.whiten_rewards


def _same_baseline(recorded: RecordedStep, sample: Sample) -> None:
    """ReMax's baseline is the score of the group's one greedy response, by the reward functions."""
    record = recorded.record_of(sample)
    if "reward_baselines" not in sample or record is None or not recorded.is_ours("reward_baselines"):
        return
    if algorithm_of(recorded.config, sample["domain"]).adv_estimator != "remax":
        return
    group = f"group {record.prompt_group.group_id}"
    found = [(request, result.generations[0]) for request, result in record.generated if request.params.greedy]
    if len(found) != 1:
        raise Wrong(f"{group} has {len(found)} greedy responses, but its baseline needs one")
    request, response = found[0]
    if request.params.max_tokens != response_limit(recorded.config, sample["domain"]):
        raise Wrong(f"the greedy response of {group} may have {request.params.max_tokens} tokens")
    text = str(recorded.run.resources.tokenizer.decode(list(response.token_ids), skip_special_tokens=True))
    total = _overlong(recorded, sample["domain"], len(response.token_ids))
    for name, weight in functions_of(recorded, sample).items():
        results = [r for called, arguments, r in record.scored if called == name and arguments["solution_str"] == text]
        if not results or not isinstance(results[-1], Score):
            raise Wrong(f"the greedy response of {group} has no score of '{name}' for its baseline")
        total += weight * results[-1].value
    if not abs(float(sample["reward_baselines"]) - total) <= LIMIT * max(abs(total), 1.0):
        raise Wrong(
            f"the baseline of sample {sample['uid']} is {float(sample['reward_baselines']):g}, its greedy response's "
            f"score {total:g}"
        )


def _overlong(recorded: RecordedStep, domain: str, length: int) -> float:
    """0 until the zone before the limit, falling to −factor at the limit (DAPO, arXiv:2503.14476)."""
    zone = recorded.config.reward.overlong
    if zone.buffer_tokens <= 0:
        return 0.0
    inside = length - (response_limit(recorded.config, domain) - zone.buffer_tokens)
    return -zone.factor * min(max(inside / zone.buffer_tokens, 0.0), 1.0)


def _kl_penalty(recorded: RecordedStep, sample: Sample) -> Tensor:
    domain = sample["domain"]
    algorithm, is_own = algorithm_of(recorded.config, domain), domain in recorded.config.algorithm.domains
    if not algorithm.use_kl_in_reward:
        return torch.zeros(len(sample["response_mask"]), dtype=torch.float64)
    coefficient = recorded.metrics.get(f"actor/kl_coef/{domain}" if is_own else "actor/kl_coef", 0.0)
    if algorithm.kl_ctrl.type == "fixed":
        coefficient = algorithm.kl_ctrl.kl_coef
    difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
    penalty = coefficient * kl(difference, algorithm.kl_penalty)
    return torch.where(sample["response_mask"] > 0, penalty, 0.0)


def _same_mean(recorded: RecordedStep) -> None:
    """The controller's input is the mean KL over the tokens of valid samples, or the mean of samples' means."""
    if recorded.run.num_ranks > 1 or not recorded.is_ours("token_level_rewards"):
        return
    settings, of_samples = recorded.config.algorithm, list[Tensor]()
    for sample in recorded.samples:
        counted = (sample["response_mask"] > 0) & bool(sample["valid"])
        difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
        of_samples.append(kl(difference, settings.kl_penalty)[counted])
    if settings.kl_ctrl.mean == "sequence":
        expected = float(torch.stack([values.sum() / max(len(values), 1) for values in of_samples]).mean())
    else:
        tokens = torch.cat(of_samples)
        expected = float(tokens.sum() / max(len(tokens), 1))
    found = recorded.metrics.get("actor/reward_kl_penalty")
    if found is not None and not abs(found - expected) <= 1e-3 * abs(expected) + 1e-6:
        raise Wrong(f"the controller was given a KL of {found:.6g}, but the KL of the step's tokens is {expected:.6g}")
