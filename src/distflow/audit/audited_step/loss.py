"""Checks: correction weights are the trainer's probability over the engine's; the loss is the sum
of its terms, and its gradient with respect to each token's log-prob matches the formula."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.algorithms.objectives import PolicyObjective
from distflow.audit.audited_step.log_probs import is_predicted
from distflow.audit.audited_step.policy_loss_formulas import (
    FORMULAS,
    Formula,
    Tokens,
    importance_weights,
    proximal,
    ratio_to,
    statistics,
    to_select,
)
from distflow.audit.audited_step.token_level_rewards import kl
from distflow.audit.audited_step.updates import check_micro_batches
from distflow.audit.check import (
    NOT_APPLICABLE,
    Sample,
    Wrong,
    check,
    check_tokens,
    doubles,
    is_builtin,
)
from distflow.audit.model_forward import PlainScores
from distflow.audit.record_groups_and_updates import UpdateRecord, units_of
from distflow.audit.recorded_step import RecordedStep, own_tokens
from distflow.config import Config
from distflow.config.derived_settings import config_of, is_rl, own_losses, reads_pairs
from distflow.data.batch import repeated
from distflow.import_target import own_name

LIMIT = 5e-4
FLOOR = 2e-5
KINK = 1e-5
CORRECTION_LIMIT = 1e-4
EXACT = 1e-3
ROUNDED = 0.15
"""Largest mean difference between the loss's inputs and the outputs of the policy's own forward."""
MOST_TOKENS = 2**18
COLUMNS = (
    *("advantages", "old_log_probs", "prox_log_probs", "ref_log_prob", "values", "returns"),
    *("rollout_is_weights", "rollout_log_probs", "selected_tokens", "versions"),
)
Outputs = Mapping[str, Tensor]
Total = Callable[["MiniBatch", Outputs], Tensor]
Shares = dict[str, tuple[float, float]]
"""By metric, the lowest and the highest share that this rank may have of it; rounding may decide
what counts. Under "", the number of tokens of which it is."""
Measured = dict[tuple[str, int], Shares]
"""By role and number of the update."""


@dataclass(frozen=True)
class MiniBatch:
    """All recorded response tokens of a mini-batch, sample after sample, `(tokens,)` float64.

    totals: of the whole mini-batch, see `UpdateRecord`. outputs: of the model. gradients: with
    respect to these. columns: as the nodes wrote them. counted: tokens under the loss mask. sample:
    each token's index in `samples`.
    """

    samples: Sequence[Sample]
    totals: Mapping[str, float]
    outputs: Outputs
    gradients: Outputs
    columns: Mapping[str, Tensor]
    counted: Tensor
    sample: Tensor


@check(
    "correction",
    "importance weights are the ratio of the trainer's to the engine's probability, of the token, "
    "the sequence or "
    "its geometric mean, truncated or masked as configured",
    needs="one rank, if weights are divided by their mean",
    limit=f"{CORRECTION_LIMIT:g} relative",
)
def audit_correction(recorded: RecordedStep) -> str | None:
    settings = recorded.config.algorithm.rollout_correction
    if "rollout_is_weights" not in recorded.batch:
        return NOT_APPLICABLE
    if not recorded.is_ours("rollout_is_weights"):
        return "a user's node writes the weights"
    if settings.rollout_is_batch_normalize and not (recorded := recorded.everyone).is_whole:
        return (
            "the mean of the weights needs all samples of the step, which are too many to send to "
            "all ranks"
        )
    own = "prox_log_probs" if "prox_log_probs" in recorded.batch else "old_log_probs"
    level = settings.rollout_is or "token"
    threshold = settings.rollout_is_threshold
    gaps = [_gap(sample, own, level) for sample in recorded.samples]
    mean = 1.0
    if settings.rollout_is_batch_normalize:  # over tokens, or over sequences
        weights = [
            importance_weights(gap, threshold)[counted]
            for gap, counted in gaps
            if bool(counted.any())
        ]
        drawn = torch.cat(
            weights if level == "token" else [each[:1] for each in weights] or [torch.ones(1)]
        )
        mean = float(drawn.mean()) if float(drawn.mean()) > 1e-8 else 1.0
    for sample, (gap, counted) in zip(recorded.samples, gaps, strict=True):
        expected = importance_weights(gap, threshold) * counted / mean
        raw = ratio_to(gap, torch.zeros_like(gap))
        # At a bound of the band the result depends on rounding.
        bounds = threshold if isinstance(threshold, tuple) else (threshold,)
        near = torch.stack([(raw - bound).abs() < CORRECTION_LIMIT for bound in bounds]).any(0)
        wrong = (
            (doubles(sample["rollout_is_weights"]) - expected).abs() > CORRECTION_LIMIT * raw
        ) & ~near
        reason = f", the trainer's probability over the engine's, by {level} and with its threshold"
        check_tokens(sample, "rollout_is_weights", expected, wrong, reason)
    return None


def _gap(sample: Sample, own: str, level: str) -> tuple[Tensor, Tensor]:
    """The log-ratio behind each token's weight, and which tokens have one."""
    counted = (sample["response_mask"] > 0) & bool(sample["valid"])
    gap = (doubles(sample[own]) - doubles(sample["rollout_log_probs"])) * counted
    if level != "token":
        num_tokens = float(counted.sum()) or 1.0
        gap = torch.full_like(gap, float(gap.sum()) / (num_tokens if level == "geometric" else 1.0))
    return gap, counted


