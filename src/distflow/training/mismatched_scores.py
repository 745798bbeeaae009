"""Log-probs of the responses to other prompts of `data/mismatched.py`, by the reference and by the
policy as it is now."""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.mismatched import as_responses, summed
from distflow.training.engine import Scorer


def mismatched_log_probs(batch: Batch, scorer: Scorer) -> Tensor:
    """Of each sample's mismatched response, float64 `(bs,)`; NaN without one."""
    swapped = as_responses(batch)
    log_probs = summed(scorer.forward(swapped, ("log_probs",)).flat("log_probs"), swapped)
    log_probs[swapped.lengths("response") == 0] = torch.nan
    return log_probs


def compare_mismatched(batch: Batch, actor: Scorer) -> Batch:
    """The batch with the log-ratios of its mismatched responses."""
    found = batch.copy()
    log_probs = mismatched_log_probs(batch, actor)
    found["mismatched_log_ratio"] = log_probs - batch["ref_mismatched_log_prob"]
    return found
