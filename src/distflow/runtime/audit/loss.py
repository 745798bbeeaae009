"""Claim: the loss is the sum of its terms, and its gradient by each token's log-prob is what the formula says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.config import Config
from distflow.config.program import is_rl
from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import BUILTIN, Evidence, Sample, doubles, module_of
from distflow.runtime.audit.policy_losses import FORMULAS
from distflow.runtime.audit.rewards import kl
from distflow.runtime.audit.watch import UpdateRecord

LIMIT, FLOOR, KINK = 5e-3, 2e-5, 1e-5
MOST_TOKENS = 2**18


@dataclass
class Row:
    """A sample of a mini-batch: what the model gave, and the gradients that came back, by output, `(tokens,)`."""

    sample: Sample
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


Total = Callable[[Sequence[Row], Sequence[Mapping[str, Tensor]]], Tensor]


def prove(evidence: Evidence) -> str | None:
    if evidence.parts.num_ranks > 1:
        return "a mini-batch lies on several ranks"
    seen, why, tokens = 0, "no update was seen", 0
    for update in evidence.updates:
        total = _formula(evidence, update)
        if isinstance(total, str):
            why = total
            continue
        tokens += int(update.batch.lengths("response").sum())
        if seen and tokens > MOST_TOKENS:
            break
        _prove_update(evidence, update, total)
        seen += 1
    return None if seen else why


def _formula(evidence: Evidence, update: UpdateRecord) -> Total | str:
    """The loss of a mini-batch as a function of the model's outputs, or why there is none."""
    config = evidence.config
    if update.role == "critic":
        return lambda rows, values: _value_loss(config, rows, values)
    if not is_rl(config):
        return lambda rows, values: _likelihood(rows, values)
    name = config.actor_rollout_ref.actor.policy_loss
    fn = getattr(getattr(update.loss, "loss", None), "fn", None)
    if fn is None or not module_of(fn).startswith(BUILTIN):
        return f"the loss '{name}' is the user's"
    if name not in FORMULAS:
        return f"the auditor has no formula of the loss '{name}'"
    return lambda rows, values: _policy_loss(config, rows, values)


def _prove_update(evidence: Evidence, update: UpdateRecord, total: Total) -> None:
    rows = _rows(evidence, update)
    values = [{name: doubles(output).requires_grad_() for name, output in row.outputs.items()} for row in rows]
    loss = total(rows, values)
    found, wanted = float(update.metrics["loss"]), float(loss.detach())
    if not abs(found - wanted) <= LIMIT * abs(wanted) + FLOOR * 10:
        raise Wrong(
            f"the loss of a mini-batch of the {update.role} is {found:.6g}, but the sum of its terms as the config "
            "names "
            f"them is {wanted:.6g}"
        )
    expected = _gradients(loss, values)
    # Where the formula has a kink within rounding of a token's log-prob, either side may be right.
    sides = [_gradients(total(rows, moved), moved) for moved in (_moved(values, KINK), _moved(values, -KINK))]
    for name in update.loss.outputs:
        largest = max((float(parts[name].abs().max()) for parts in expected if parts[name].numel()), default=0.0)
        for row, want, one, other in zip(rows, expected, *sides, strict=True):
            slack = (one[name] - other[name]).abs() + LIMIT * want[name].abs() + FLOOR * largest
            wrong = ~((row.gradients[name] - want[name]).abs() <= slack)
            if bool(wrong.any()):
                raise Wrong(_message(update, name, row, want[name], int(wrong.nonzero()[0])))


def _message(update: UpdateRecord, name: str, row: Row, want: Tensor, token: int) -> str:
    found = float(row.gradients[name][token])
    hint = "another coefficient, mean, clip or term than the config names"
    if not float(want[token]):
        hint = "a token outside the mask, or a sample without a verdict, is trained on"
    elif not found:
        hint = "a token that should be trained on is left out, or a term is off"
    elif found * float(want[token]) < 0:
        hint = "its sign is turned"
    return (
        f"the gradient of the {update.role}'s loss by {name} is {found:.4g} at token {token} of {len(want)} of sample "
        f"{row.sample['uid']}, but the formula gives {float(want[token]):.4g}: {hint}"
    )


