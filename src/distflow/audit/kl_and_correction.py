"""Checks: the coefficient of the KL in the reward follows the config or the controller's rule; correction weights are
the trainer's probability over the engine's, capped by the config."""

import torch
from torch import Tensor

from distflow.audit.recorded_data import Check, RecordedStep, Wrong, doubles
from distflow.audit.reward_sum import kl

KL_LIMIT = 1e-4
CORRECTION_LIMIT = 1e-3


def audit_kl_control(recorded: RecordedStep) -> str | None:
    control = recorded.config.algorithm.kl_ctrl
    if not recorded.config.algorithm.use_kl_in_reward or not recorded.is_written("token_level_rewards"):
        return ""
    if recorded.config.algorithm.domains:
        return "the auditor has no formula for coefficients by domain"
    _same_mean(recorded)
    found = recorded.metrics.get("actor/kl_coef")
    if found is None:
        return "the pipeline does not report its coefficient"
    before = recorded.state.get("kl_control")
    if control.type == "fixed" or (before is None and recorded.step == 0):
        expected = control.kl_coef
    elif before is None or before["step"] != recorded.step - 1:
        return "the previous step was not recorded"
    else:
        assert control.target_kl is not None and control.horizon is not None, "the config's rules ensure it"
        error = min(max(before["kl"] / control.target_kl - 1.0, -0.2), 0.2)
        expected = max(before["coefficient"] * (1.0 + error * before["samples"] / control.horizon), 0.0)
    if not abs(found - expected) <= KL_LIMIT * max(abs(expected), 1e-12):
        raise Wrong(
            f"the KL in the reward has the coefficient {found:.6g}, but it should be {expected:.6g} in this step"
        )
    return None


def _same_mean(recorded: RecordedStep) -> None:
    """The controller's input is the mean KL over the tokens of valid samples, or the mean of samples' means."""
    if recorded.parts.num_ranks > 1 or not recorded.is_ours("token_level_rewards"):
        return
    settings, of_samples = recorded.config.algorithm, list[Tensor]()
    for sample in recorded.samples:
        counted = (sample["response_mask"] > 0) & bool(sample["valid"])
        difference = doubles(sample["old_log_probs"]) - doubles(sample["ref_log_prob"])
        of_samples.append(kl(difference, settings.kl_penalty)[counted])
    tokens = torch.cat(of_samples)
    means = torch.stack(
        [values.mean() if len(values) else torch.zeros((), dtype=torch.float64) for values in of_samples]
    )
    expected = float(means.mean() if settings.kl_ctrl.mean == "sequence" else tokens.mean() if len(tokens) else 0.0)
    found = recorded.metrics.get("actor/reward_kl_penalty")
    if found is not None and not abs(found - expected) <= 1e-3 * abs(expected) + 1e-6:
        raise Wrong(f"the controller was given a KL of {found:.6g}, but the KL of the step's tokens is {expected:.6g}")


KL_CONTROL = Check(
    "kl_control",
    "the coefficient of the KL in the reward is the config's, or the adaptive controller's update from the last step's "
    "KL (arXiv:1909.08593)",
    "a pipeline with the KL in the reward, and the previous step in this process or its checkpoint",
    f"{KL_LIMIT:g} relative",
    audit_kl_control,
)


def audit_correction(recorded: RecordedStep) -> str | None:
    settings = recorded.config.algorithm.rollout_correction
    if "rollout_is_weights" not in recorded.batch:
        return ""
    if not recorded.is_ours("rollout_is_weights"):
        return "a user's node writes the weights"
    if settings.rollout_is_batch_normalize:
        return "the auditor has no formula for weights that are divided by their mean"
    own = "prox_log_probs" if "prox_log_probs" in recorded.batch else "old_log_probs"
    level, threshold = settings.rollout_is or "token", settings.rollout_is_threshold
    lower, upper = threshold if isinstance(threshold, tuple) else (0.0, threshold)
    for sample in recorded.samples:
        counted = sample["response_mask"].double() * float(sample["valid"])
        gap = (doubles(sample[own]) - doubles(sample["rollout_log_probs"])) * counted
        if level != "token":
            gap = torch.full_like(
                gap, float(gap.sum()) / (float(counted.sum()) or 1.0 if level == "geometric" else 1.0)
            )
        raw = gap.clamp(-20, 20).exp()
        inside = torch.where((raw > upper) | (raw < lower), 0.0, raw)
        expected = (inside if isinstance(threshold, tuple) else raw.clamp(max=upper)) * counted
        # At a bound of the band the result depends on rounding.
        near = ((raw - upper).abs() < CORRECTION_LIMIT) | ((raw - lower).abs() < CORRECTION_LIMIT)
        wrong = ((doubles(sample["rollout_is_weights"]) - expected).abs() > CORRECTION_LIMIT * raw) & ~near
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise Wrong(
                f"the correction weight of sample {sample['uid']} is {float(sample['rollout_is_weights'][token]):g} at "
                f"token {token}, but the trainer's over the engine's probability, by {level} and with its threshold, "
                f"is {float(expected[token]):g}"
            )
    return None


CORRECTION = Check(
    "correction",
    "importance weights are the trainer's probability over the engine's, of the token, the sequence or its geometric "
    "mean, truncated or masked as the config says",
    "weights that are not divided by their mean",
    f"{CORRECTION_LIMIT:g} relative",
    audit_correction,
)
