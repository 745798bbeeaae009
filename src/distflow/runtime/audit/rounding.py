"""How far low precision moves what a model says: its own forward in float32 beside the one in that precision."""

import torch
from torch import Tensor

from distflow.runtime.audit.evidence import Evidence, Sample
from distflow.runtime.audit.log_probs import dtype_of, ids_of, proved_samples
from distflow.runtime.audit.plain_model import logits_of, plain_scores, plainly
from distflow.runtime.audit.watch import OpenEngine


def moved_draws(evidence: Evidence) -> float:
    """By how much probability a draw moves between the policy's precision and float32: the root mean square, over the
    tokens of the proved samples, of the change in the mass of the tokens before them in the vocabulary.

    What the rollout engine did has no part in it. 0 where the model can only be run in one precision: where its train
    engine does not show it, or its weights lie over ranks.
    """
    actor, samples = evidence.parts.actor, proved_samples(evidence)
    if not isinstance(actor, OpenEngine) or not samples:
        return 0.0
    low = _masses_below(evidence, actor, samples, dtype_of(actor))
    return float((low - _masses_below(evidence, actor, samples, None)).square().mean().sqrt())


def _masses_below(evidence: Evidence, actor: OpenEngine, samples: list[Sample], dtype: torch.dtype | None) -> Tensor:
    """Float64 `(response tokens of all samples,)`."""
    tokens = [ids_of(sample) for sample in samples]
    with torch.no_grad(), plainly(actor.model, compute_dtype=dtype):
        found = logits_of(evidence.parts.turns.run, actor.model, tokens)
        scores = [
            plain_scores(logits, response, evidence.sampling(sample))
            for logits, (_, response), sample in zip(found, tokens, samples, strict=True)
        ]
    return torch.cat([one.below for one in scores])
