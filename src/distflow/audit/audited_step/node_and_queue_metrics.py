"""Recomputes the metrics of nodes, checks and the sample queue from a step's columns in float64, by
rank; for those that are not recomputed, gives the reason."""

import math
import tomllib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from distflow.audit.audited_step.normalization_formulas import share_right
from distflow.audit.audited_step.policy_loss_formulas import importance_weights
from distflow.audit.check import Sample, doubles
from distflow.audit.recorded_step import RecordedStep, by_group_of
from distflow.config.keys.algorithm import AlgorithmConfig
from distflow.data.batch import Batch
from distflow.data.sample import LIMIT_REASONS

Part = tuple[str, Sequence[float], float | None]
"""A metric of one rank: its name, its value (or several between which rounding decides), and the
weight of its mean; None for a maximum."""
ROUNDING = 1e-6

NOT_RECOMPUTED = tomllib.loads(Path(__file__).with_name("not_recomputed.toml").read_text("utf-8"))
"""Patterns of metrics, and why they are not recomputed."""


def parts_of(recorded: RecordedStep) -> Iterator[Part]:
    """Recomputed metrics of this rank's samples."""
    yield from _mismatch(recorded)
    yield from _episodes(recorded)
    yield from _correction(recorded)
    for domain, algorithm, samples in (
        recorded.by_algorithm() if recorded.is_written("in_baselines") else ()
    ):
        yield from _left_out(algorithm, samples, f"/{domain}" if domain else "")


