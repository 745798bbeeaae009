"""From the scores of a step to its advantages, by the keys of `algorithm`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.references import kl, rewards, sample_weights
from tests.references.advantages import REFERENCES
from tests.references.group_advantages import whitened_rows
from tests.references.normalization import Value, normalise
from tests.references.samples import Rows, Sample

NEEDS_OTHERS = {"grpo": 2, "reinforce": 0, "reinforce_plus_plus": 0, "gae": 0}
"""How many samples of a group an estimator compares."""


@dataclass(frozen=True)
class Scored:
    """A response by the policy's tokens, whether it has a score or not."""

    sample: Sample
    """Its rewards are the scores of the tokens."""
    response: sample_weights.Response
    is_valid: bool
    old_log_probs: list[float]
    ref_log_probs: list[float]


@dataclass
class State:
    """What goes on from step to step."""

    so_far: list[float] = field(default_factory=list)
    """The shaped scores of all steps."""
    coefficient: float | None = None
    """Of the KL in the reward."""


@dataclass
class Shaped:
    """What a step comes to. Rows are of all responses; those of responses that are in no baseline
    have no meaning but in `advantages`, where they are 0."""

    kept: list[bool]
    """Whether a response stays in the loss; that it has a score is not asked here."""
    rewards: Rows
    advantages: Rows
    returns: Rows
    metrics: dict[str, float]


def shape_step(step: Sequence[Scored], keys: Mapping[str, Any], state: State) -> Shaped:
    """keys: of `algorithm`, those that differ from the defaults."""
    metrics = dict[str, float]()
    kept, in_baselines = masked(step, keys, metrics)

    # only what is in a baseline is a sample from here on
    places = [place for place, counts in enumerate(in_baselines) if counts]
    samples = [step[place].sample for place in places]

    of_rewards = shaped_rewards(samples, keys, state, metrics)
    of_rewards = less_kl(
        [step[place] for place in places], of_rewards, len(step), keys, state, metrics
    )
    if keys.get("whiten_rewards"):
        of_rewards = whitened_rows(of_rewards)

    with_rewards = []
    for sample, own in zip(samples, of_rewards, strict=True):
        with_rewards.append(replace(sample, rewards=own))
    options = dict(keys.get("options", {}))
    norm = keys.get("adv_norm")
    if norm is not None and keys["adv_estimator"] == "gae":
        options["whiten"] = False
    advantages, returns = REFERENCES[keys["adv_estimator"]](with_rewards, **options)
    responses = [step[place].response for place in places]
    advantages = finished(with_rewards, responses, advantages, keys, metrics)
    num_tokens = sum(len(each.old_log_probs) for each in step)
    if "advantage_clip/clipped" in metrics:
        metrics["advantage_clip/clipped"] /= max(num_tokens, 1)
    return Shaped(
        kept,
        spread(step, places, of_rewards),
        spread(step, places, advantages),
        spread(step, places, returns),
        metrics,
    )


def spread(step: Sequence[Scored], places: Sequence[int], rows: Rows) -> Rows:
    """The rows at these places, zeros at the others."""
    found = [[0.0] * len(each.old_log_probs) for each in step]
    for place, row in zip(places, rows, strict=True):
        found[place] = row
    return found


def masked(
    step: Sequence[Scored], keys: Mapping[str, Any], metrics: dict[str, float]
) -> tuple[list[bool], list[bool]]:
    """(stays in the loss, is in the baselines)."""
    names = ("mask_truncated", "mask_max_turns", "mask_long_errors", "difficulty_mask")
    masks = {name: keys[name] for name in names if keys.get(name)}
    valid = [each.is_valid for each in step]
    if not masks:
        return [True] * len(step), valid

    responses = [each.response for each in step if each.is_valid]
    reasons = []
    for each in step:
        known = responses if each.is_valid else [*responses, each.response]
        reasons.append(sample_weights.masked_for(each.response, known, **masks))

    kept = [not own for own in reasons]
    named = {"truncated", "max_turns", "long_errors", "difficulty"}
    if keys.get("mask_type") == "all":
        named.add("alone")
        needed = NEEDS_OTHERS[keys["adv_estimator"]]
        left = [k and v for k, v in zip(kept, valid, strict=True)]

        for place, each in enumerate(step):
            num_left = count_group(step, each, left)
            is_lonely = num_left < needed and num_left < count_group(step, each, valid)
            if kept[place] and is_lonely:
                reasons[place].add("alone")

        kept = [not own for own in reasons]

    for name in named:
        hit = sum(v and name in own for v, own in zip(valid, reasons, strict=True))
        metrics[f"sample_mask/{name}"] = hit / max(sum(valid), 1)

    if keys.get("mask_type") == "all":
        return kept, [k and v for k, v in zip(kept, valid, strict=True)]
    return kept, valid


