"""From a micro-batch to what a model is given: the one place where inputs other than tokens join."""

import torch

from distflow.data.batch import Batch
from distflow.models.packed_forward import ModelInputs


def model_inputs(micro: Batch) -> ModelInputs:
    """Response token t of a sequence is predicted from the position before it, prompt length + t − 1.

    A micro-batch without tokens becomes one token that nothing is predicted from: every rank runs the model as often,
    which a model whose weights lie spread over ranks needs, and the gradient of nothing is 0.
    Raises ValueError for a sample without a prompt: nothing predicts its first token.
    """
    _refuse_empty_prompts(micro)
    ids, lengths = micro.flat("input_ids"), micro.lengths("sequence")
    if not ids.numel():
        ids, lengths = ids.new_zeros(1), torch.ones(1, dtype=torch.int64)
    positions = micro.response_positions().to(ids.device)
    return ModelInputs(ids, lengths, predicting=positions - 1, targets=ids[positions])


def _refuse_empty_prompts(micro: Batch) -> None:
    empty = (micro.lengths("prompt") == 0) & (micro.lengths("response") > 0)
    if bool(empty.any()):
        who = micro.flat("uid")[int(empty.nonzero()[0])] if "uid" in micro else f"number {int(empty.nonzero()[0])}"
        raise ValueError(f"sample {who} has an empty prompt: nothing predicts its first token; give a bos token")