@check(
    "loss",
    "the loss of each mini-batch is the sum of its terms, and its gradient with respect to each "
    "token's "
    "log-prob, entropy and value follows the configured formulas (mask, sign, mean, coefficient, "
    "clip)",
    needs="a built-in loss, or one that was registered with a formula",
    limit=f"{LIMIT:g} relative",
)
def audit_loss(recorded: RecordedStep) -> str | None:
    if "selected_tokens" in recorded.batch and recorded.everyone.is_whole:
        _check_selection(recorded.everyone)
    measured = Measured()
    try:
        why_not = _audit_updates(recorded, measured)
    finally:  # ranks gather together, whatever one of them found
        every = [measured] if recorded.partial else recorded.run.ranks.gather(measured)
    for role, number in measured:
        of_ranks = [own[role, number] for own in every if (role, number) in own]
        _check_reported(recorded, recorded.updates_of(role)[number], of_ranks)
    return why_not


def _audit_updates(recorded: RecordedStep, measured: Measured) -> str | None:
    """measured: receives this rank's shares of the metrics of each checked update."""
    seen = tokens = 0
    why_not = None if recorded.updates else "no update was recorded"
    for update in recorded.updates:
        if update.metrics.get("skipped") or not update.totals:
            continue
        tokens += int(update.batch.lengths("response").sum())
        if seen and tokens > MOST_TOKENS:
            break
        batch = _mini_batch(recorded, update)
        if update.role != "critic":
            steps = recorded.updates_of(update.role)
            num_taken = sum(not step.metrics.get("empty") for step in steps)
            # a rank may have no sample of it
            is_missing = bool(batch.samples) and "old_log_probs" not in batch.columns
            if num_taken > 1 and recorded.is_written("old_log_probs") and is_missing:
                raise Wrong(
                    f"the policy took {num_taken} optimizer steps, but its ratio is taken to be 1 "
                    "in all of them: "
                    "nothing computed old_log_probs before the first"
                )
            _same_outputs(
                recorded,
                update.role,
                batch,
                update.plain or (recorded.plain if update is steps[0] else {}),
            )
        total = _formula(recorded, update)
        if isinstance(total, str):
            why_not = total
            continue
        _check_update(update, batch, total)
        number = next(
            i for i, each in enumerate(recorded.updates_of(update.role)) if each is update
        )
        measured[update.role, number] = _shares_of_metrics(recorded, update, batch)
        seen += 1
    return why_not if seen or why_not else "the update was skipped"


def audit_value_clips(recorded: RecordedStep) -> str | None:
    """In every watched update of the critic, tokens have no gradient only if they are outside the
    mask, or if their value is farther from the old one than the clip allows."""
    reach = recorded.config.critic.cliprange_value
    taken = [update for update in recorded.updates if not update.metrics.get("skipped")]
    for micro in (micro for update in taken for micro in update.micros):
        if (batch := micro.batch) is None or "values" not in micro.gradients:
            continue
        values = micro.outputs["values"]
        gradient = micro.gradients["values"]
        counted = batch["loss_mask"] > 0
        old = batch["values"]
        inside = (values - old).abs() < reach * (1 - LIMIT)
        wrong = (gradient != 0) & ~counted
        wrong |= (gradient == 0) & counted & inside & ((values - batch["returns"]).abs() > LIMIT)
        if bool(wrong.any()):
            row, token = (int(place) for place in wrong.nonzero()[0])
            raise Wrong(
                f"the gradient of the critic's loss is {float(gradient[row, token]):.4g} at token "
                f"{token} of sample "
                f"{micro.uids[row]}, whose value moved from {float(old[row, token]):.4g} to "
                f"{float(values[row, token]):.4g} towards "
                f"{float(batch['returns'][row, token]):.4g}, with "
                f"critic.cliprange_value={reach:g}: another clip than in the config, or another "
                "mask"
            )
    return None


