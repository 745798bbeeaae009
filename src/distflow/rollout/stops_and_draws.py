"""Code common to all engines: checks of requests, the end of a generation (stop token, stop string
or length), and counter-based random numbers, which depend on the sample and never on its batch.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from distflow.data.sample import FinishReason
from distflow.errors import UserError
from distflow.rollout.engine import SamplingParams, Stream


def check_request(
    prompt_ids: tuple[int, ...],
    samples: tuple[int, ...],
    params: SamplingParams,
    vocab_size: int,
    max_positions: int | None,
) -> None:
    """Raises UserError for an impossible request; the message names the value and the key to
    change.

    max_positions: None if the model has no bound, like recurrent ones.
    """
    if not prompt_ids:
        raise UserError(
            "a prompt without tokens cannot be continued: the model needs at least one (a BOS "
            "token, say)"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise UserError(
            f"a prompt contains token {max(prompt_ids)}, but the model has {vocab_size} tokens: "
            "is this the model's own tokenizer?"
        )
    if not samples or len(set(samples)) < len(samples):
        raise UserError(f"a request needs one or more different sample indices, got {samples}")
    rules = {
        "max_tokens": (params.max_tokens >= 1, "at least 1"),
        "temperature": (params.temperature > 0, "above 0 (for the most likely token set greedy)"),
        "top_p": (0 < params.top_p <= 1, "in (0, 1]; 1 turns it off"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "-1 (off) or at least 1"),
        "min_p": (0 <= params.min_p <= 1, "in [0, 1]; 0 turns it off"),
        "repetition_penalty": (params.repetition_penalty > 0, "above 0; 1 turns it off"),
        "stop": (all(params.stop), "strings that are not empty"),
    }
    for name, (holds, wanted) in rules.items():
        if not holds:
            raise UserError(f"rollout.{name} must be {wanted}, got {getattr(params, name)!r}")
    if max_positions is not None and len(prompt_ids) + params.max_tokens > max_positions:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens with up to {params.max_tokens} new ones exceeds "
            "the "
            f"{max_positions} positions of the model: lower data.max_prompt_length or "
            "data.max_response_length"
        )


# decoded in front of the part that may hold the stop string: some tokenizers join across tokens
CONTEXT_TOKENS = 4


def finish_reason(
    token_ids: list[int], params: SamplingParams, tokenizer: PreTrainedTokenizerBase
) -> FinishReason | None:
    """Call after each token; token_ids: the response so far. Returns None if it continues."""
    if token_ids[-1] in params.stop_token_ids:
        return "stop"
    if params.stop:  # the last token may extend beyond the stop string
        # A token holds at least one byte, so a string of b bytes ends within the last b tokens.
        longest = max(len(string.encode()) for string in params.stop)
        tail = tokenizer.decode(token_ids[-(longest + CONTEXT_TOKENS) :], skip_special_tokens=False)
        if any(string in tail for string in params.stop):
            return "stop"
    return "length" if len(token_ids) >= params.max_tokens else None


_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_key(stream: Stream, sample: int) -> int:
    """A 64-bit key of (seed, stream name, epoch, prompt row, sample index), the same on every
    machine."""
    identity = repr((stream.seed, stream.name, stream.epoch, stream.row, sample)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One float64 in [0, 1) for each (key, token position), `(rows,)`, with 53 random bits.

    This is output number `position` of the SplitMix64 generator seeded by `key` (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014), which can be computed without
    the ones before it.
    """
    with np.errstate(over="ignore"):
        state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _WEYL
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