def count_group(step: Sequence[Scored], own: Scored, counts: Sequence[bool]) -> int:
    """Responses of its group that count."""
    number = 0
    for other, is_in in zip(step, counts, strict=True):
        number += is_in and other.sample.group == own.sample.group
    return number


def count_peers(own: Sample, samples: Sequence[Sample]) -> int:
    return sum(other.group == own.group for other in samples)


def on_last(value: float, length: int) -> list[float]:
    """A reward of a sample is on its last token."""
    return [0.0] * (length - 1) + [value] if length else []


def shaped_rewards(
    samples: Sequence[Sample], keys: Mapping[str, Any], state: State, metrics: dict[str, float]
) -> Rows:
    """Shifted, scaled, normalised and clipped."""
    shift, scale = keys.get("reward_shift", 0.0), keys.get("reward_scale", 1.0)
    norm = keys.get("reward_norm")
    bound = keys.get("reward_clip")

    rows = [sample.rewards for sample in samples]
    if norm is not None or shift != 0.0 or scale != 1.0:
        scores = [rewards.shaped(sample.score, shift, scale) for sample in samples]
        values = []
        for sample, score in zip(samples, scores, strict=True):
            values.append(Value(score, sample.group, count_peers(sample, samples)))
        state.so_far += scores
        numbers = normalise(values, state.so_far, **(norm or {}))
        pairs = zip(numbers, samples, strict=True)
        rows = [on_last(number, len(sample.rewards)) for number, sample in pairs]

    if bound is not None:
        totals = [math.fsum(row) for row in rows]
        beyond = sum(abs(total) > bound for total in totals)
        metrics["reward_clip/clipped"] = beyond / max(len(totals), 1)
        pairs = zip(totals, rows, strict=True)
        rows = [on_last(min(max(total, -bound), bound), len(row)) for total, row in pairs]

    return rows


def less_kl(
    step: Sequence[Scored],
    rows: Rows,
    num_samples: int,
    keys: Mapping[str, Any],
    state: State,
    metrics: dict[str, float],
) -> Rows:
    """Minus the KL times a coefficient, which the controller changes for the next step.
    num_samples: all, with those without a score."""
    control = keys.get("kl_ctrl")
    if control is None:
        return rows

    coefficient = control["kl_coef"] if state.coefficient is None else state.coefficient
    penalties = []
    for each in step:
        log_probs = torch.tensor(each.old_log_probs, dtype=torch.float64)
        ref = torch.tensor(each.ref_log_probs, dtype=torch.float64)
        penalties.append(kl.kl(log_probs, ref, keys["kl_penalty"]).tolist())

    mean = kl.mean_kl(penalties, control.get("mean", "token"))
    metrics["actor/reward_kl_penalty"] = mean
    metrics["actor/kl_coef"] = coefficient
    state.coefficient = coefficient

    if control["type"] == "adaptive":
        state.coefficient = kl.next_coefficient(
            coefficient, mean, num_samples, control["target_kl"], control["horizon"]
        )

    found = []
    for row, penalty in zip(rows, penalties, strict=True):
        found.append([reward - coefficient * p for reward, p in zip(row, penalty, strict=True)])
    return found


def finished(
    samples: Sequence[Sample],
    responses: Sequence[sample_weights.Response],
    advantages: Rows,
    keys: Mapping[str, Any],
    metrics: dict[str, float],
) -> Rows:
    """Normalised, clipped and weighted by sample. The metric of the clip is a number here."""
    if (norm := keys.get("adv_norm")) is not None:
        values = []
        for row, own in enumerate(advantages):
            size = count_peers(samples[row], samples)
            values += [Value(number, samples[row].group, size) for number in own]
        left = iter(normalise(values, **norm))
        advantages = [[next(left) for _ in own] for own in advantages]

    if (bound := keys.get("advantage_clip")) is not None:
        metrics["advantage_clip/clipped"] = sum(abs(a) > bound for own in advantages for a in own)
        advantages = [[min(max(a, -bound), bound) for a in own] for own in advantages]

    bands = keys.get("difficulty_weight"), keys.get("length_weight")
    if bands == (None, None):
        return advantages

    weights = sample_weights.weigh(responses, *bands)

    return [[w * a for a in own] for w, own in zip(weights, advantages, strict=True)]