def _check_selection(recorded: RecordedStep) -> None:
    """Check that Clip-Cov and KL-Cov select tokens by the covariance of advantage and log-prob over
    the step."""
    actor = recorded.config.actor_rollout_ref.actor
    samples = recorded.samples
    if (
        not samples
        or "selected_tokens" not in recorded.batch
        or not recorded.is_ours("selected_tokens")
    ):
        return
    counted = torch.cat([sample["loss_mask"] > 0 for sample in samples])
    names = ("selected_tokens", "advantages", "old_log_probs")
    selected, *parts = (
        torch.cat([doubles(sample[name]) for sample in samples])[counted] for name in names
    )
    covariance = torch.stack([part - part.mean() for part in parts]).prod(0)
    if not len(selected) or not bool(covariance.isfinite().all()):
        return
    draws = torch.cat([_drawn_numbers(sample) for sample in samples])[counted]
    allowed, count = to_select(actor.policy_loss, covariance, draws, actor.policy_loss_kwargs)
    if int(selected.sum()) != count or bool((selected > 0)[~allowed].any()):
        raise Wrong(
            f"{actor.policy_loss} must select {count} of the step's {len(selected)} tokens, of "
            f"{int(allowed.sum())} "
            f"with such a covariance (and random number), but selected {int(selected.sum())}, "
            f"{int((selected > 0)[~allowed].sum())} of them others"
        )


def _drawn_numbers(sample: Sample) -> Tensor:
    """A random integer for each response token, from the sample's uid and the token's position."""
    key = int.from_bytes(
        hashlib.blake2b(str(sample["uid"]).encode(), digest_size=8).digest(), "little"
    )
    return torch.from_numpy(
        (np.random.Philox(key=key).random_raw(len(sample["loss_mask"])) >> 11).astype(np.int64)
    )


def _formula(recorded: RecordedStep, update: UpdateRecord) -> Total | str:
    """The loss of a mini-batch as a function of the model's outputs, or why there is none."""
    config = recorded.config
    if update.role == "critic":
        return lambda batch, outputs: _value_loss(config, batch, outputs)
    if reads_pairs(config):
        return _pair_loss if update.is_whole else "single texts were recorded, not pairs"
    if not is_rl(config):
        return lambda batch, outputs: aggregate(
            -outputs["log_probs"][batch.counted], batch, "token-mean", 1.0
        )
    if not isinstance(update.loss, PolicyObjective):
        return "the objective is the user's"
    formulas = dict[str | None, Formula]()
    for domain in (None, *own_losses(config)):
        name = config_of(config, domain).actor_rollout_ref.actor.policy_loss
        loss = (update.loss if domain is None else update.loss.domains[domain]).policy_loss
        formula = FORMULAS.get(name) if is_builtin(loss.fn) else loss.formula
        if formula is None:
            return (
                f"the loss '{own_name(name)}' has no formula: register_policy_loss(NAME, "
                "formula=...) accepts a "
                "second implementation, (tokens, options) -> loss of each token"
            )
        formulas[domain] = formula
    return lambda batch, outputs: _actor_loss(recorded, batch, outputs, formulas)


def _check_update(update: UpdateRecord, batch: MiniBatch, total: Total) -> None:
    if not len(batch.sample):
        return
    loss, expected = _derived(total, batch, 0.0)
    sides = [(loss, expected)] * 2
    wrong = _wrong(update, batch, loss, expected, sides)
    # If the formula has a kink or jumps within rounding of a token's log-prob, either side may be
    # right.
    if wrong:
        sides = [_derived(total, batch, KINK), _derived(total, batch, -KINK)]
        wrong = _wrong(update, batch, loss, expected, sides)
    for name, places in wrong.items():
        if len(places):
            raise Wrong(_message(update, name, batch, expected[name], int(places[0])))
    found, _ = update.share
    if wrong:
        raise Wrong(
            f"the loss of a mini-batch of the {update.role} is {found:.6g}, but the sum of its "
            "terms by the config "
            f"is {loss:.6g}"
        )


