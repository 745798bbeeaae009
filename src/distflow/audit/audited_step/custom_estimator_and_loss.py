"""Check: a user's estimator or loss gives finite numbers, reads nothing outside the mask, and keeps
groups apart."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.scalar_loss_adapter import ScalarLossAdapter
from distflow.audit.check import NOT_APPLICABLE, check, is_builtin
from distflow.audit.record_groups_and_updates import UpdateRecord
from distflow.audit.recorded_step import RecordedStep
from distflow.data.batch import Batch
from distflow.import_target import innermost, shown_name

GARBAGE = 1e3
WIDTH = 3
LIMIT = 1e-4
Arguments = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments."""
Call = Callable[[Sequence[object], Mapping[str, object]], tuple[Tensor, ...]]


@check(
    "user_code",
    "a user's estimator or loss gives finite numbers, reads nothing outside the mask, and keeps "
    "groups apart unless "
    "its scope is global; a failure is a warning, and the run continues",
    needs="a deterministic function with a supported signature",
    limit=f"{LIMIT:g}",
)
def audit_custom_functions(recorded: RecordedStep) -> str | None:
    """Findings are warnings, and the run continues: a user may have reasons to break these
    rules."""
    estimator = _estimator(recorded)
    losses = _losses(recorded)
    if estimator is None and losses is None:
        return NOT_APPLICABLE
    findings = [*(estimator or ()), *(losses or ())]
    for message in findings:
        recorded.run.warn(message)
    return findings[0] if findings else None


def _estimator(recorded: RecordedStep) -> list[str] | None:
    """Findings about the user's estimator; None if there is none."""
    inputs = None if recorded.is_ours("advantages") else recorded.run.estimator(recorded.batch)
    if inputs is None:
        return None
    fn, positional, keyword = inputs
    name = f"the estimator {shown_name(innermost(fn))}"
    mask = recorded.batch["response_mask"]

    def call(positional: Sequence[object], keyword: Mapping[str, object]) -> tuple[Tensor, ...]:
        return _tensors(fn(*positional, **keyword), mask)

    found = _examine(
        name, call, (positional, keyword), mask, "advantages", [*inspect.signature(fn).parameters]
    )
    if "random" not in found and _mixes_groups(recorded):
        found["groups"] = (
            f"{name} mixes groups: for one group alone it gives different advantages than in the "
            "batch. "
            'If that is intended, register it with scope="global"'
        )
    return list(found.values())


def _mixes_groups(recorded: RecordedStep) -> bool:
    node = next(
        node for node in recorded.run.pipeline.nodes if "advantages" in node.contract.writes
    )
    groups = recorded.batch["group_index"].tolist()
    if node.contract.scope == "global" or len(set(groups)) < 2:
        return False

    def advantages(batch: Batch) -> tuple[Tensor, ...]:
        inputs = recorded.run.estimator(batch)
        assert inputs is not None, "called only if there is one"
        fn, positional, keyword = inputs
        return _tensors(fn(*positional, **keyword), batch["response_mask"])

    # alone it is as wide as the batch
    longest = groups[int(recorded.batch.lengths("response").argmax())]
    rows = [row for row, group in enumerate(groups) if group == longest]
    alone = recorded.batch.select(rows)
    together = tuple(tensor[rows] for tensor in advantages(recorded.batch))
    return not _equal(advantages(alone), together)


def _losses(recorded: RecordedStep) -> list[str] | None:
    """Findings about the user's losses; None if there is none."""
    # an empty update has none
    updates = [update for update in recorded.updates_of("actor") if update.micros]
    objective = updates[0].loss if updates else None
    if not isinstance(objective, PolicyObjective):
        return None
    parts = [(None, objective), *objective.domains.items()]
    others = [*objective.domains]
    found = [_loss(updates[0], part, domain, others) for domain, part in parts]
    return (
        None
        if all(each is None for each in found)
        else [finding for each in found for finding in each or ()]
    )


