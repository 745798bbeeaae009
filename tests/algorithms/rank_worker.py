"""One gloo rank: the gradient of every objective over unequal shares, against the undivided
mini-batch.

Four of them form groups of 1, 2 and 4 ranks.
"""

import json
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.algorithms.kl import apply_kl_penalty
from distflow.algorithms.masked_reductions import LOSS_AGG_MODES, Reduce
from distflow.algorithms.normalization_filters_and_weights import (
    Moments,
    Normalization,
    length_weights,
    with_mean_one,
)
from distflow.algorithms.objectives import PolicyObjective, ValueObjective
from distflow.algorithms.registry import find_adv_est, find_policy_loss
from distflow.algorithms.rollout_correction import (
    Correction,
    Level,
    compute_rejection_mask,
    compute_rollout_weights,
    mismatch_statistics,
)
from distflow.builtin_names import POLICY_LOSSES
from distflow.cluster.process_groups import TorchCollective
from distflow.data.batch import Batch
from tests.algorithms.toy_policy import LONGEST, gradient, toy_batch

ROWS = 13
LEVELS_OF_STD = ("running", "batch", None)
# Rows of each rank: unequal, none for one of them.
SHARES = {
    1: [list(range(ROWS))],
    2: [[0, 1], list(range(2, ROWS))],
    4: [[0, 4, 9, 12, 2, 7], [3, 6], [], [1, 5, 8, 10, 11]],
}
# Groups are whole in every share.
GROUPS = [0, 1, 2, 3, 2, 4, 3, 2, 4, 2, 4, 4, 2]


DOMAINS = ("vanilla", "gspo", "gmpo", "sapo")
"""Each is trained with the loss of its name."""


def objectives() -> dict[str, PolicyObjective | ValueObjective]:
    """Every loss in every mode."""
    built: dict[str, PolicyObjective | ValueObjective] = {}
    for mode in LOSS_AGG_MODES:
        scale = float(LONGEST) if mode == "seq-mean-token-sum-norm" else None
        for name in sorted(POLICY_LOSSES):
            built[f"{name} {mode}"] = PolicyObjective(
                name,
                loss_agg_mode=mode,
                loss_scale_factor=scale,
                entropy_coef=0.01,
                kl_loss_type="low_var_kl",
                kl_loss_coef=0.1,
                weights_field="rollout_is_weights" if name == "vanilla" else None,
                off_policy_mask_threshold=0.1 if name == "gspo" else None,
            )
        domains = {
            each: PolicyObjective(each, loss_agg_mode=mode, loss_scale_factor=scale)
            for each in DOMAINS[1:]
        }
        built[f"domains {mode}"] = PolicyObjective(
            loss_agg_mode=mode, loss_scale_factor=scale, domains=domains
        )
        built[f"value {mode}"] = ValueObjective(0.3, mode, scale)
    return built


def compare_losses(ranks: TorchCollective, batch: Batch, mine: Batch) -> dict[str, float]:
    """The largest relative deviation of gradient or metric, by objective."""
    deviations = {}
    for name, objective in objectives().items():
        counts = ranks.sum(objective.counts(mine))
        parts = [mine.select(part) for part in torch.arange(len(mine)).split(2)] or [mine]
        grad, sums = gradient(objective, parts, counts)
        grad = ranks.sum(grad)
        metrics = objective.finish(ranks.sum(sums), counts)
        whole = objective.counts(batch)
        wanted, wanted_sums = gradient(objective, [batch], whole)
        wanted_metrics = objective.finish(wanted_sums, whole)
        assert (
            counts == whole
            and metrics.keys() == wanted_metrics.keys()
            and wanted.abs().max() > 1e-3
        )
        worst = float((grad - wanted).abs().max() / wanted.abs().max())
        deviations[name] = max(worst, *(abs(metrics[k] - wanted_metrics[k]) for k in metrics))
    return deviations


def over_the_batch() -> dict[str, Callable[[Batch, Reduce | None], Tensor]]:
    """What whitens, scales or counts over the global batch: `(bs, response_length)`, or one
    number."""
    estimators: dict[str, tuple[str, dict[str, Any]]] = {
        **{
            name: (name, {})
            for name in (
                "gae",
                "reinforce_plus_plus",
                "reinforce_plus_plus_baseline",
                "gpg",
                "gdpo",
            )
        },
        "gpg by rewards": ("gpg", {"alpha_counts": "rewards"}),
        "gdpo over samples": ("gdpo", {"whiten_over": "samples"}),
        "grpo by the batch": ("grpo", {"scale_rewards": "batch"}),
    }
    normalised = {
        f"norm {mean} {std} {leave1out}": Normalization(mean, leave1out, std)
        for mean in ("batch", "group", None)
        for std in ("batch", "group", None)
        for leave1out in (False, True)
    }
    return {
        **{name: partial(estimate, *which) for name, which in estimators.items()},
        **{name: partial(normalise, norm) for name, norm in normalised.items()},
        **{f"kl {mean}": partial(kl, mean) for mean in ("token", "sequence")},
        **{
            f"running {std}": partial(normalise_by_run, Normalization("running", std_level=std))
            for std in LEVELS_OF_STD
        },
        "weights": weights_of_lengths,
    }