def _wrong(
    update: UpdateRecord,
    batch: MiniBatch,
    loss: float,
    expected: Outputs,
    sides: Sequence[tuple[float, Outputs]],
) -> dict[str, Tensor]:
    """By output name, where the gradient with respect to the output differs; "" is the loss itself.
    sides: the loss and its gradients on both sides of the outputs."""
    (high, above), (low, below) = sides
    places = dict[str, Tensor]()
    for name in update.loss.outputs:
        slack = (
            (above[name] - below[name]).abs()
            + LIMIT * expected[name].abs()
            + FLOOR * expected[name].abs().max()
        )
        found = (~((batch.gradients[name] - expected[name]).abs() <= slack)).nonzero()
        places |= {name: found} if len(found) else {}
    if (
        update.is_whole
        and not abs(update.share[0] - loss) <= abs(high - low) + LIMIT * abs(loss) + FLOOR * 10
    ):
        places[""] = torch.zeros(0)
    return places


def _check_reported(
    recorded: RecordedStep, update: UpdateRecord, of_ranks: Sequence[Shares]
) -> None:
    """Check the reported loss, and, if the ranks have recorded the outputs of all samples, the
    metrics over all tokens."""
    expected: Shares = {"loss": (update.share[1],) * 2}
    for name in sorted({name for own in of_ranks for name in own}):
        low, high = (
            math.fsum(own.get(name, (0.0, 0.0))[end] for own in of_ranks) for end in (0, 1)
        )
        expected[name] = low, high
    if expected.pop("", (0.0, 0.0))[0] != update.totals["tokens"]:
        expected = {"loss": expected["loss"]}
    for name, (found, value) in update.sums.items():
        if not abs(found - value) <= LIMIT * abs(value) + FLOOR:
            raise Wrong(
                f"the sum of {name.rpartition('/')[2]} over the micro-batches and ranks of a "
                "mini-batch of the "
                f"{update.role} is {value:.6g}, but the engine has computed {found:.6g}: it is of "
                "some of them, or "
                "rounded"
            )
    prefix = (
        f"policies/{update.role}" if update.role in recorded.config.dag.policies else update.role
    )
    recorded.run.compared.update({f"{prefix}/{name}" for name in expected})
    for name, (low, high) in expected.items():
        found = float(update.metrics.get(name, low))
        slack = LIMIT * max(abs(low), abs(high)) + FLOOR
        if not low - slack <= found <= high + slack:
            raise Wrong(
                f"the {name} of a mini-batch of the {update.role} is reported as {found:.6g}, but "
                "its micro-batches on "
                f"all ranks give {low:.6g}: it includes padding, or uses another mean than the "
                "config's"
            )


def _shares_of_metrics(recorded: RecordedStep, update: UpdateRecord, batch: MiniBatch) -> Shares:
    """This rank's shares of the metrics over all tokens; none if the outputs of some samples were
    not recorded."""
    actor = recorded.config.actor_rollout_ref.actor
    counted = batch.counted
    found = dict[str, float]()
    if not update.is_whole or not bool(counted.any()):
        return {}
    found[""] = float(counted.sum())
    if "entropy" in batch.outputs:
        found["entropy"] = float(
            aggregate(batch.outputs["entropy"][counted], batch, "token-mean", 1.0)
        )
    if "entropy" in batch.outputs and actor.use_kl_loss:
        values = kl(
            (batch.outputs["log_probs"] - batch.columns["ref_log_prob"])[counted],
            actor.kl_loss_type,
        )
        found["kl_loss"] = float(
            aggregate(values, batch, actor.loss_agg_mode, _scale(recorded.config))
        )
    loss = getattr(update.loss, "policy_loss", None)
    number = batch.totals["tokens"]
    if update.role == "critic":
        is_clipped = (batch.gradients["values"] == 0) & (
            batch.outputs["values"] != batch.columns["returns"]
        )
        found["vf_clipfrac"] = float(is_clipped[counted].sum()) / number
        found["vpred_mean"] = float(batch.outputs["values"][counted].sum()) / number
    every: Shares = {name: (value, value) for name, value in found.items()}
    # Statistics of a ratio are of the domains whose loss has one.
    if (
        "old_log_probs" in batch.columns
        and loss
        and loss.name in FORMULAS
        and not own_losses(recorded.config)
    ):
        every |= _of_ratios(recorded, batch, loss.name)
    return every


