"""Token log-probs and entropy straight from hidden states, in chunks of rows: full logits never exist."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits held at a time. A chunk is made again in the backward pass, unless one chunk is all there is.
CHUNK_ELEMENTS = 2**25

Head = Callable[[Tensor], Tensor]


def token_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocabulary: int,
    with_entropy: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` and entropies under softmax(logits / temperature), both `(n,)`, with gradient.

    hidden: `(n, width)`, the states that predict `targets` `(n,)`. vocabulary: logits a row. The softmax is taken in
    float32 (float64 where the model is), whatever the precision of the head. A logit of −inf adds 0 to the entropy,
    which is None unless it is asked for. Raises ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: the policy is softmax(logits / temperature), give one above 0")
    num_rows = max(1, chunk_elements // vocabulary)
    if hidden.shape[0] <= num_rows:
        return _chunk(head, hidden, targets, temperature, with_entropy)
    parts = [
        checkpoint(_chunk, head, h, t, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
    ]
    log_probs = torch.cat([part[0] for part in parts])
    return log_probs, torch.cat([part[1] for part in parts]) if with_entropy else None


def _chunk(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    if not with_entropy:
        return chosen, None
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    return chosen, -(log_probs.exp() * finite).sum(-1)