def _rows(evidence: Evidence, update: UpdateRecord) -> list[Row]:
    """The samples of a mini-batch. Raises Wrong where the micro-batches are not exactly its samples."""
    known = {sample["uid"]: sample for sample in evidence.samples}
    rows: list[Row] = []
    for micro in update.micros:
        for place, uid in enumerate(micro.uids):
            length = len(known[uid]["response_ids"])
            outputs = {name: values[place, :length] for name, values in micro.outputs.items()}
            gradients = {
                name: doubles(micro.gradients[name][place, :length])
                if name in micro.gradients
                else torch.zeros(length).double()
                for name in micro.outputs
            }
            rows.append(Row(known[uid], outputs, gradients))
    taken, wanted = sorted(str(row.sample["uid"]) for row in rows), sorted(update.uids)
    if taken != wanted:
        raise Wrong(
            f"the micro-batches of a mini-batch hold {len(taken)} samples, the mini-batch {len(wanted)}: "
            "some were left out or taken twice"
        )
    return rows


def _gradients(loss: Tensor, values: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    leaves = [value for row in values for value in row.values()]
    if not loss.requires_grad:
        return [{name: torch.zeros_like(value) for name, value in row.items()} for row in values]
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    return [
        {name: torch.zeros_like(value) if (g := next(found)) is None else g for name, value in row.items()}
        for row in values
    ]


def _moved(values: Sequence[Mapping[str, Tensor]], by: float) -> list[dict[str, Tensor]]:
    return [{name: (value.detach() + by).requires_grad_() for name, value in row.items()} for row in values]


def _policy_loss(config: Config, rows: Sequence[Row], values: Sequence[Mapping[str, Tensor]]) -> Tensor:
    actor = config.actor_rollout_ref.actor
    options = {**vars(actor), **actor.policy_loss_kwargs}
    formula, losses = FORMULAS[actor.policy_loss], []
    for row, outputs in zip(rows, values, strict=True):
        sample, counted = row.sample, row.sample["loss_mask"] > 0
        now, old = outputs["log_probs"][counted], doubles(sample["old_log_probs"])[counted]
        loss = formula(now, doubles(sample["advantages"])[counted], old, sample, options)
        if "rollout_is_weights" in sample:
            loss = loss * doubles(sample["rollout_is_weights"])[counted]
        if actor.entropy_coef:
            loss = loss - actor.entropy_coef * outputs["entropy"][counted]
        if actor.use_kl_loss:
            loss = loss + actor.kl_loss_coef * _kl(now - doubles(sample["ref_log_prob"])[counted], actor.kl_loss_type)
        losses.append(loss)
    scale = actor.loss_scale_factor or float(config.data.max_response_length)
    return aggregate(losses, actor.loss_agg_mode, scale)


def _kl(difference: Tensor, kind: str) -> Tensor:
    value = kl(difference, kind)
    return difference**2 / 2 - (difference**2 / 2).detach() + value.detach() if kind.endswith("+") else value


def _value_loss(config: Config, rows: Sequence[Row], values: Sequence[Mapping[str, Tensor]]) -> Tensor:
    losses = []
    for row, outputs in zip(rows, values, strict=True):
        counted = row.sample["loss_mask"] > 0
        now, old, returns = (
            outputs["values"][counted],
            doubles(row.sample["values"])[counted],
            doubles(row.sample["returns"])[counted],
        )
        near = now.clamp(old - config.critic.cliprange_value, old + config.critic.cliprange_value)
        losses.append(torch.maximum((now - returns) ** 2, (near - returns) ** 2) / 2)
    scale = config.actor_rollout_ref.actor.loss_scale_factor or float(config.data.max_response_length)
    return aggregate(losses, config.critic.loss_agg_mode, scale)


def _likelihood(rows: Sequence[Row], values: Sequence[Mapping[str, Tensor]]) -> Tensor:
    losses = [-v["log_probs"][row.sample["loss_mask"] > 0] for row, v in zip(rows, values, strict=True)]
    return aggregate(losses, "token-mean", 1.0)


def aggregate(losses: Sequence[Tensor], mode: str, scale: float) -> Tensor:
    """One number of the losses of each sample's tokens, `(tokens that count,)`; samples without one are left out."""
    losses = [loss for loss in losses if len(loss)]
    if not losses:
        return torch.zeros((), dtype=torch.float64)
    if mode == "token-mean":
        return torch.cat(list(losses)).mean()
    divisors = {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": scale}
    sums = [loss.mean() if mode == "seq-mean-token-mean" else loss.sum() / divisors[mode] for loss in losses]
    return torch.stack(sums).mean()


CHECK = Check(
    "loss",
    "the loss of each mini-batch is the sum of its terms, and its gradient by each token's log-prob, entropy and "
    "value is "
    "what the formulas of the config say: mask, sign, mean, coefficient, clip",
    "a built-in loss of which the auditor has the formula; one rank",
    f"{LIMIT:g} relative",
    prove,
)