def _of_ratios(recorded: RecordedStep, batch: MiniBatch, name: str) -> Shares:
    """Shares of the statistics of the ratio to the old policy, or to the proximal one."""
    tokens, units = _counted(recorded.config, batch, batch.outputs["log_probs"])
    options = _options(recorded, recorded.config)
    every = [statistics(name, tokens, options, moved) for moved in (0.0, -KINK, KINK)]
    gap = (proximal(tokens, options) if name == "decoupled" else tokens.old) - tokens.now
    sums = {key: [float(each[key].double().sum()) for each in every] for key in every[0]}
    sums["ppo_kl"] = [float(gap.clamp(-20.0, 20.0).sum())]
    found = {
        key: (min(own) / units.totals["tokens"], max(own) / units.totals["tokens"])
        for key, own in sums.items()
    }
    moved = (
        gap
        if name == "decoupled"
        else (batch.outputs["log_probs"] - batch.columns["old_log_probs"])[batch.counted]
    )
    return found | {"log_ratio_abs": (float(moved.abs().sum()) / batch.totals["tokens"],) * 2}


def _same_outputs(
    recorded: RecordedStep, role: str, batch: MiniBatch, plain: Mapping[str, PlainScores]
) -> None:
    """Check that the loss's input is the output of the policy's own forward then, at the sampling
    temperature."""
    for number, sample in enumerate(batch.samples):
        scores = plain.get(str(sample["uid"]))
        for name in ("log_probs", "entropy"):
            if scores is None or name not in batch.outputs:
                continue
            found = batch.outputs[name][batch.sample == number]
            place = sample.get("place", slice(None))
            own = is_predicted(sample) & own_tokens(recorded.config, sample, role)
            expected = getattr(scores, name)[place]
            # see `_same` in log_probs.py
            scale = expected.abs().clamp(min=1.0) if "action_values" in sample else 1.0
            gap = float(((found - expected) / scale)[own].abs().sum() / own.sum().clamp(min=1))
            if not gap <= recorded.limit(EXACT, ROUNDED):
                raise Wrong(
                    f"the {name} that the loss is given for sample {sample['uid']} differs by "
                    f"{gap:.3g} a token from "
                    "the policy's own forward at the sampling temperature"
                )


