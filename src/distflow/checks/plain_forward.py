"""Runs models by their own padded forward, without packing, cache or chunks, with the softmax in
float64."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from distflow.models.image_inputs import own_pass, text_decoder
from distflow.models.lora import adapter_off, unwrapped
from distflow.models.packed_attention import PACKED_ATTENTION
from distflow.rollout.engine import SamplingParams

MAX_LOGITS = 2**28
"""Entries of logits in memory at a time: 1 GiB in float32. A longer sequence is not run."""

MAX_DOUBLES = 2**24
"""Entries of a distribution in memory at a time, in float64: 128 MiB."""


class Ids(NamedTuple):
    """A prompt and its response. images: of the prompt, see `data/images.py`. given: tokens before
    the first drawn one, if the response begins with given ones."""

    prompt: Sequence[int]
    response: Sequence[int]
    images: Sequence[str] = ()
    given: int = 0


Run = Callable[..., Any]
"""Runs a model's forward: `ShardedPasses.run`."""
RunOfTokens = tuple[int, SamplingParams, Sequence[int]]
"""The number of tokens, how they were drawn, and the tokens before them."""


@dataclass(frozen=True)
class PlainScores:
    """For each response token, float64 `(tokens,)`: its log-prob, the policy's entropy and the
    variance of the policy's log-probs at the temperature; under the distribution of its draw,
    `below`, the mass of the tokens before it in the vocabulary, and its own `mass`."""

    log_probs: Tensor
    entropy: Tensor
    variance: Tensor
    below: Tensor
    mass: Tensor


@contextmanager
def plainly(
    model: nn.Module, *, adapter: bool = True, compute_dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Inside, the model runs without packing, with the attention of its family instead of the
    packed one.

    adapter: False switches a LoRA adapter off.
    """
    config = text_decoder(model).config
    attention = config._attn_implementation
    training = model.training
    device = next(model.parameters()).device
    low = compute_dtype not in (None, torch.float32)
    if training:  # a walk over all modules
        model.eval()
    if attention == PACKED_ATTENTION:
        config._attn_implementation = "sdpa"  # `set_attn_implementation` walks over all modules

    try:
        with (
            torch.autocast(device.type, dtype=compute_dtype, enabled=low),
            nullcontext() if adapter else adapter_off(model),
        ):
            yield
    finally:
        if attention == PACKED_ATTENTION:
            config._attn_implementation = attention
        if training:
            model.train()


def logits_of(run: Run, model: nn.Module, sequences: Sequence[Ids]) -> Iterator[Tensor]:
    """For each sequence, float32 logits `(response tokens, vocabulary)` that predict its response;
    a critic's are `(response tokens, 1)`. Sequences are padded on the right, as many together as
    `MAX_LOGITS` allows."""
    device = next(model.parameters()).device
    rows = [torch.tensor([*ids.prompt, *ids.response], device=device) for ids in sequences]
    together = max(1, MAX_LOGITS // (max(map(len, rows)) * vocabulary_of(model)))
    if any(ids.images for ids in sequences):
        together = 1

    for start in range(0, len(sequences), together):
        part = sequences[start : start + together]
        whole = rows[start : start + together]
        tokens = pad_sequence(whole, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in whole], batch_first=True)

        given = part[0].given or len(part[0].prompt)
        with own_pass(model, tokens, given, (part[0].images,)) as inputs:
            logits = run(model, **inputs, attention_mask=mask, use_cache=False).logits

        for row, ids in zip(logits, part, strict=True):
            first = len(ids.prompt) - 1
            yield row[first : first + len(ids.response)].float()


def model_of(engine: object) -> nn.Module | None:
    """The model that an engine exposes; None if it exposes none."""
    model = getattr(engine, "model", None)
    return model if isinstance(model, nn.Module) else None


def vocabulary_of(model: nn.Module) -> int:
    return int(unwrapped(model).config.get_text_config().vocab_size)


def plain_scores(
    logits: Tensor, token_ids: Sequence[int], sampling: Sequence[RunOfTokens]
) -> PlainScores:
    """logits: of the tokens, `(tokens, vocabulary)`. sampling: of all tokens, run by run."""
    rows = max(1, MAX_DOUBLES // logits.shape[-1])
    parts = list[tuple[Tensor, ...]]()
    start = 0
    ids = torch.tensor(list(token_ids), dtype=torch.int64)

    for number, params, before in sampling:
        own = slice(start, start + number)
        seen = torch.tensor(list(before), dtype=torch.int64)
        for part, tokens in zip(logits[own].split(rows), ids[own].split(rows), strict=True):
            parts.append(_scores_of(part, tokens, params, seen))
            seen = torch.cat([seen, tokens])
        start += number

    return PlainScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def log_probs_of(logits: Tensor, token_ids: Sequence[int], temperature: float | Tensor) -> Tensor:
    """Float64 `(tokens,)`, differentiable. temperature: of all tokens, or `(tokens, 1)`."""
    logits = logits.cpu().double()
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    return (logits / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _scores_of(
    logits: Tensor, token_ids: Tensor, params: SamplingParams, before: Tensor
) -> tuple[Tensor, ...]:
    logits = logits.cpu().double()
    policy = (logits / params.temperature).log_softmax(-1)
    masses = policy.exp()
    surprise = (masses * policy).nan_to_num()
    entropy = -surprise.sum(-1)
    variance = (surprise * policy).nan_to_num().sum(-1) - entropy.square()

    if params.repetition_penalty != 1.0:
        masses = (_penalised(logits, token_ids, params, before) / params.temperature).softmax(-1)

    drawn_from = _truncated(masses, params)
    drawn_from = drawn_from / drawn_from.sum(-1, keepdim=True)
    own = token_ids[:, None]
    before = torch.where(torch.arange(drawn_from.shape[-1]) < own, drawn_from, 0.0).sum(-1)

    return policy.gather(-1, own)[:, 0], entropy, variance, before, drawn_from.gather(-1, own)[:, 0]


def _penalised(logits: Tensor, token_ids: Tensor, params: SamplingParams, before: Tensor) -> Tensor:
    """Logits of tokens in prompt or response divided by the penalty if they are positive, else
    multiplied by it."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[:, before] = True
    for row, token in enumerate(token_ids.tolist()):
        seen[row + 1 :, token] = True
    penalty = params.repetition_penalty
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _truncated(masses: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p of the rest, then min-p; masses `(tokens, vocabulary)`."""
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