def estimate(name: str, options: dict[str, Any], batch: Batch, reduce: Reduce | None) -> Tensor:
    fn = find_adv_est(name).fn
    takes = [p.name for p in signature(fn).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return fn(**{name: batch[name] for name in takes if name in batch}, **options, reduce=reduce)[0]


def normalise(norm: Normalization, batch: Batch, reduce: Reduce | None) -> Tensor:
    return norm(
        batch["advantages"],
        batch["response_mask"],
        batch["group_index"],
        batch["valid"],
        reduce=reduce,
    )


def normalise_by_run(norm: Normalization, batch: Batch, reduce: Reduce | None) -> Tensor:
    mask = batch["response_mask"] * batch["valid"][:, None]
    moments = Moments(3.0, 0.5, 2.0).with_values(batch["advantages"], mask, reduce)
    rows = (batch["advantages"], batch["response_mask"], batch["group_index"], batch["valid"])
    return norm(*rows, reduce=reduce, moments=moments)


def weights_of_lengths(batch: Batch, reduce: Reduce | None) -> Tensor:
    """On each of its tokens."""
    weights = length_weights(batch.lengths("response"), batch["valid"], (1.5, 0.5), reduce)
    return with_mean_one(weights, batch["valid"], reduce)[:, None] * batch["response_mask"]


def kl(mean: str, batch: Batch, reduce: Reduce | None) -> Tensor:
    names = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask", "valid")
    return torch.tensor(
        apply_kl_penalty(*(batch[n] for n in names), kl_coef=0.1, mean=mean, reduce=reduce)[1]
    )


def compare_advantages(
    ranks: TorchCollective, batch: Batch, mine: Batch, rows: list[int]
) -> dict[str, float]:
    """The largest deviation from the undivided batch, by name."""
    deviations = {}
    for name, function in over_the_batch().items():
        own = function(mine, ranks)
        whole = function(batch, None)
        if whole.dim():
            whole = whole[rows][:, : own.shape[1]]
        deviations[name] = float((own - whole).abs().max()) if own.numel() else 0.0
    return deviations


def compare_corrections(
    ranks: TorchCollective, batch: Batch, mine: Batch, rows: list[int]
) -> dict[str, float]:
    """The same of what is normalised, measured or chosen over the global batch, and of the
    statistics."""
    deviations = {}
    for level in get_args(Level):
        deviations[f"weights_{level}"] = _deviation(
            lambda b, reduce, level=level: compute_rollout_weights(
                *_mismatch(b), Correction(level), batch_normalize=True, reduce=reduce
            ),
            *(ranks, batch, mine, rows),
        )
    measured = mismatch_statistics(*_mismatch(mine), ranks)
    wanted = mismatch_statistics(*_mismatch(batch))
    deviations["mismatch"] = max(abs(measured[name] - wanted[name]) for name in wanted)
    names = ["token_k1", "seq_mean_k3"]
    bounds = [(0.5, 2.0), (None, 0.2)]
    deviations["rejection"] = _deviation(
        lambda b, reduce: compute_rejection_mask(
            *_mismatch(b), rollout_rs=names, bounds=bounds, reduce=reduce
        ),
        *(ranks, batch, mine, rows),
    )
    shares = {
        "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0},
        "kl_cov": {"kl_cov_ratio": 0.2},
    }
    for name, options in shares.items():
        select = find_policy_loss(name).selects
        deviations[name] = _deviation(
            lambda b, reduce, select=select, options=options: (
                # With a mean of its own for each group: those of the ranks are far from those of
                # the batch.
                select(
                    b["advantages"] + 2.0 * b["group_index"][:, None],
                    *(b["old_log_probs"], b["loss_mask"], b["uid"], reduce),
                    **options,
                ),
                {},
            ),
            *(ranks, batch, mine, rows),
        )
    return deviations


def _mismatch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch["old_log_probs"], batch["rollout_log_probs"], batch["loss_mask"]


def _deviation(
    compute: Callable[[Batch, Any], tuple[Tensor, dict[str, float]]],
    ranks: TorchCollective,
    batch: Batch,
    mine: Batch,
    rows: list[int],
) -> float:
    (own, statistics), (whole, wanted) = compute(mine, ranks), compute(batch, None)
    assert 0 < int((whole > 0).sum()) < int(
        (batch["loss_mask"] > 0).sum()
    ) or statistics.keys() >= {"rollout_is_mean"}
    worst = max((abs(statistics[k] - wanted[k]) for k in wanted), default=0.0)
    return max(worst, float((own - whole[rows][:, : own.shape[1]]).abs().max()) if rows else 0.0)


def main(rank: int, folder: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in SHARES}
    batch = toy_batch(seed=1, bs=ROWS)
    results = {}
    batch["domain"] = [DOMAINS[row % 4] for row in range(ROWS)]
    batch["group_index"] = torch.tensor(GROUPS)
    scores = batch["token_level_scores"]
    scores[::3] = 0.0
    batch["token_level_scores"] = scores
    batch["reward_parts"] = [{"a": i % 3 / 2, "b": float(i % 2)} for i in range(ROWS)]
    for size, shares in SHARES.items():
        if rank < size:
            rows = shares[rank]
            ranks = TorchCollective(groups[size])
            mine = batch.select(rows)
            results[size] = {
                **compare_losses(ranks, batch, mine),
                **compare_advantages(ranks, batch, mine, rows),
                **compare_corrections(ranks, batch, mine, rows),
            }
    (folder / f"{rank}.json").write_text(json.dumps(results))
