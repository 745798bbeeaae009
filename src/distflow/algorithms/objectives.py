"""The objectives of policy, critic, SFT, preference pairs and reward models: losses per token or
pair, aggregated exactly over the mini-batch, with their metrics.

They implement the train engines' `LossFn`: `outputs`, `counts`, a call for each micro-batch,
`finish`. PPO's clipped value loss (arXiv:1707.06347; clipping as in the original code) is here too.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, logsigmoid

from distflow.algorithms.advantages.group_estimator_base import action_index, sum_by_turn
from distflow.algorithms.kl import check_kl_type, kl_estimate
from distflow.algorithms.losses.distillation import Distillation
from distflow.algorithms.losses.preference import compute_kto_loss
from distflow.algorithms.masked_reductions import (
    as_stat,
    check_scale,
    loss_counts,
    raw_log_ratio,
    token_weights,
    under_mask,
    weighted_sum,
)
from distflow.algorithms.registry import (
    PolicyLoss,
    PreferenceLoss,
    find_policy_loss,
    find_preference_loss,
)
from distflow.algorithms.rollout_correction import Correction, interpolate, off_policy_sequence_mask
from distflow.algorithms.scalar_loss_adapter import ScalarLossAdapter
from distflow.algorithms.score_centering import ScoreCentering
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.import_target import shown_name

ValueLoss = Literal["mse", "huber"]


def compute_value_loss(
    predictions: Tensor,
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    cliprange_value: float | None = 0.5,
    value_loss: ValueLoss = "mse",
    huber_delta: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(ℓ(v − R), ℓ(clip(v, v_old ± cliprange_value) − R)) per token, all
    `(bs, response_length)`.

    predictions: v, with gradient. values: v_old. `cliprange_value` None turns the clip off. ℓ(x) is
    x² / 2; with `huber` it is huber_delta · (|x| − huber_delta / 2) for |x| > huber_delta (Huber
    1964), as in AReaL.
    """
    predictions, values, returns = (
        under_mask(x, loss_mask) for x in (predictions, values, returns)
    )
    plain = _loss(predictions - returns, value_loss, huber_delta)
    if cliprange_value is None:
        return plain, {"vpred_mean": predictions.detach()}

    near = predictions.clamp(values - cliprange_value, values + cliprange_value)
    clipped = _loss(near - returns, value_loss, huber_delta)
    stats = {"vf_clipfrac": (clipped > plain).to(plain.dtype), "vpred_mean": predictions.detach()}
    return torch.maximum(plain, clipped), stats


def _loss(error: Tensor, value_loss: ValueLoss, huber_delta: float) -> Tensor:
    if value_loss == "mse":
        return 0.5 * error.square()
    return huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)


Counts = dict[str, float]
Sums = dict[str, Tensor | float]

_BY_UNIT = {"advantages", "loss_mask", "old_log_probs"}
"""Columns that a loss over actions or chunks may read."""

# Sums with this prefix are over tokens and become means; the others are shares of the mini-batch
# and add up.
_PER_TOKEN = "token/"


class _Objective:
    """The common part of the train engines' `LossFn`."""

    whole_groups = False

    def counts(self, batch: Batch) -> Counts:
        return loss_counts(batch["loss_mask"])

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        tokens = max(counts["tokens"], 1.0)
        return {
            name.removeprefix(_PER_TOKEN): value / tokens if name.startswith(_PER_TOKEN) else value
            for name, value in sums.items()
        }


