"""Claim: correction weights are the trainer's probability over the engine's, capped as the config says."""

import torch

from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence, doubles

LIMIT = 1e-3


def prove(evidence: Evidence) -> str | None:
    settings = evidence.config.algorithm.rollout_correction
    if "rollout_is_weights" not in evidence.batch:
        return ""
    if not evidence.is_ours("rollout_is_weights"):
        return "a node of the user's writes the weights"
    if settings.rollout_is_batch_normalize:
        return "the auditor has no formula of weights that are divided by their mean"
    own = "prox_log_probs" if "prox_log_probs" in evidence.batch else "old_log_probs"
    level, floor = settings.level or "token", settings.floor or 0.0
    for sample in evidence.samples:
        counted = sample["response_mask"].double() * float(sample["valid"])
        gap = (doubles(sample[own]) - doubles(sample["rollout_log_probs"])) * counted
        if level != "token":
            gap = torch.full_like(
                gap, float(gap.sum()) / (float(counted.sum()) or 1.0 if level == "geometric" else 1.0)
            )
        raw = gap.clamp(-20, 20).exp()
        kept = torch.where((raw > settings.cap) | (raw < floor), 0.0, raw)
        expected = (kept if settings.level and settings.mode == "mask" else raw.clamp(max=settings.cap)) * counted
        # At a bound of the band rounding decides.
        near = ((raw - settings.cap).abs() < LIMIT) | ((raw - floor).abs() < LIMIT)
        wrong = ((doubles(sample["rollout_is_weights"]) - expected).abs() > LIMIT * raw) & ~near
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise Wrong(
                f"the correction weight of sample {sample['uid']} is {float(sample['rollout_is_weights'][token]):g} at "
                f"token {token}, but the trainer's over the engine's probability, by {level} and with its cap, is "
                f"{float(expected[token]):g}"
            )
    return None


CHECK = Check(
    "correction",
    "importance weights are the trainer's probability over the engine's, of the token, the sequence or its geometric "
    "mean, truncated or masked as the config says",
    "weights that are not divided by their mean",
    f"{LIMIT:g} relative",
    prove,
)
