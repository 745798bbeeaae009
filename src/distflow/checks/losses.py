"""Check: the loss of a mini-batch and its gradients are those that the registered loss gives
without packing, micro-batches and ranks.

A few sequences go through the model's own padded forward and backward right before the update, and
through the engine's packed pass. The loss function is called once more for the whole mini-batch,
and for the few sequences alone. So packing, shared prefixes, micro-batches and the scaling over
ranks are compared with plain computations, without a second formula of the loss."""

import math
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distflow.algorithms.objectives import PolicyObjective, PreferenceObjective
from distflow.checks.check import Wrong, check, is_builtin
from distflow.checks.log_probs import dtype_of, ids_of, joined_logits, sequences_of
from distflow.checks.plain_forward import (
    logits_of,
    plainly,
    vocabulary_of,
)
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import Sample, doubles, own_tokens, samples_of
from distflow.checks.update_records import OpenEngine, PlainPass, UpdateRecord, striped, trained
from distflow.config.derived_settings import is_rl
from distflow.data.batch import Batch
from distflow.models.sharding import is_spread
from distflow.training.engine import TOP_IDS, LossFn, compares_samples

NUM_SEQUENCES = 2
MOST_TRIED = 16
MOST_ENTRIES = 2**25
"""Logits of a response that is run plainly."""
MOST_TOKENS = 2**18
"""Of a mini-batch whose loss is computed at once."""
LIMIT = 5e-4
FLOOR = 2e-5
KINK = 1e-5
"""A clip within this distance of a token's log-prob may be on either side of it."""
OUTPUT_EXACT = 1e-3
OUTPUT_ROUNDED = 0.15
"""Largest mean difference between the loss's inputs and the outputs of the model's own forward."""
WEIGHT_EXACT = 1e-2
"""Not less, since float32 is rough where weights have grown without bounds."""
WEIGHT_ROUNDED = 0.5
NOISE = 1e-3
"""A smaller gradient, in units of the largest, is compared as if it had this size."""

Outputs = Mapping[str, Tensor]
"""By the name of the output, a value for each response token, sample after sample."""


def run_plainly(recorded: RecordedStep, update: UpdateRecord) -> str | None:
    """Run a few sequences of the mini-batch plainly, right before the update, and compare the
    gradient of sampled weights with that of the engine's packed pass. See `Check.run`."""
    engine = update.engine
    compute = getattr(engine, "compute", None)
    if not isinstance(engine, OpenEngine) or compute is None:
        return "the train engine does not expose its model"
    if "text_scores" in update.loss.outputs:
        return None  # the loss of one text depends on the other one of its pair
    if is_spread(engine.model):
        return "the model is sharded: no pass with gradient is made beside the engine's"

    drawn = _drawn_rows(recorded, update, engine.model)
    if not drawn:
        return "no sequence is short enough"

    names, weights = zip(*striped(trained(engine.model), recorded.step), strict=True)
    plain = PlainPass()
    apart = [_plain_gradients(recorded, update, engine, rows, weights, plain) for rows in drawn]

    outputs = compute(update.batch.select(plain.rows), update.loss.outputs)
    packed_loss = torch.zeros((), device=next(iter(outputs.values())).device)
    for name, values in outputs.items():
        cotangent = torch.cat([own[name] for own in plain.gradients])
        packed_loss = packed_loss + (values * cotangent.to(values)).sum()

    packed = _gradients(packed_loss, weights)

    update.plain = plain
    padded = [torch.stack(of_rows).sum(0).double() for of_rows in zip(*apart, strict=True)]
    norms = [float(gradient.norm()) for gradient in padded]
    if not all(map(math.isfinite, norms)):
        return "a gradient is not finite"

    # The gradient of a bias of keys without positions is rounding alone.
    least = max(1e-9, NOISE * max(norms))
    limit = recorded.limit(WEIGHT_EXACT, WEIGHT_ROUNDED)

    for name, gradient, expected, norm in zip(names, packed, padded, norms, strict=True):
        error = float((gradient.double() - expected).norm()) / max(norm, least)
        if error > limit:
            uids = ", ".join(update.uids[row] for row in plain.rows)
            raise Wrong(
                f"the gradient of {name} by the {update.role}'s loss of samples {uids} differs by "
                f"{error:.3g} (relative; limit {limit:g}) between the packed pass and a padded "
                "one: there is attention between packed sequences, or part of the model gets no "
                "gradient"
            )

    return None