def _derived(total: Total, batch: MiniBatch, moved: float) -> tuple[float, dict[str, Tensor]]:
    """The loss, and its gradient with respect to each output, with all outputs shifted by
    `moved`."""
    leaves = {name: (output + moved).requires_grad_() for name, output in batch.outputs.items()}
    loss = total(batch, leaves)
    if not loss.requires_grad:
        return float(loss), {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return float(loss.detach()), dict(zip(leaves, found, strict=True))


def _message(
    update: UpdateRecord, name: str, batch: MiniBatch, expected: Tensor, place: int
) -> str:
    found = float(batch.gradients[name][place])
    want = float(expected[place])
    number = int(batch.sample[place])
    token = place - int((batch.sample < number).sum())
    hint = (
        "another coefficient, mean, clip or term than in the config, or another sample's advantage"
    )
    ratios = (batch.gradients[name] / expected)[expected != 0]
    if found and want and float((ratios / ratios[0] - 1).abs().max()) < 10 * LIMIT:
        hint = (
            f"it is {float(ratios[0]):.4g} times the formula's at every token, with "
            f"{len(update.micros)} micro-batches "
            "in the mini-batch: another coefficient or mean than in the config, a factor of "
            "gradient accumulation, or "
            "counts that are not the sums over all ranks"
        )
    elif not want:
        hint = "a token outside the mask, or a sample without a score, is trained on"
    elif not found:
        hint = "a token that should be trained on is left out, or a term is off"
    elif found * want < 0:
        hint = "its sign is flipped"
    return (
        f"the gradient of the {update.role}'s loss by {name} is {found:.4g} at token {token} of "
        f"{int((batch.sample == number).sum())} of sample {batch.samples[number]['uid']}, but the "
        "formula gives "
        f"{want:.4g}: {hint}"
    )


def _mini_batch(recorded: RecordedStep, update: UpdateRecord) -> MiniBatch:
    """The recorded mini-batch. Raises Wrong if the micro-batches are not exactly its samples."""
    check_micro_batches(update)
    known = recorded.rows
    samples = [known[uid] for micro in update.micros for uid in micro.recorded]
    lengths = [len(sample["response_ids"]) for sample in samples]
    outputs: dict[str, list[Tensor]] = {name: [] for name in update.loss.outputs}
    gradients: dict[str, list[Tensor]] = {name: [] for name in update.loss.outputs}
    for micro in update.micros:
        own = [len(known[uid]["response_ids"]) for uid in micro.recorded]
        for name, rows in micro.outputs.items():
            came_back = micro.gradients.get(name, torch.zeros_like(rows))
            outputs[name] += [row[:length] for row, length in zip(rows, own, strict=True)]
            gradients[name] += [row[:length] for row, length in zip(came_back, own, strict=True)]
    present = [name for name in COLUMNS if samples and name in samples[0]]
    columns = {name: _flat([sample[name] for sample in samples]) for name in present}
    if samples and "token_level_scores" in samples[0]:
        scores = torch.stack([doubles(sample["token_level_scores"]).sum() for sample in samples])
        columns["sample_score"] = repeated(scores, torch.tensor(lengths))
    return MiniBatch(
        samples,
        update.totals,
        {name: _flat(parts) for name, parts in outputs.items()},
        {name: _flat(parts) for name, parts in gradients.items()},
        columns,
        _flat(
            [
                sample["loss_mask"] * own_tokens(recorded.config, sample, update.role)
                for sample in samples
            ]
        )
        > 0,
        repeated(torch.arange(len(samples)), torch.tensor(lengths, dtype=torch.int64)),
    )


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return doubles(torch.cat(list(parts))) if parts else torch.zeros(0, dtype=torch.float64)


def _actor_loss(
    recorded: RecordedStep,
    batch: MiniBatch,
    outputs: Outputs,
    formulas: Mapping[str | None, Formula],
) -> Tensor:
    """All terms. formulas: of the policy loss by domain, None for all others."""
    actor = recorded.config.actor_rollout_ref.actor
    counted = batch.counted
    total = torch.zeros((), dtype=torch.float64)
    if not bool(counted.any()):
        return total
    domains = [
        sample["domain"] if sample["domain"] in formulas else None for sample in batch.samples
    ]
    for domain, formula in formulas.items():
        rows = torch.tensor([each == domain for each in domains])
        own = replace(batch, counted=counted & rows[batch.sample])
        total = total + _policy_loss(
            recorded, config_of(recorded.config, domain), own, outputs, formula
        )
    others = torch.zeros(int(counted.sum()), dtype=torch.float64)
    if actor.entropy_coef:
        others = others - actor.entropy_coef * outputs["entropy"][counted]
    if actor.use_kl_loss:
        gap = outputs["log_probs"][counted] - batch.columns["ref_log_prob"][counted]
        others = others + actor.kl_loss_coef * _kl(gap, actor.kl_loss_type)
    return total + aggregate(others, batch, actor.loss_agg_mode, _scale(recorded.config))


def _policy_loss(
    recorded: RecordedStep, config: Config, batch: MiniBatch, outputs: Outputs, formula: Formula
) -> Tensor:
    """config: with the settings of the tokens' domain."""
    actor = config.actor_rollout_ref.actor
    counted = batch.counted
    if not bool(counted.any()):
        return torch.zeros((), dtype=torch.float64)
    tokens, batch = _counted(config, batch, outputs["log_probs"])
    columns = tokens.columns
    loss = formula(tokens, _options(recorded, config))
    if "rollout_is_weights" in columns:
        loss = loss * columns["rollout_is_weights"]
    elif "old_log_probs" not in columns and "rollout_corr/rollout_is_mean" in recorded.metrics:
        # Weights that the loss itself computes, after a mismatch switched the correction on.
        loss = loss * ratio_to(tokens.now.detach(), columns["rollout_log_probs"]).clamp(max=2.0)
    if (most := actor.off_policy_mask_threshold) is not None:  # DeepSeek-V3.2, arXiv:2512.02556
        gap = tokens.mean(columns["rollout_log_probs"] - tokens.now.detach())
        loss = torch.where((tokens.advantages < 0) & (gap > most), 0.0, loss)
    return aggregate(
        loss, batch, actor.loss_agg_mode, _scale(config), every_row=actor.policy_loss == "gmpo"
    )


def _options(recorded: RecordedStep, config: Config) -> dict[str, Any]:
    """What a formula reads of the config."""
    actor = config.actor_rollout_ref.actor
    known = {"step": recorded.step, "correction": config.algorithm.rollout_correction}
    return {**vars(actor), **known, **actor.policy_loss_kwargs}


def _counted(config: Config, batch: MiniBatch, log_probs: Tensor) -> tuple[Tokens, MiniBatch]:
    """The tokens that count, or with `algorithm.logprob_level` the actions or chunks; and the batch
    of these."""
    counted = batch.counted
    level = config.algorithm.logprob_level
    columns = {name: column[counted] for name, column in batch.columns.items()}
    tokens = Tokens(log_probs[counted], columns, batch.sample[counted])
    if level == "token":
        return tokens, batch
    # no other run imports it
    from distflow.audit.simulators.srpo_rewards_and_levels import by_unit, dim_of

    turns = (sample["turn_index"] for sample in batch.samples)
    tokens = by_unit(tokens, units_of(turns, counted, dim_of(config, level)))
    totals = {**batch.totals, "tokens": batch.totals["units"]}
    all_count = torch.ones_like(tokens.sample, dtype=torch.bool)
    return tokens, replace(batch, sample=tokens.sample, counted=all_count, totals=totals)


def _kl(difference: Tensor, kind: str) -> Tensor:
    value = kl(difference, kind)
    return (
        difference**2 / 2 - (difference**2 / 2).detach() + value.detach()
        if kind.endswith("+")
        else value
    )


def _value_loss(config: Config, batch: MiniBatch, outputs: Outputs) -> Tensor:
    """Half the squared error, or Huber's loss, which is linear beyond `huber_delta`."""
    now = outputs["values"][batch.counted]
    reach = config.critic.cliprange_value
    old = batch.columns["values"][batch.counted]
    returns = batch.columns["returns"][batch.counted]
    bound = config.critic.huber_delta

    def distance(error: Tensor) -> Tensor:
        half = error**2 / 2
        if config.critic.value_loss == "mse":
            return half
        return torch.where(error.abs() <= bound, half, bound * (error.abs() - bound / 2))

    loss = torch.maximum(
        distance(now - returns), distance(now.clamp(old - reach, old + reach) - returns)
    )
    return aggregate(loss, batch, config.critic.loss_agg_mode, _scale(config))


def _pair_loss(batch: MiniBatch, outputs: Outputs) -> Tensor:
    """For each pair log(1 + e^(rejected − chosen)); a text's score is that of its last token."""
    ends = torch.cat([batch.sample.diff(), torch.ones(1)]) > 0
    score = dict(
        zip(
            (str(sample["uid"]) for sample in batch.samples),
            outputs["text_scores"][ends],
            strict=True,
        )
    )
    worse = [score[uid.replace("-0", "-1")] - score[uid] for uid in score if uid.endswith("-0")]
    return torch.stack([gap.exp().log1p() for gap in worse]).sum() * 2 / batch.totals["rows"]


def _scale(config: Config) -> float:
    return config.actor_rollout_ref.actor.loss_scale_factor or float(
        config.data.max_response_length
    )


def aggregate(
    loss: Tensor, batch: MiniBatch, mode: str, scale: float, every_row: bool = False
) -> Tensor:
    """Aggregate the losses of the tokens under the mask; means over samples exclude those without
    tokens, unless every row counts."""
    if not len(loss):
        return torch.zeros((), dtype=torch.float64)
    if mode == "token-mean":
        return loss.sum() / batch.totals["tokens"]
    tokens = torch.bincount(batch.sample[batch.counted], minlength=len(batch.samples))
    sums = torch.zeros(len(batch.samples), dtype=torch.float64).index_add(
        0, batch.sample[batch.counted], loss
    )
    if mode == "seq-mean-token-mean":
        sums = sums / tokens.clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        sums = sums / scale
    return sums.sum() / batch.totals["rows" if every_row else "scored"]
