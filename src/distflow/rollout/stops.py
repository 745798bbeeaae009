"""The checks of a request, and where a response ends."""

from transformers import PreTrainedTokenizerBase

from distflow.data.sample import FinishReason
from distflow.errors import UserError
from distflow.rollout.engine import SamplingParams


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
            f"a prompt contains token {max(prompt_ids)}, but the model has {vocab_size} tokens: is "
            "this the model's own tokenizer?"
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
    num_tokens = 0 if params.head else vocab_size
    if params.num_top > num_tokens:
        raise UserError(
            f"algorithm.rollout_correction.score_centering_top_k={params.num_top}: a draw is among "
            f"{num_tokens} tokens"
        )
    for name, (holds, wanted) in rules.items():
        if not holds:
            raise UserError(f"rollout.{name} must be {wanted}, got {getattr(params, name)!r}")

    if max_positions is not None and len(prompt_ids) + params.max_tokens > max_positions:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens with up to {params.max_tokens} new ones exceeds "
            f"the {max_positions} positions of the model: lower data.max_prompt_length or "
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

    if len(token_ids) >= params.max_tokens:
        return "length"
    return None