@check(
    "loss",
    "loss and gradient of each mini-batch are those of one call of the loss function for the "
    "whole mini-batch on all ranks; for a few sequences, losses, outputs and gradients of sampled "
    "weights are those of a padded pass of each alone",
    needs="a train engine that exposes its model; for your own loss a difference is a warning",
    limit=f"{LIMIT:g} relative; outputs mean {OUTPUT_EXACT:g} (bfloat16: {OUTPUT_ROUNDED:g}); "
    f"gradients of weights {WEIGHT_EXACT:g} relative (bfloat16: {WEIGHT_ROUNDED:g})",
)
def check_losses(recorded: RecordedStep) -> str | None:
    if not recorded.updates:
        return "no update was recorded"

    why_not = None
    for update in recorded.updates:
        if update.metrics.get("skipped") or not update.micros:
            continue

        _check_reported(update)
        if int(update.batch.lengths("response").sum()) > MOST_TOKENS:
            why_not = f"a mini-batch has more than {MOST_TOKENS:,} tokens"
            continue

        why_not = _check_update(recorded, update) or why_not

    return why_not


def _check_update(recorded: RecordedStep, update: UpdateRecord) -> str | None:
    outputs, gradients = _recorded(update)
    compared = [list(range(len(update.batch)))]
    if update.plain is not None:
        for row, plain in zip(update.plain.rows, update.plain.outputs, strict=True):
            _same_outputs(recorded, update, row, plain, outputs)
        compared += _compared_together(update, update.plain.rows)

    for rows in compared:
        wrong = _wrong_gradients(update, rows, outputs, gradients)
        if not wrong:
            continue
        if _is_users(update.loss):
            recorded.run.warn(_users_fault(update.loss))
            return "the loss is yours, and does not depend on each sample alone"

        raise Wrong(wrong)

    return None


def _check_reported(update: UpdateRecord) -> None:
    reported = float(update.metrics["loss"])
    _, total = update.share
    if not abs(reported - total) <= LIMIT * abs(total) + FLOOR:
        raise Wrong(
            f"the loss of a mini-batch of the {update.role} is reported as {reported:.6g}, but its "
            f"micro-batches on all ranks give {total:.6g}"
        )


def _wrong_gradients(
    update: UpdateRecord, rows: Sequence[int], outputs: Sequence[Outputs], found: Sequence[Outputs]
) -> str:
    """What is wrong in the recorded loss, or its gradients, against a call of the loss function
    with these samples of the mini-batch alone; empty if nothing is."""
    if not rows:
        return ""

    batch = update.batch.select(rows)
    inputs = {name: _column(outputs, rows, name) for name in outputs[rows[0]]}
    loss, expected = call_loss(update.loss, batch, inputs, update.counts)
    share = update.share[0]
    is_whole = len(rows) == len(update.batch)

    for name, wanted in expected.items():
        own = _column(found, rows, name)
        if not len(own):
            continue

        slack = LIMIT * wanted.abs() + FLOOR * wanted.abs().max()
        far = ~((own - wanted).abs() <= slack)
        if bool(far.any()):
            far = ~((own - wanted).abs() <= slack + _jump(update, batch, inputs, name))
        if bool(far.any()):
            place = tuple(far.nonzero()[0].tolist())
            return _message(update, batch, name, own, wanted, place, is_whole)

    if is_whole and not abs(share - loss) <= LIMIT * abs(loss) + FLOOR:
        return (
            f"the loss of a mini-batch of the {update.role} is {share:.6g} over "
            f"{len(update.micros)} micro-batches, but {loss:.6g} if it is computed at once"
        )

    return ""


def _column(outputs: Sequence[Outputs], rows: Sequence[int], name: str) -> Tensor:
    return torch.cat([outputs[row][name] for row in rows])


