"""Divides a batch into micro-batches bounded by tokens, and makes model inputs of a micro-batch."""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.batch_columns import send
from distflow.models.packed_forward import ModelInputs
from distflow.models.shared_prefixes import shared_prefixes
from distflow.scheduling.bin_packing import pack
from distflow.training.collective import Collective


def tokens_at_once(device: torch.device) -> int:
    """The default size of a micro-batch. On a CPU the allocator reuses the matrices of so few tokens: it gets larger
    ones from the kernel each time, page by page, which took a tenth to a third of an update."""
    return 4096 if device.type == "cpu" else 16384


def micro_batches(batch: Batch, max_tokens: int, group: Collective) -> list[Tensor]:
    """Indices of each micro-batch's samples, int64; deterministic, every sample once.

    At most `max_tokens` tokens (prompt and response) in each, except for a longer sample, which is alone and never
    cut. Neighbours with the same prompt stay together as far as they fit: their prompt is computed once. Every
    rank of `group` gets as many as the one that needs most, empty ones where it has fewer samples.
    """
    families = _families(batch, max_tokens)
    lengths = batch.lengths("sequence")
    sizes = [int(lengths[family].sum()) for family in families]
    bins = pack(sizes, max_tokens)
    agreed = int(group.max(float(len(bins))))
    if agreed > len(bins):
        bins = pack(sizes, max_tokens, agreed)
    return [torch.tensor([i for family in bin for i in families[family]], dtype=torch.int64) for bin in bins]


def _families(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Runs of samples with the same prompt, in order; one of more than `max_tokens` is cut."""
    lengths = batch.lengths("sequence").tolist()
    prompts = batch.flat("prompt_ids").split(batch.lengths("prompt").tolist()) if len(batch) else ()
    families: list[list[int]] = []
    room = 0
    for i, prompt in enumerate(prompts):
        if families and lengths[i] <= room and torch.equal(prompt, prompts[i - 1]):
            families[-1].append(i)
            room -= lengths[i]
        else:
            families.append([i])
            room = max_tokens - lengths[i]
    return families


def model_inputs(micro: Batch) -> ModelInputs:
    """Response token t of a sequence is predicted from the position before it, prompt length + t − 1.

    A micro-batch without tokens becomes one token that nothing is predicted from: every rank must run a
    sharded model equally often, and the gradient is 0.
    Shared prefixes of neighbouring samples are found only if the micro-batch is on the CPU: reading it from another
    device would wait for that device.
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
