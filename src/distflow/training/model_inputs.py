"""From a micro-batch to what a model is given: the one place where inputs other than tokens join."""

import torch

from distflow.data.batch import Batch
from distflow.data.transfer import send
from distflow.models.packed_forward import ModelInputs
from distflow.models.shared_prefixes import shared_prefixes


def model_inputs(micro: Batch) -> ModelInputs:
    """Response token t of a sequence is predicted from the position before it, prompt length + t − 1.

    A micro-batch without tokens becomes one token that nothing is predicted from: every rank runs the model as often,
    which a model whose weights lie spread over ranks needs, and the gradient of nothing is 0.
    What samples beside each other begin with alike is told where the micro-batch lies on the CPU: to read it from
    another device would mean to wait for that.
    Raises ValueError for a sample without a prompt: nothing predicts its first token.
    """
    _refuse_empty_prompts(micro)
    ids, lengths = micro.flat("input_ids"), micro.lengths("sequence")
    if not ids.numel():
        ids, lengths = ids.new_zeros(1), torch.ones(1, dtype=torch.int64)
    positions = send(micro.response_positions(), ids.device)
    sharing = shared_prefixes(ids, lengths) if ids.device.type == "cpu" else None
    return ModelInputs(ids, lengths, predicting=positions - 1, targets=ids[positions], sharing=sharing)


def _refuse_empty_prompts(micro: Batch) -> None:
    empty = (micro.lengths("prompt") == 0) & (micro.lengths("response") > 0)
    if bool(empty.any()):
        who = micro.flat("uid")[int(empty.nonzero()[0])] if "uid" in micro else f"number {int(empty.nonzero()[0])}"
        raise ValueError(f"sample {who} has an empty prompt: nothing predicts its first token; give a bos token")