def _jump(update: UpdateRecord, batch: Batch, inputs: Outputs, name: str) -> Tensor:
    """How far the gradient jumps within rounding of the outputs."""
    sides = []
    for moved in (KINK, -KINK):
        near = {output: values + moved for output, values in inputs.items()}
        sides.append(call_loss(update.loss, batch, near, update.counts)[1][name])
    return (sides[0] - sides[1]).abs()


def call_loss(
    loss: LossFn, batch: Batch, outputs: Outputs, counts: Mapping[str, float]
) -> tuple[float, dict[str, Tensor]]:
    """The loss function's value for these samples as one micro-batch, and its gradient by each
    output, float64 `(tokens,)`. counts: of the whole mini-batch."""
    leaves = dict[str, Tensor]()
    for name in loss.outputs:
        leaves[name] = outputs[name].detach().float().clone().requires_grad_()
    padded = {name: batch.pad(leaf, "response") for name, leaf in leaves.items()}

    value, _ = loss(padded, batch, dict(counts))
    if value.requires_grad:
        gradients = _gradients(value, list(leaves.values()))
    else:
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]

    named = zip(leaves, gradients, strict=True)
    return float(value.detach()), {name: doubles(gradient) for name, gradient in named}


def _recorded(update: UpdateRecord) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The recorded outputs of each sample of the mini-batch, and the gradients with respect to
    them, float64."""
    lengths = update.batch.lengths("response").tolist()
    row_of = {uid: row for row, uid in enumerate(update.uids)}

    outputs: list[dict[str, Tensor]] = [{} for _ in lengths]
    gradients: list[dict[str, Tensor]] = [{} for _ in lengths]
    for micro in update.micros:
        for name, values in micro.outputs.items():
            came_back = micro.gradients.get(name, torch.zeros_like(values))
            for place, uid in enumerate(micro.uids):
                row = row_of[uid]
                outputs[row][name] = doubles(values[place, : lengths[row]])
                gradients[row][name] = doubles(came_back[place, : lengths[row]])

    return outputs, gradients


def _compared_together(update: UpdateRecord, rows: Sequence[int]) -> list[list[int]]:
    """The rows one by one, or those of a prompt group together if the loss compares them."""
    if not compares_samples(update.loss):
        return [[row] for row in rows]

    numbers = update.batch["group_index"].tolist()
    groups = dict[int, list[int]]()
    for row in rows:
        groups.setdefault(numbers[row], []).append(row)
    return list(groups.values())


def _drawn_rows(recorded: RecordedStep, update: UpdateRecord, model: nn.Module) -> list[list[int]]:
    """Rows of a few short sequences of the mini-batch with tokens that count, those together that
    the loss compares."""
    batch = update.batch
    if "number_head" in batch:  # numbers have no softmax
        return []

    lengths = batch.lengths("response").tolist()
    counted = torch.zeros(len(batch)).index_add(0, batch.rows(), batch.flat("loss_mask").float())
    rows = [row for row, number in enumerate(counted.tolist()) if number > 0]
    together = _compared_together(update, rows)
    drawn = random.Random(recorded.step).sample(together, min(MOST_TRIED, len(together)))
    most = MOST_ENTRIES // vocabulary_of(model)
    short = [rows for rows in drawn if all(lengths[row] <= most for row in rows)]

    return short[:NUM_SEQUENCES]


def _plain_gradients(
    recorded: RecordedStep,
    update: UpdateRecord,
    engine: OpenEngine,
    rows: Sequence[int],
    weights: Sequence[nn.Parameter],
    found: PlainPass,
) -> list[Tensor]:
    """The gradient of some weights by the loss of these rows alone, through a padded pass of each,
    which `found` receives."""
    batch = update.batch.select(rows)

    with plainly(engine.model, compute_dtype=dtype_of(engine)):
        flat: list[dict[str, Tensor]] = []
        for sample in samples_of(batch):
            parts = logits_of(nn.Module.__call__, engine.model, sequences_of(sample))
            flat.append(_outputs_of(recorded, update.loss, sample, joined_logits([*parts])))

        found.rows += rows
        found.outputs += [{name: doubles(values) for name, values in each.items()} for each in flat]
        joined = {name: torch.cat([each[name] for each in flat]) for name in flat[0]}
        known = {name: values.detach().cpu() for name, values in joined.items()}
        cotangents = call_loss(update.loss, batch, known, update.counts)[1]
        found.gradients.append(cotangents)
        total = torch.zeros(())
        for name, values in joined.items():
            total = total + (values * cotangents[name].to(values)).sum().cpu()
        return _gradients(total, weights)


def _gradients(scalar: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(scalar, weights, allow_unused=True, materialize_grads=True))


def _outputs_of(
    recorded: RecordedStep, loss: LossFn, sample: Sample, logits: Tensor
) -> dict[str, Tensor]:
    """The outputs that the loss reads, from the logits of the sample's response tokens."""
    if "values" in loss.outputs:
        return {"values": logits[:, 0]}

    ids = torch.tensor(ids_of(sample).response, device=logits.device)
    heat = recorded.temperatures(sample).to(logits) if is_rl(recorded.config) else 1.0
    scores = (logits / heat).log_softmax(-1)
    log_probs = scores.gather(-1, ids[:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    found = {"log_probs": log_probs, "entropy": entropy}
    for name in loss.outputs:
        if name in TOP_IDS:
            found[name] = scores.gather(-1, sample[TOP_IDS[name]].to(logits.device))

    return {name: found[name] for name in loss.outputs}


def _same_outputs(
    recorded: RecordedStep,
    update: UpdateRecord,
    row: int,
    plain: Outputs,
    outputs: Sequence[Outputs],
) -> None:
    """Check that the loss's input is the output of the model's own forward then, at the sampling
    temperature."""
    (sample,) = samples_of(update.batch.select([row]))
    own = (sample["loss_mask"] > 0) & own_tokens(recorded.config, sample, update.role)

    for name, expected in plain.items():
        gap = (outputs[row][name] - expected)[own].abs()
        mean = float(gap.sum() / own.sum().clamp(min=1))
        if not mean <= recorded.limit(OUTPUT_EXACT, OUTPUT_ROUNDED):
            raise Wrong(
                f"the {name} that the {update.role}'s loss is given for sample {sample['uid']} "
                f"differ by {mean:.3g} a token from the model's own forward at the sampling "
                "temperature"
            )


def _is_users(loss: LossFn) -> bool:
    if isinstance(loss, PreferenceObjective):
        return not is_builtin(loss.preference_loss.fn)
    if not isinstance(loss, PolicyObjective):
        return not is_builtin(type(loss))
    parts = [loss, *loss.domains.values()]
    return not all(is_builtin(part.policy_loss.fn) for part in parts)


def _users_fault(loss: LossFn) -> str:
    name = "the loss"
    if isinstance(loss, PolicyObjective):
        name = f"the loss '{loss.policy_loss.name}'"
    elif isinstance(loss, PreferenceObjective):
        name = f"the loss '{loss.preference_loss.name}'"

    return (
        f"{name} gives a sample alone other gradients than in its micro-batch: it reads outside "
        "the mask or other samples, does not aggregate with distflow.algorithms.agg_loss, or is "
        "not deterministic. What it gives depends on which samples share the micro-batch; multiply "
        "by the mask before summing"
    )


def _message(
    update: UpdateRecord,
    batch: Batch,
    name: str,
    found: Tensor,
    expected: Tensor,
    place: tuple[int, ...],
    is_whole: bool,
) -> str:
    row = int(batch.rows()[place[0]])
    token = place[0] - int(batch.lengths("response")[:row].sum())

    alone = "for the sample alone"
    if is_whole:
        alone = "for the whole mini-batch at once"

    return (
        f"the gradient of the {update.role}'s loss by {name} is {float(found[place]):.4g} at token "
        f"{token} of sample {batch.row_names[row]}, but the loss function gives "
        f"{float(expected[place]):.4g} {alone} ({len(update.micros)} micro-batches): another "
        "sample's numbers or tokens outside the mask go into it, a factor of gradient "
        "accumulation, or counts that are not the sums over all ranks"
    )
