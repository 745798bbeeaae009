"""When a generation ends: a stop token, a stop string, or the last token it may have."""

from transformers import PreTrainedTokenizerBase

from distflow.rollout.engine import FinishReason, SamplingParams

CONTEXT_TOKENS = 4  # decoded before the part that could hold the stop string: some tokenizers join across tokens


def finish_reason(
    token_ids: list[int], params: SamplingParams, tokenizer: PreTrainedTokenizerBase
) -> FinishReason | None:
    """Judge after each token; token_ids: the response so far. None: it goes on."""
    if token_ids[-1] in params.stop_token_ids:
        return "stop"
    if params.stop and ends_with_stop_string(token_ids, params.stop, tokenizer):
        return "stop"
    return "length" if len(token_ids) >= params.max_tokens else None


def ends_with_stop_string(token_ids: list[int], stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the last token completes a stop string (it may go on behind it).

    Only the tail is decoded: a token holds at least one byte, so a string of b bytes ends within the last b tokens.
    """
    longest = max(len(string.encode()) for string in stop)
    tail = tokenizer.decode(token_ids[-(longest + CONTEXT_TOKENS) :], skip_special_tokens=False)
    return any(string in tail for string in stop)
