"""Check: each sample has the advantages that the registered estimator gives it."""

from collections.abc import Mapping

from torch import Tensor

from distflow.checks.check import NOT_APPLICABLE, Wrong, check, is_builtin
from distflow.checks.recorded_step import RecordedStep
from distflow.data.batch import Batch
from distflow.graph import BoundNode
from distflow.import_target import innermost, shown_name

LIMIT = 1e-4


@check(
    "advantages",
    "the estimator, called again, gives the same advantages and returns; with the scope group "
    "also for one group alone",
    needs="an estimator of the training loop; for your own a difference is a warning",
    limit=f"{LIMIT:g}",
)
def check_advantages(recorded: RecordedStep) -> str | None:
    """Called when the node of the estimator has run."""
    nodes = recorded.run.pipeline.nodes
    node = next((node for node in nodes if "advantages" in node.contract.writes), None)
    if node is None or "advantages" not in recorded.batch:
        return NOT_APPLICABLE

    batch = recorded.batch
    rows = list(range(len(batch)))
    if node.contract.scope != "global":
        if not rows:  # other ranks have all samples of the step
            return None
        # alone it is as wide as the batch
        groups = batch["group_index"].tolist()
        longest = groups[int(batch.lengths("response").argmax())]
        rows = [row for row, group in enumerate(groups) if group == longest]

    alone = batch.select(rows)
    again = _tensors(recorded.run.call_estimator(alone), alone)
    if not again:
        return "no estimator of the training loop writes advantages"

    for name, values in zip(("advantages", "returns"), again, strict=False):
        if name not in alone:
            continue

        wrong = _first_wrong(alone, alone[name], values)
        if wrong is None:
            continue
        if not is_builtin(node.fn):
            recorded.run.warn(_users_fault(node))
            return "the estimator is yours, and does not depend on its group alone"

        row, token = wrong
        raise Wrong(
            f"{name} of sample {alone['uid'][row]} is {float(alone[name][row, token]):g} at token "
            f"{token}, but the estimator, called again, gives {float(values[row, token]):g}: "
            "advantages were assigned to other samples, or changed after they were computed"
        )

    return None


def _first_wrong(batch: Batch, found: Tensor, wanted: Tensor) -> tuple[int, int] | None:
    """Row and token of the first difference under the mask."""
    mask = batch["response_mask"] > 0
    gap = (found.double() - wanted.double()).abs()
    same = (gap <= LIMIT * wanted.double().abs().clamp(min=1.0)) | (found.isnan() & wanted.isnan())
    places = (mask & ~same).nonzero()
    if len(places):
        return (int(places[0, 0]), int(places[0, 1]))
    return None


def _tensors(output: object, batch: Batch) -> list[Tensor]:
    """The returned tensors, `(bs, response_length)`."""
    output = getattr(output, "batch", output)
    if isinstance(output, Mapping | Batch):
        output = [output[name] for name in ("advantages", "returns") if name in output]
    values = output if isinstance(output, tuple | list) else (output,)

    tensors = []
    for tensor in values:
        if isinstance(tensor, Tensor):
            tensors.append(batch.pad(tensor, "response") if tensor.dim() == 1 else tensor)

    return tensors


def _users_fault(node: BoundNode) -> str:
    return (
        f"the estimator {shown_name(innermost(node.fn))} gives different advantages in a second "
        "call, for the same samples or one group of them: it mixes groups, is not deterministic, "
        'or something changes them after it. If it is to mix them, register it with scope="global"'
        "; else multiply by the mask before summing, and make it deterministic"
    )
