"""Claim: the reference does not move."""

import torch
from torch import Tensor, nn

from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence
from distflow.runtime.audit.log_probs import dtype_of, without_adapter
from distflow.runtime.audit.plain_model import log_probs_of, logits_of, plainly, vocabulary_of

NUM_ROWS, NUM_TOKENS, STRIDE = 2, 32, 7919
EXACT, ROUNDED = 3e-5, 0.02


def prove(evidence: Evidence) -> str | None:
    model = getattr(evidence.parts.ref, "model", None)
    if not isinstance(model, nn.Module):
        return "" if evidence.parts.ref is None else "the reference does not show its inside"
    now = _on_fixed_tokens(evidence, model)
    then = evidence.state.setdefault("reference", now.tolist())
    gap = float((now - torch.tensor(then, dtype=torch.float64)).abs().mean())
    limit = EXACT if evidence.parts.exact else ROUNDED
    if not gap <= limit:
        raise Wrong(
            f"the reference moved: on fixed tokens its log-probs differ by {gap:.3g} on average from those at the "
            f"start of the run (limit {limit:g}). It shares weights with the policy, or something trains it"
        )
    return None


def _on_fixed_tokens(evidence: Evidence, model: nn.Module) -> Tensor:
    """Log-probs of tokens from all over the vocabulary, float64."""
    size = vocabulary_of(model)
    ids = [[(STRIDE * i + row) % size for i in range(NUM_TOKENS)] for row in range(NUM_ROWS)]
    reference = evidence.parts.ref
    with torch.no_grad(), plainly(model, adapter=not without_adapter(reference), compute_dtype=dtype_of(reference)):
        logits = logits_of(evidence.parts.turns.run, model, [(one[:1], one[1:]) for one in ids])
        return torch.cat([log_probs_of(rows, one[1:], 1.0) for rows, one in zip(logits, ids, strict=True)])


CHECK = Check(
    "reference",
    "on fixed tokens the reference gives the log-probs that it gave at the start of the run",
    "a program with a reference",
    f"mean {EXACT:g} (bfloat16: {ROUNDED:g})",
    prove,
)