@dataclass(eq=False)
class PolicyObjective(_Objective):
    """policy loss + kl_loss_coef · KL to the reference − entropy_coef · entropy, + the advantage
    times `centering`'s term, + the terms of `distillation`, which also changes the advantages.

    Metrics: `loss`, `pg_loss`, `entropy` (mean per token), `kl_loss`, the policy loss's statistics,
    `log_ratio_abs` (mean |log ratio| to the clip's reference policy, if the batch has its
    log-probs: 0 before the first update), and for each enabled term `loss_term/NAME`, the weighted
    sum of its absolute per-token values: exactly 0 means a dead term.

    options: of the loss. kl_loss_type: None omits the KL term. weights_field: the column of rollout
    correction weights, or None.
    interpolates: `prox_log_probs` is not a column but computed from `old_log_probs` and
    `prox_alpha` (see `algorithms/rollout_correction.py`). derives_old: a batch without
    `old_log_probs` uses the current ones, detached. correction: weights the loss by proximal (or
    current) log-probs over `rollout_log_probs`. off_policy_mask_threshold: of
    `off_policy_sequence_mask`, or None. actor: the numbers that a loss with verl's signature
    receives as its `config`. domains: the objective whose policy loss applies to the rows of a
    domain, by its name; its other terms are not used. logprob_level: what the policy loss counts:
    tokens, actions of `action_dim` tokens, or chunks of actions (turns). The log-prob of an action
    or a chunk is the sum over its tokens under the mask, and its advantage their mean. Raises
    ValueError for an unknown loss, option, mode or KL type, an invalid option, or a missing
    `loss_scale_factor` that the mode needs.
    """

    outputs: tuple[str, ...] = field(default=("log_probs", "entropy"), init=False)

    loss: str | PolicyLoss = "vanilla"
    options: Mapping[str, object] = field(default_factory=dict)
    _: KW_ONLY
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coef: float = 0.0
    kl_loss_type: str | None = None
    kl_loss_coef: float = 0.0
    weights_field: str | None = None
    interpolates: bool = False
    derives_old: bool = False
    correction: Correction | None = None
    off_policy_mask_threshold: float | None = None
    actor: Mapping[str, object] = field(default_factory=dict)
    domains: Mapping[str, "PolicyObjective"] = field(default_factory=dict)
    logprob_level: str = "token"
    action_dim: int = 1
    centering: ScoreCentering | None = None
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        if self.distillation is not None:
            self.outputs = (*self.outputs, *self.distillation.outputs)
        check_scale(self.loss_agg_mode, self.loss_scale_factor)
        if self.centering is not None:
            self.outputs = (*self.outputs, "top_log_probs")
        if isinstance(self.loss, str):
            self.policy_loss = find_policy_loss(self.loss)
        else:
            self.policy_loss = self.loss

        self.options = self.policy_loss.call_options(self.options)
        if self.kl_loss_type is not None:
            self.kl_loss_type = check_kl_type(self.kl_loss_type)

        threshold = self.off_policy_mask_threshold
        if threshold is not None and not threshold > 0:
            raise ValueError(
                "off_policy_mask_threshold must be positive (nats a token, e.g. 0.5), not "
                f"{threshold}"
            )

        more = {
            *self.policy_loss.reads,
            *self.policy_loss.optional,
        } - _BY_UNIT or self.policy_loss.returns_scalar
        if self.logprob_level != "token" and more:
            raise ValueError(
                f"policy loss '{self.policy_loss.name}' is of tokens alone: set "
                "actor_rollout_ref.actor.policy_loss=vanilla, or algorithm.logprob_level=token "
                f"instead of {self.logprob_level}"
            )

        if "prox_log_probs" in self.policy_loss.reads:
            self._anchor = "prox_log_probs"
        else:
            self._anchor = "old_log_probs"

        self.scalar_loss: ScalarLossAdapter | None = None
        if self.policy_loss.returns_scalar:
            self.scalar_loss = ScalarLossAdapter(
                self.policy_loss, self.loss_agg_mode, self.loss_scale_factor, self.actor
            )

            if self.weights_field is not None and not self.policy_loss.takes_weights:
                raise ValueError(
                    f"policy loss '{self.policy_loss.name}' takes no rollout_is_weights; add the "
                    "parameter, or disable algorithm.rollout_correction"
                )
            if threshold is not None:
                raise ValueError(
                    f"policy loss '{self.policy_loss.name}' returns a single number, so sequences "
                    "cannot be masked: set actor.off_policy_mask_threshold=null, or register a "
                    "loss that returns a loss per token"
                )

    @property
    def reads(self) -> tuple[str, ...]:
        extra = ("ref_log_prob",) if self.kl_loss_type else ()
        weights = (self.weights_field,) if self.weights_field else ()
        masked = (
            ("advantages", "rollout_log_probs")
            if self.off_policy_mask_threshold is not None
            else ()
        )
        weighed = ("rollout_log_probs",) if self.correction is not None else ()
        top = ("advantages", "top_ids", "top_log_probs") if self.centering is not None else ()

        own = self.policy_loss.reads
        if self.distillation is not None:
            own = (*own, *self.distillation.reads)
        if self.interpolates:
            own = (
                "old_log_probs",
                "prox_alpha",
                *(name for name in own if name != "prox_log_probs"),
            )

        if self.derives_old:
            own = tuple(name for name in own if name != "old_log_probs")

        if self.domains:
            others = ("domain", *(name for each in self.domains.values() for name in each.reads))
        else:
            others = ()

        turns = ("turn_index",) if self.logprob_level != "token" else ()
        return tuple(
            dict.fromkeys(
                (*own, "loss_mask", *turns, *extra, *weights, *masked, *weighed, *top, *others)
            )
        )

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns that it uses if a mini-batch has them."""
        old = ("old_log_probs",) if self.derives_old else ()
        weights = () if self.distillation is None else self.distillation.optional
        others = []
        for each in self.domains.values():
            for name in each.optional:
                if name not in self.reads:
                    others.append(name)

        return tuple(dict.fromkeys((*self.policy_loss.optional, *old, *weights, *others)))

    def counts(self, batch: Batch) -> Counts:
        """Also `units`: actions or chunks with a token under `loss_mask`, unless it counts
        tokens."""
        found = super().counts(batch)
        mask = batch["loss_mask"]
        if self.logprob_level == "token":
            return found

        return found | {
            "units": float((sum_by_turn(torch.ones_like(mask), self._units(batch, mask)) > 0).sum())
        }

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss, and of the sums that `finish` reads.

        outputs: log_probs (with gradient) and entropy, padded `(bs, response_length)`, and those of
        centering and distillation, `(bs, response_length, k)`, on the micro-batch's device."""
        log_probs = outputs["log_probs"]
        mask = micro["loss_mask"]
        weights = token_weights(mask, self.loss_agg_mode, counts, self.loss_scale_factor)
        fields = self._fields(micro, log_probs, mask)

        if self.domains:
            loss, sums = self._terms_by_domain(log_probs, micro, counts)
        else:
            loss, sums = self._policy_term(log_probs, micro, fields, counts)

        sums["pg_loss"] = loss
        anchored = fields if self._anchor in fields else micro
        if self._anchor in anchored:
            ratio = raw_log_ratio(log_probs.detach(), anchored[self._anchor], mask)
            sums[_PER_TOKEN + "log_ratio_abs"] = ratio.abs().double().sum()
        elif self.derives_old:
            sums[_PER_TOKEN + "log_ratio_abs"] = 0.0

        entropy = under_mask(outputs["entropy"], mask)
        sums[_PER_TOKEN + "entropy"] = entropy.detach().double().sum()

        if self.entropy_coef:
            loss = loss - self.entropy_coef * weighted_sum(entropy, weights)
            sums["loss_term/entropy"] = abs(self.entropy_coef) * weighted_sum(
                entropy.abs(), weights
            )

        if self.kl_loss_type is not None:
            reference = under_mask(micro["ref_log_prob"], mask)
            kl = kl_estimate(under_mask(log_probs, mask), reference, self.kl_loss_type)
            kl_loss = sums["kl_loss"] = weighted_sum(kl, weights)
            sums["loss_term/kl"] = abs(self.kl_loss_coef) * weighted_sum(kl.abs(), weights)
            loss = loss + self.kl_loss_coef * kl_loss

        if self.centering is not None:
            top = under_mask(outputs["top_log_probs"], mask[..., None])
            centre, measured = self.centering(top, micro["top_log_probs"])
            term = under_mask(_in_dtype(micro["advantages"], centre) * centre, mask)
            sums["loss_term/centering"] = weighted_sum(term.abs(), weights)
            for name, value in measured.items():
                sums[_PER_TOKEN + name] = under_mask(value, mask).sum()
            loss = loss + weighted_sum(term, weights)

        if self.distillation is not None:
            for name, losses in self.distillation.losses(outputs, micro):
                losses = under_mask(losses, mask)
                sums[f"loss_term/{name}"] = weighted_sum(losses.abs(), weights)
                loss = loss + weighted_sum(losses, weights)
            for name, value in self.distillation.measured(outputs, micro).items():
                sums[_PER_TOKEN + name] = under_mask(value, mask).double().sum()

        return loss, _without_gradient({"loss": loss} | sums)

    def _terms_by_domain(
        self, log_probs: Tensor, micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The sum of the policy losses, each over the rows of its domain: `self` for those without
        their own. All are computed in every micro-batch, even without rows, because ranks add up
        the same statistics."""
        mask = micro["loss_mask"]
        total = log_probs.new_zeros(())
        sums = Sums()
        names = [name if name in self.domains else None for name in micro["domain"]]

        for domain, part in ((None, self), *self.domains.items()):
            rows = torch.tensor(
                [name == domain for name in names], dtype=torch.bool, device=mask.device
            )
            fields = part._fields(micro, log_probs, mask * rows[:, None])
            loss, own = part._policy_term(log_probs, micro, fields, counts)
            total = total + loss
            own |= {} if domain is None else {f"pg_loss/{domain}": loss}
            sums |= {name: sums.get(name, 0.0) + value for name, value in own.items()}

        return total, sums

    def _policy_term(
        self, log_probs: Tensor, micro: Batch, fields: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The policy loss's share, and its sums."""
        if self.logprob_level == "token":
            return self._term(log_probs, micro, fields, counts)

        mask = fields["loss_mask"]
        units = self._units(micro, fields["loss_mask"])
        columns = {"log_probs": log_probs, **fields, "loss_mask": torch.ones_like(mask)}
        summed = {name: sum_by_turn(column, units) for name, column in columns.items()}
        summed["advantages"] = summed["advantages"] / summed["loss_mask"].clamp(min=1)
        own = {name: column.to(columns[name].dtype) for name, column in summed.items()}
        of_units = {**counts, "tokens": counts["units"]}
        loss, sums = self._term(own.pop("log_probs"), micro, own, of_units)
        size = counts["tokens"] / max(counts["units"], 1.0)  # statistics are means over units

        return loss, {
            name: value * size if name.startswith(_PER_TOKEN) else value
            for name, value in sums.items()
        }

    def _units(self, micro: Batch, mask: Tensor) -> Tensor:
        """The number of each token's action or chunk in its sample, -1 outside the mask."""
        turns = micro["turn_index"]
        return torch.where(
            mask > 0,
            action_index(turns, self.action_dim) if self.logprob_level == "action" else turns,
            -1,
        )

    def _term(
        self, log_probs: Tensor, micro: Batch, fields: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, Sums]:
        mask = fields["loss_mask"]
        correction, measured = self._weights(log_probs, micro, fields)

        if self.scalar_loss is not None:
            loss, stats = self.scalar_loss(log_probs, fields, correction, counts)
            self._check_gradient(log_probs, loss)
            sums: Sums = {_PER_TOKEN + name: value for name, value in stats.items()}
            sums |= {_PER_TOKEN + name: value.double().sum() for name, value in measured.items()}
            return loss, sums | {"loss_term/pg": loss.abs()}

        # A user's loss may ignore the mask.
        current = under_mask(log_probs, mask)
        per_token, token_stats = self._per_token(current, fields)
        self._check_gradient(log_probs, per_token)

        if correction is not None:
            per_token = per_token * correction
            token_stats = {**token_stats, **measured}

        if self.off_policy_mask_threshold is not None:
            keep = off_policy_sequence_mask(
                current,
                micro["rollout_log_probs"],
                micro["advantages"],
                mask,
                self.off_policy_mask_threshold,
            )
            per_token = under_mask(per_token, keep)
            token_stats = {**token_stats, "off_policy_masked": 1.0 - keep}

        weights = token_weights(
            mask,
            self.loss_agg_mode,
            counts,
            self.loss_scale_factor,
            every_row=self.policy_loss.every_row,
        )
        sums = {
            _PER_TOKEN + name: under_mask(value, mask).double().sum()
            for name, value in token_stats.items()
        }

        return weighted_sum(per_token, weights), sums | {
            "loss_term/pg": weighted_sum(per_token.abs(), weights)
        }

    def _check_gradient(self, log_probs: Tensor, loss: Tensor) -> None:
        if torch.is_grad_enabled() and log_probs.requires_grad and not loss.requires_grad:
            raise UserError(
                f"policy loss '{self.policy_loss.name}' ({shown_name(self.policy_loss.fn)}) has no "
                "gradient with respect to log_probs, so nothing would be trained: it is computed "
                "from detached numbers (.detach(), .item(), torch.no_grad)"
            )

    def _weights(
        self, log_probs: Tensor, micro: Batch, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(correction weights or None, statistics per token of weights computed here)."""
        field = self.weights_field
        mask = fields["loss_mask"]

        if self.correction is not None:
            trainer = fields.get("prox_log_probs", log_probs)
            raw, weights = self.correction.weights(trainer, micro["rollout_log_probs"], mask)
            changed = as_stat(weights != raw, weights)
            return weights.to(log_probs.dtype), {
                "rollout_is_weight": weights,
                "rollout_is_corrected": changed,
            }

        if field is None:
            return None, {}
        return under_mask(micro[field], mask), {}

    def _per_token(
        self, log_probs: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(loss, statistics) per token of a loss in our own signature. Raises ValueError if it
        returns others."""
        returned = self.policy_loss.fn(log_probs=log_probs, **fields, **self.options)
        match returned:
            case (Tensor() as loss, Mapping() as statistics) if all(
                isinstance(value, Tensor) and value.shape == log_probs.shape
                for value in (loss, *statistics.values())
            ):
                return loss, statistics

        raise UserError(
            f"policy loss '{self.policy_loss.name}' must return (losses, statistics by name), each "
            f"with a number per token, {tuple(log_probs.shape)}, for loss_agg_mode; write `return "
            f"losses, {{}}`. It returned {_shown(returned)}"
        )

    def _fields(self, micro: Batch, log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The columns that the loss uses, including those computed from the current log-probs."""
        columns = {"loss_mask": mask}
        if self.interpolates:
            inputs = (log_probs, micro["old_log_probs"], micro["prox_alpha"])
            columns["prox_log_probs"] = interpolate(
                *(under_mask(values, mask) for values in inputs)
            )

        if self.derives_old and "old_log_probs" in (
            *self.policy_loss.reads,
            *self.policy_loss.optional,
        ):
            if "old_log_probs" in micro:
                columns["old_log_probs"] = micro["old_log_probs"]
            else:
                columns["old_log_probs"] = log_probs.detach()

        names = [
            *self.policy_loss.reads,
            *(name for name in self.policy_loss.optional if name in micro),
        ]
        for name in names:
            if name not in columns:
                columns[name] = _in_dtype(micro[name], log_probs)
        if self.distillation is not None and "advantages" in columns:
            columns["advantages"] = self.distillation.advantages(
                columns["advantages"], log_probs, micro
            )
        return columns


@dataclass(eq=False)
class ValueObjective(_Objective):
    """The critic's clipped value loss. Metrics: `loss`, `vf_loss`, `vf_clipfrac`, `vpred_mean`.

    Raises ValueError for an unknown mode, or one that needs a missing `loss_scale_factor`.
    """

    outputs: tuple[str, ...] = field(default=("values",), init=False)
    reads = ("values", "returns", "loss_mask")
    cliprange_value: float | None = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    value_loss: ValueLoss = "mse"
    huber_delta: float = 10.0

    def __post_init__(self) -> None:
        check_scale(self.loss_agg_mode, self.loss_scale_factor)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss and sums. outputs: values, padded
        `(bs, response_length)`."""
        values = outputs["values"]
        old, returns, mask = (_in_dtype(micro[name], values) for name in self.reads)
        per_token, stats = compute_value_loss(
            values,
            old,
            returns,
            mask,
            cliprange_value=self.cliprange_value,
            value_loss=self.value_loss,
            huber_delta=self.huber_delta,
        )
        weights = token_weights(mask, self.loss_agg_mode, counts, self.loss_scale_factor)
        loss = weighted_sum(per_token, weights)
        sums = {
            _PER_TOKEN + name: under_mask(value, mask).double().sum()
            for name, value in stats.items()
        }

        return loss, _without_gradient({"loss": loss, "vf_loss": loss} | sums)


class SFTObjective(_Objective):
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens under `loss_mask`.
    Metric: `loss`."""

    outputs: tuple[str, ...] = ("log_probs",)
    reads = ("loss_mask",)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss. outputs: log_probs, padded
        `(bs, response_length)`."""
        weights = token_weights(micro["loss_mask"], "token-mean", counts)
        loss = weighted_sum(-outputs["log_probs"], weights)
        return loss, _without_gradient({"loss": loss})


class PairObjective(_Objective):
    """Bradley-Terry loss of a reward model: mean over pairs of −log σ(chosen − rejected). A text's
    score is the one at its last token; the rows of a pair are adjacent. Metrics: `loss`, `accuracy`
    (the share of pairs whose chosen text scores higher), `margin` (the mean of chosen −
    rejected)."""

    outputs: tuple[str, ...] = ("text_scores",)
    whole_groups = True
    reads = ("loss_mask",)

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss. outputs: text_scores, padded
        `(bs, response_length)`."""
        scores = outputs["text_scores"]
        ends = micro.lengths("response").to(scores.device) - 1
        chosen, rejected = scores.gather(1, ends[:, None]).view(-1, 2).unbind(1)
        margins = chosen - rejected
        num_pairs = counts["rows"] / 2
        columns = {
            "loss": -logsigmoid(margins),
            "accuracy": (margins > 0).double(),
            "margin": margins.double(),
        }
        sums = {name: column.sum() / num_pairs for name, column in columns.items()}

        return sums["loss"], _without_gradient(sums)


@dataclass(eq=False)
class PreferenceObjective(_Objective):
    """The mean over pairs of a preference loss; the rows of a pair are adjacent, the chosen
    response first.

    Metrics, means over pairs with TRL's names: `loss`, `rewards/chosen`, `rewards/rejected`,
    `rewards/margins`, `rewards/accuracies` (the share of pairs whose chosen response has the higher
    reward), `logps/chosen`, `logps/rejected`. Raises ValueError for an unknown loss or option.
    """

    outputs: tuple[str, ...] = field(default=("log_probs",), init=False)
    whole_groups = True

    loss: str | PreferenceLoss = "dpo"
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.loss, str):
            self.preference_loss = find_preference_loss(self.loss)
        else:
            self.preference_loss = self.loss
        self.options = self.preference_loss.call_options(self.options)

    @property
    def reads(self) -> tuple[str, ...]:
        if self.preference_loss.has_reference:
            return ("loss_mask", "ref_log_prob")
        return ("loss_mask",)

    def counts(self, batch: Batch) -> Counts:
        """Also `chosen_tokens`: those of the chosen responses."""
        mask = batch["loss_mask"]
        return {**super().counts(batch), "chosen_tokens": float((mask[::2] > 0).sum())}

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss, and of the means over pairs. outputs: log_probs,
        padded `(bs, response_length)`."""
        num_pairs = counts["rows"] / 2
        values = self.values(outputs["log_probs"], micro, counts)
        losses, chosen, rejected = self.compare(values)

        columns = {
            "loss": losses,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).double(),
            "logps/chosen": values["chosen"],
            "logps/rejected": values["rejected"],
        }
        sums = {name: column.sum() / num_pairs for name, column in columns.items()}
        return sums["loss"], _without_gradient(sums)

    def values(self, log_probs: Tensor, micro: Batch, counts: Counts) -> dict[str, Tensor]:
        """What a loss may read, `(pairs,)` each. log_probs: padded `(bs, response_length)`. counts:
        of the whole mini-batch."""
        mask = micro["loss_mask"]
        summed = under_mask(log_probs, mask).sum(-1)
        tokens = (mask > 0).sum(-1).to(summed.dtype)
        values = {
            "chosen": summed[::2],
            "rejected": summed[1::2],
            "chosen_tokens": tokens[::2],
            "rejected_tokens": tokens[1::2],
        }
        mean_tokens = max(counts["chosen_tokens"], 1.0) / (counts["rows"] / 2)
        values["nll"] = -values["chosen"] / mean_tokens

        if self.preference_loss.has_reference:
            reference = under_mask(_in_dtype(micro["ref_log_prob"], summed), mask).sum(-1)
            values |= {"ref_chosen": reference[::2], "ref_rejected": reference[1::2]}
        return values

    def compare(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The losses, and the rewards of chosen and rejected responses, `(pairs,)` each. Raises
        UserError if the loss returns others."""
        read = {name: values[name] for name in self.preference_loss.reads}
        returned: Any = self.preference_loss.fn(**read, **self.options)
        wanted = values["chosen"].shape

        if not (
            isinstance(returned, tuple)
            and len(returned) == 3
            and all(isinstance(each, Tensor) and each.shape == wanted for each in returned)
        ):
            raise UserError(
                f"preference loss '{self.preference_loss.name}' must return (losses, rewards of "
                "the chosen responses, rewards of the rejected ones), each with a number per pair, "
                f"{tuple(wanted)}. It returned {_shown(returned)}"
            )
        return returned


@dataclass(eq=False)
class KTOObjective(_Objective):
    """The mean over responses of KTO's loss. Its baseline is the mean log-ratio of policy and
    reference over the mini-batch's mismatched responses, not below 0; see `data/mismatched.py`.

    Metrics: `loss`, `kl` (the baseline), and with TRL's names means over desirable and over other
    responses: `rewards/chosen`, `rewards/rejected`, `logps/chosen`, `logps/rejected`; and
    `rewards/margins`. A mini-batch without responses of a kind has no metrics of it.
    """

    outputs: tuple[str, ...] = field(default=("log_probs",), init=False)
    reads = ("loss_mask", "ref_log_prob", "desirable")

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def counts(self, batch: Batch) -> Counts:
        """Also the numbers of desirable and of other responses, and the sum and the number of the
        mismatched responses' log-ratios, NaN where there is none."""
        desirable = float(batch["desirable"].sum())
        log_ratios = batch["mismatched_log_ratio"]
        return {
            **super().counts(batch),
            "chosen": desirable,
            "rejected": len(batch) - desirable,
            "mismatched": float((~log_ratios.isnan()).sum()),
            "mismatched_log_ratio": float(log_ratios.nansum()),
        }

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss and sums. outputs: log_probs, padded
        `(bs, response_length)`."""
        mask = micro["loss_mask"]
        log_probs = under_mask(outputs["log_probs"], mask).sum(-1)
        reference = under_mask(_in_dtype(micro["ref_log_prob"], log_probs), mask).sum(-1)
        desirable = micro["desirable"]
        losses, rewards = compute_kto_loss(
            log_probs - reference,
            desirable,
            self.baseline(counts),
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = losses.sum() / counts["rows"]

        sums: Sums = {"loss": loss}
        for kind, own in (("chosen", desirable), ("rejected", ~desirable)):
            number = max(counts[kind], 1.0)
            sums[f"rewards/{kind}"] = rewards[own].sum() / number
            sums[f"logps/{kind}"] = log_probs[own].sum() / number
        return loss, _without_gradient(sums)

    def baseline(self, counts: Counts) -> float:
        mean = counts["mismatched_log_ratio"] / max(counts["mismatched"], 1.0)
        return max(mean, 0.0)

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        found = {**sums, "kl": self.baseline(counts)}
        for kind in ("chosen", "rejected"):
            if not counts[kind]:
                del found[f"rewards/{kind}"], found[f"logps/{kind}"]

        if counts["chosen"] and counts["rejected"]:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


def _shown(returned: object) -> str:
    """What a loss returned, with the shapes of tensors."""
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, tuple):
        return ", ".join(map(_shown, returned))
    if isinstance(returned, Mapping):
        return str({name: _shown(value) for name, value in returned.items()})
    return repr(returned)[:80]


def _in_dtype(column: Tensor, outputs: Tensor) -> Tensor:
    """Numbers in the dtype of the model's outputs; those of scores are float64."""
    if column.is_floating_point():
        return column.to(outputs.dtype)
    return column


def _without_gradient(sums: Mapping[str, Tensor | float]) -> Sums:
    """The sums stay on their device: the caller reads all of them at once."""
    return {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in sums.items()
    }
