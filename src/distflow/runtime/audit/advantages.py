"""Claim: advantages and returns are what the estimator's formula makes of the rewards of their own group."""

import torch
from torch import Tensor

from distflow.algorithms.registry import find_adv_est
from distflow.config.algorithm import AlgorithmConfig, is_on
from distflow.config.domain_algorithm import algorithms
from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.estimators import GLOBAL, expected_advantages
from distflow.runtime.audit.evidence import BUILTIN, Evidence, Sample, doubles, module_of
from distflow.runtime.audit.verdicts import functions_of

LIMIT = 1e-3
MOST_TOKENS = 2**20


def prove(evidence: Evidence) -> str | None:
    if not evidence.is_ours("advantages"):
        return "the estimator is the user's" if evidence.is_written("advantages") else ""
    if sum(len(sample["response_ids"]) for sample in evidence.samples) > MOST_TOKENS:
        return f"the step has more than {MOST_TOKENS:,} tokens"
    if any(update.metrics.get("skipped") and not update.metrics.get("empty") for update in evidence.updates):
        return "an update of the step was skipped: something in it is not finite"
    samples: dict[str | None, list[Sample]] = {domain: [] for domain, _ in algorithms(evidence.config)}
    for sample in evidence.samples:
        samples[sample["domain"] if sample["domain"] in samples else None].append(sample)
    why_not = [
        why
        for domain, settings in algorithms(evidence.config)
        if samples[domain] and (why := _prove(evidence, settings, samples[domain]))
    ]
    return why_not[0] if why_not else None


def _prove(evidence: Evidence, settings: AlgorithmConfig, samples: list[Sample]) -> str | None:
    """Of those that share the settings."""
    name = settings.adv_estimator
    if evidence.parts.num_ranks > 1 and (name in GLOBAL or settings.scale_rewards == "batch"):
        return f"'{name}' looks at the samples of all ranks"
    if evidence.partial and (name in GLOBAL or settings.scale_rewards == "batch"):
        return f"'{name}' looks at the whole step"
    if is_on(settings.adv_norm) or is_on(settings.reward_norm):
        return "the auditor has no formula of reward_norm and adv_norm"
    if settings.advantage_clip is not None or settings.difficulty_weight or settings.length_weight:
        return "the auditor has no formula of advantage_clip, difficulty_weight and length_weight"
    if module_of(find_adv_est(name).fn).partition(".")[0] + "." != BUILTIN:
        return "the estimator is the user's"
    weights = {"weight_of": lambda sample, part: functions_of(evidence, sample).get(part, 1.0)}
    options = {"f_norm": 1.0, **vars(settings), **settings.adv_estimator_kwargs, **weights}
    rows = expected_advantages(name, samples, options)
    if rows is None:
        return f"the auditor has no formula of '{name}'"
    for sample, (advantages, returns) in zip(samples, rows, strict=True):
        _same(name, sample, "advantages", torch.tensor(advantages, dtype=torch.float64))
        _same(name, sample, "returns", torch.tensor(returns, dtype=torch.float64))
    return None


def _same(name: str, sample: Sample, column: str, expected: Tensor) -> None:
    wrong = ~((doubles(sample[column]) - expected).abs() <= LIMIT * expected.abs().clamp(min=1.0))
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise Wrong(
            f"{column} of sample {sample['uid']} is {float(sample[column][token]):g} at token {token}, but '{name}' "
            f"gives {float(expected[token]):g} for the rewards of its own group ({int(sample['group_index'])})"
        )


CHECK = Check(
    "advantages",
    "advantages and returns are what the estimator's formula, worked out by brute force in float64, makes of the "
    "rewards of each sample's own group",
    "a built-in estimator",
    f"{LIMIT:g} relative",
    prove,
)