def _loss(
    update: UpdateRecord, objective: PolicyObjective, domain: str | None, others: list[str]
) -> list[str] | None:
    """Findings about the user's loss of a domain, None for the rows of all domains but `others`."""
    fn: Callable[..., Any] = objective.policy_loss.fn
    loss = objective.policy_loss
    micro = update.micros[0]
    if is_builtin(fn):
        return None
    if objective.scalar_loss is not None:
        return _scalar_loss(objective.scalar_loss)
    name = f"the loss '{loss.name}'"
    uids = update.uids
    whole = update.batch
    batch = whole.select([uids.index(uid) for uid in micro.uids])
    mask = batch["loss_mask"]
    if others:
        rows = [(each if each in others else None) == domain for each in batch["domain"]]
        mask = mask * torch.tensor(rows)[:, None]
    names = [*loss.reads, *(name for name in loss.optional if name in batch)]
    fields = {name: batch[name] for name in names if name in batch} | {"loss_mask": mask}
    fields["log_probs"] = micro.outputs["log_probs"]
    if objective.derives_old and "old_log_probs" in loss.reads:
        fields.setdefault("old_log_probs", micro.outputs["log_probs"].detach())
    if lacking := {*loss.reads} - fields.keys():
        return [f"{name} reads {', '.join(sorted(lacking))}, which the audit does not have"]

    def call(positional: Sequence[object], keyword: Mapping[str, Any]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return _tensors(fn(**keyword, **objective.options)[0], mask)

    found = _examine(name, call, ((), fields), mask, "losses of tokens inside it")
    gradient = micro.gradients.get("log_probs")
    if gradient is None or "random" in found:
        return list(found.values())
    if bool(((batch["loss_mask"] == 0) & (gradient != 0)).any()):
        found["gradient"] = f"{name} sends a gradient to tokens outside the mask"
    if (
        "advantages" in batch
        and not bool((gradient * mask).any())
        and bool((batch["advantages"] * mask).any())
    ):
        found["no gradient"] = f"{name} sends no gradient to any token, though advantages are not 0"
    return list(found.values())


def _scalar_loss(adapter: ScalarLossAdapter) -> list[str] | None:
    """Findings about a loss with verl's signature, which returns a single number; None if it was
    never called."""
    if adapter.uses_agg_loss is None:
        return None
    if adapter.uses_agg_loss:
        return []
    return [
        f"the loss '{adapter.loss.name}' does not aggregate with distflow.algorithms.agg_loss: "
        "micro-batches are "
        "weighted by their tokens, so the loss may depend on how a mini-batch is split"
    ]


def _examine(
    name: str,
    call: Call,
    arguments: Arguments,
    mask: Tensor,
    result: str,
    parameters: Sequence[str] = (),
) -> dict[str, str]:
    """Findings by kind that apply to any function. call: returns tensors under the mask. result:
    for messages. parameters: the names of positional arguments."""
    positional, keyword = first = _cloned(arguments)
    found = call(*first)
    findings = dict[str, str]()
    named = {**dict(zip(parameters, positional, strict=False)), **keyword}
    if changed := [
        name for name, value in named.items() if isinstance(value, Tensor) and value._version
    ]:
        what = "changes its argument " + ", ".join(changed) + " in place"
        findings["in place"] = (
            f"{name} {what}: other functions may get the changed numbers. Change a clone"
        )
    if not all(bool(tensor[:, : mask.shape[1]][mask > 0].isfinite().all()) for tensor in found):
        findings["not finite"] = f"{name} gives non-finite numbers on tokens of the policy"
    if not _equal(found, call(*_cloned(arguments))):
        what = f"a second call with the same arguments gives different {result}"
        findings["random"] = f"{name} is not deterministic: {what}; it cannot be audited"
    elif not _equal(found, _widened(call, arguments, mask)):
        findings["outside"] = (
            f"{name} reads outside the mask: with other numbers after the responses' last tokens "
            "it gives different "
            f"{result}. These numbers depend on which samples share the batch; multiply by the "
            "mask before summing"
        )
    return findings


def _cloned(arguments: Arguments) -> Arguments:
    positional, keyword = arguments
    clone = lambda value: value.clone() if isinstance(value, Tensor) else value  # noqa: E731
    return [clone(value) for value in positional], {
        name: clone(value) for name, value in keyword.items()
    }


def _widened(call: Call, arguments: Arguments, mask: Tensor) -> tuple[Tensor, ...]:
    """The result of the call with garbage outside the mask and in extra columns, cut to the old
    width."""

    def spoil(value: object, is_mask: bool) -> object:
        if not isinstance(value, Tensor) or value.shape != mask.shape:
            return value
        if is_mask or not value.is_floating_point():
            return torch.nn.functional.pad(value, (0, WIDTH))
        outside = torch.where(mask > 0, value, GARBAGE)
        return torch.nn.functional.pad(outside, (0, WIDTH), value=GARBAGE)

    def masks(value: object) -> bool:
        is_binary = isinstance(value, Tensor) and bool(((value == 0) | (value == 1)).all())
        return isinstance(value, Tensor) and is_binary and bool(((value > 0) <= (mask > 0)).all())

    positional, keyword = arguments
    found = call(
        [spoil(value, masks(value)) for value in positional],
        {name: spoil(value, name.endswith("mask")) for name, value in keyword.items()},
    )
    return tuple(tensor[:, : mask.shape[1]] for tensor in found)


def _tensors(output: object, mask: Tensor) -> tuple[Tensor, ...]:
    """The returned tensors under the mask. Raises ValueError if there are none."""
    output = getattr(output, "batch", output)
    if isinstance(output, Mapping):
        output = tuple(output.values())
    values = output if isinstance(output, tuple) else (output,)
    tensors = tuple(value for value in values if isinstance(value, Tensor) and value.dim() == 2)
    if not tensors:
        raise ValueError("it returned no tensor (bs, response_length)")
    inside = [
        torch.nn.functional.pad(mask, (0, tensor.shape[1] - mask.shape[1])) > 0
        for tensor in tensors
    ]
    return tuple(torch.where(own, tensor, 0) for own, tensor in zip(inside, tensors, strict=True))


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=LIMIT, atol=LIMIT, equal_nan=True)
        for a, b in pairs
    )
