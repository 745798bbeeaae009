"""What every engine refuses before it starts to generate."""

from distflow.config.errors import UserError
from distflow.rollout.engine import GenerateRequest, SamplingParams


def check_request(request: GenerateRequest, *, vocab_size: int, max_positions: int) -> None:
    """Raises UserError for a request that cannot be run: names the value and the key to change."""
    prompt_length, params = len(request.prompt_ids), request.params
    if prompt_length == 0:
        raise UserError("a prompt without tokens cannot be continued: the model needs at least one (a BOS token, say)")
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        raise UserError(
            f"a prompt holds token {max(request.prompt_ids)}, but the model has {vocab_size} tokens: "
            "is this the model's own tokenizer?"
        )
    if not request.samples or len(set(request.samples)) < len(request.samples):
        raise UserError(f"a request needs one or more different sample indices, got {request.samples}")
    check_params(params)
    if prompt_length + params.max_tokens > max_positions:
        raise UserError(
            f"a prompt of {prompt_length} tokens with up to {params.max_tokens} new ones exceeds the "
            f"{max_positions} positions of the model: lower data.max_prompt_length or data.max_response_length"
        )


def check_params(params: SamplingParams) -> None:
    """Raises UserError for sampling options out of their ranges."""
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
