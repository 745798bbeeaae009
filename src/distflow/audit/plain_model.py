"""A model's own padded forward: no packing, no cache, no chunks; the softmax in float64."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distflow.models.attention import PACKED_ATTENTION
from distflow.models.lora import adapter_off, unwrapped
from distflow.rollout.engine import SamplingParams

MAX_LOGITS = 2**28
"""Entries of logits in memory at a time: 1 GiB in float32. A longer sequence is not run."""

MAX_DOUBLES = 2**24
"""Entries of a distribution in memory at a time, in float64: 128 MiB."""


@dataclass(frozen=True)
class PlainScores:
    """For each response token, float64 `(tokens,)`: its log-prob and the policy's entropy at the temperature; `below`,
    the mass of the tokens before it in the vocabulary, and its own `mass`, under the distribution that it was drawn
    from."""

    log_probs: Tensor
    entropy: Tensor
    below: Tensor
    mass: Tensor


@contextmanager
def plainly(model: nn.Module, *, adapter: bool = True, compute_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, the model runs without packing: with the attention of its family in place of the packed one.

    adapter: False switches a LoRA adapter off.
    """
    causal = unwrapped(model)
    attention, training = causal.config._attn_implementation, model.training
    device = next(model.parameters()).device
    low = compute_dtype not in (None, torch.float32)
    model.eval()
    if attention == PACKED_ATTENTION:
        causal.set_attn_implementation("sdpa")
    try:
        with torch.autocast(device.type, dtype=compute_dtype, enabled=low):
            if adapter:
                yield
            else:
                with adapter_off(model):
                    yield
    finally:
        if attention == PACKED_ATTENTION:
            causal.set_attn_implementation(attention)
        model.train(training)


Ids = tuple[Sequence[int], Sequence[int]]
"""A prompt and its response."""

Run = Callable[..., Any]
"""Runs a model's forward: `Turns.run`."""


def logits_of(run: Run, model: nn.Module, sequences: Sequence[Ids]) -> Iterator[Tensor]:
    """For each sequence, float32 logits `(response tokens, vocabulary)` that predict its response; a critic's are
    `(response tokens, 1)`. Sequences are padded on the right, as many together as `MAX_LOGITS` allows."""
    longest = max(len(prompt) + len(response) for prompt, response in sequences)
    together = max(1, MAX_LOGITS // (longest * vocabulary_of(model)))
    for start in range(0, len(sequences), together):
        part = sequences[start : start + together]
        lengths = torch.tensor([len(prompt) + len(response) for prompt, response in part])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        ids[mask] = torch.tensor([token for prompt, response in part for token in (*prompt, *response)])
        device = next(model.parameters()).device
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device), "use_cache": False}
        logits = run(model, **inputs).logits
        for row, (prompt, response) in zip(logits, part, strict=True):
            yield row[len(prompt) - 1 : len(prompt) + len(response) - 1].float()


def fits(model: nn.Module, num_tokens: int) -> bool:
    """Whether `MAX_LOGITS` allows a sequence of that length."""
    return num_tokens * vocabulary_of(model) <= MAX_LOGITS


def vocabulary_of(model: nn.Module) -> int:
    return int(unwrapped(model).config.get_text_config().vocab_size)


def plain_scores(logits: Tensor, token_ids: Sequence[int], params: SamplingParams) -> PlainScores:
    """logits: of the tokens, `(tokens, vocabulary)`."""
    rows = max(1, MAX_DOUBLES // logits.shape[-1])
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    parts = [_scores_of(some, own, params) for some, own in zip(logits.split(rows), ids.split(rows), strict=True)]
    return PlainScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def log_probs_of(logits: Tensor, token_ids: Sequence[int], temperature: float) -> Tensor:
    """Float64 `(tokens,)`."""
    scores = (logits.cpu().double() / temperature).log_softmax(-1)
    return scores.gather(-1, torch.tensor(list(token_ids), dtype=torch.int64)[:, None])[:, 0]


def _scores_of(logits: Tensor, token_ids: Tensor, params: SamplingParams) -> tuple[Tensor, ...]:
    policy = (logits.cpu().double() / params.temperature).log_softmax(-1)
    entropy = -(policy.exp() * policy).nan_to_num().sum(-1)
    drawn_from = _truncated(policy.exp(), params)
    drawn_from = drawn_from / drawn_from.sum(-1, keepdim=True)
    own = token_ids[:, None]
    before = torch.where(torch.arange(drawn_from.shape[-1]) < own, drawn_from, 0.0).sum(-1)
    return policy.gather(-1, own)[:, 0], entropy, before, drawn_from.gather(-1, own)[:, 0]


def _truncated(masses: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p of what is left, then min-p; masses `(tokens, vocabulary)`."""
    if 0 < params.top_k < masses.shape[-1]:
        masses = torch.where(masses < masses.topk(params.top_k).values[:, -1:], 0.0, masses)
    if params.top_p < 1.0:
        shares = masses / masses.sum(-1, keepdim=True)
        likeliest = shares.sort(descending=True).values
        inside = (likeliest.cumsum(-1) - likeliest < params.top_p).sum(-1, keepdim=True)
        masses = torch.where(shares < likeliest.gather(-1, inside - 1), 0.0, masses)
    if params.min_p > 0.0:
        masses = torch.where(masses < params.min_p * masses.amax(-1, keepdim=True), 0.0, masses)
    return masses