def _mismatch(recorded: RecordedStep) -> Iterator[Part]:
    batch = recorded.after or recorded.batch
    names = ("same_version", "older_version", "older_kv")
    own = _trainers(recorded, batch)
    if own is None:
        return
    inside = batch.flat("response_mask") > 0
    gap = _gap(batch, own)
    versions = batch.flat("versions")
    starts = torch.zeros(len(inside), dtype=torch.bool)
    lengths = batch.lengths("response")
    starts[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
    begins = inside & (starts | ~torch.cat([inside.new_zeros(1), inside[:-1]])[: len(inside)])
    first = (
        torch.where(begins, torch.arange(len(inside)), 0).cummax(0).values
        if len(inside)
        else inside.long()
    )
    keeps = recorded.config.actor_rollout_ref.rollout.kv_on_update == "keep"
    cause = torch.where(versions != recorded.step, 1, 0)
    cause = torch.where((versions != versions[first]) & keeps, 2, cause)
    counted = inside & gap.isfinite()
    total = int(counted.sum())
    for name, tokens in (
        ("", counted),
        *((f"{name}/", counted & (cause == i)) for i, name in enumerate(names)),
    ):
        own_gap = gap[tokens]
        number = float(tokens.sum())
        if number:
            ratio = own_gap.clamp(-20, 20)
            yield f"mismatch/{name}mean_abs", [float(own_gap.abs().mean())], number
            yield f"mismatch/{name}max_abs", [float(own_gap.abs().max())], None
            yield f"mismatch/{name}k3", [float((ratio.exp() - 1 - ratio).mean())], number
            if recorded.run.ranks.size == 1:
                yield f"mismatch/{name}ess", [_effective(ratio.exp())], number
                if name:
                    yield f"mismatch/{name}share", [number / total], number


def _trainers(recorded: RecordedStep, batch: Batch) -> str | None:
    """The column with the trainer's log-probs; None if it is not known here."""
    written = [
        name
        for name in ("trainer_log_probs", "prox_log_probs", "old_log_probs")
        if recorded.is_written(name)
    ]
    is_known = bool(written) and written[0] in batch and "rollout_log_probs" in batch
    return written[0] if is_known else None


def _gap(batch: Batch, own: str) -> Tensor:
    return doubles(batch.flat(own)) - doubles(batch.flat("rollout_log_probs"))


def _effective(weights: Tensor) -> float:
    """Kish's effective sample size, as a share of the samples."""
    squares = float(weights.square().sum()) * len(weights)
    return float(weights.sum()) ** 2 / squares if squares else 0.0


def _episodes(recorded: RecordedStep) -> Iterator[Part]:
    batch = recorded.batch
    number = float(len(recorded.batch))
    if (
        recorded.config.actor_rollout_ref.rollout.workflow is None
        or not number
        or "turn_index" not in batch
    ):
        return
    turns = [
        int(own.max()) + 1 if len(own) else 0
        for own in batch.flat("turn_index").split(batch.lengths("response").tolist())
    ]
    yield "episodes/turns", [sum(turns) / number], number
    yield "episodes/drawn_tokens", [float((batch.flat("versions") >= 0).sum()) / number], number
    yield "episodes/given_tokens", [float((batch.flat("versions") < 0).sum()) / number], number
    for reason in LIMIT_REASONS:
        yield f"episodes/ended/{reason}", [batch["finish_reason"].count(reason) / number], number
    if "forks" in batch:
        yield "episodes/branches", [sum(map(len, batch["forks"])) / number], number
    errors = batch["reward_errors"]
    rejected = [
        not valid and error is None
        for valid, error in zip(batch["valid"].tolist(), errors, strict=True)
    ]
    yield "episodes/rejected", [sum(rejected) / number], number


def _left_out(algorithm: AlgorithmConfig, samples: Sequence[Sample], end: str) -> Iterator[Part]:
    scored = [sample for sample in samples if sample["valid"]]
    groups = {number: share_right(group) for number, group in by_group_of(samples).items()}
    longest = algorithm.mask_long_errors
    band = algorithm.difficulty_mask
    counts = {"truncated": 0, "max_turns": 0, "long_errors": 0, "difficulty": 0}
    for sample in scored:
        length = int((sample["response_mask"] > 0).sum())
        share = groups[int(sample["group_index"])]
        counts["truncated"] += bool(sample["truncated"]) and algorithm.mask_truncated
        counts["max_turns"] += sample["finish_reason"] == "max_turns" and algorithm.mask_max_turns
        counts["long_errors"] += (
            longest is not None and length >= longest and float(sample["acc"]) < 1 - ROUNDING
        )
        counts["difficulty"] += band is not None and not band[0] < share < band[1]
    number = float(len(scored))
    yield from (
        (f"sample_mask/{name}{end}", [count / max(number, 1)], number)
        for name, count in counts.items()
    )


def _over_rows(recorded: RecordedStep, values: Tensor) -> Tensor:
    """The sum of each sample's tokens."""
    return torch.zeros(len(recorded.batch), dtype=torch.float64).index_add(
        0, recorded.batch.rows(), values.double()
    )


def _counted(recorded: RecordedStep) -> Tensor:
    """Tokens under the loss mask before anything was rejected or masked."""
    return (recorded.batch.flat("response_mask") > 0) & recorded.batch["valid"].bool()[
        recorded.batch.rows()
    ]


def _correction(recorded: RecordedStep) -> Iterator[Part]:
    settings = recorded.config.algorithm.rollout_correction
    own = _trainers(recorded, recorded.batch)
    is_known = "rollout_is_weights" in recorded.batch and recorded.is_ours("rollout_is_weights")
    if own is None or not is_known or own == "trainer_log_probs" or recorded.run.ranks.size > 1:
        return
    counted = _counted(recorded)
    level = settings.rollout_is or "token"
    rows = recorded.batch.rows()
    gap = _gap(recorded.batch, own).where(counted, 0.0)
    tokens = _over_rows(recorded, counted)
    if level != "token":
        sums = _over_rows(recorded, gap) / (tokens.clamp(min=1) if level == "geometric" else 1)
        gap = sums[rows]
    raw = gap.clamp(-20, 20).exp()[counted]
    number = float(counted.sum())
    if not number:
        return
    bounds = settings.rollout_is_threshold if settings.rollout_is else 2.0
    yield "rollout_corr/rollout_is_mean", [float(raw.mean())], number
    yield "rollout_corr/rollout_is_max", [float(raw.max())], None
    scales = (1 - ROUNDING, 1.0, 1 + ROUNDING)
    near = [
        (s * bounds[0], s * bounds[1]) if isinstance(bounds, tuple) else s * bounds for s in scales
    ]
    weights = [importance_weights(gap, each) for each in near]
    pairs = zip(weights, near, strict=True)
    changed = [
        float((own[counted] - raw).abs().gt(2 * ROUNDING * raw).double().mean()) for own, _ in pairs
    ]
    yield "rollout_corr/rollout_is_corrected_frac", changed, number
    drawn = [each[counted] for each in weights]  # one draw per token, or per sequence
    if level != "token":
        drawn = [(_over_rows(recorded, each * counted) / tokens)[tokens > 0] for each in weights]
    yield "rollout_corr/rollout_is_eff_sample_size", [*map(_effective, drawn)], number
    if settings.rollout_is_batch_normalize:
        means = [float(each.mean()) for each in drawn]
        yield (
            "rollout_corr/rollout_is_batch_norm_factor",
            [each if each > 1e-8 else 1.0 for each in means],
            number,
        )


def between(found: float, values: Sequence[float]) -> float:
    """The value nearest to `found`."""
    return min(values, key=lambda value: abs(value - found))


def merged(
    ranks: Sequence[dict[str, tuple[Sequence[float], float | None]]],
) -> Iterator[tuple[str, list[float]]]:
    """Over all ranks: weighted means of every combination, or maxima."""
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [rank[name] for rank in ranks if name in rank]
        if any(weight is None for _, weight in parts):
            yield name, [max(value for values, _ in parts for value in values)]
            continue
        total = math.fsum(weight or 0.0 for _, weight in parts)
        combined = (
            product(*(values for values, _ in parts))
            if len(parts) <= 2
            else [[v[0] for v, _ in parts]]
        )
        yield (
            name,
            [
                math.fsum(
                    value * (weight or 0.0) for value, (_, weight) in zip(each, parts, strict=True)
                )
                / total
                if total
                else 0.0
                for each in combined
            ],
        )
