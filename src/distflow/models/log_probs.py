"""Token log-probs and entropy straight from hidden states, in chunks of rows: full logits never exist."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distflow.models.softmax import log_probs_of

# Logits held at a time. A chunk is made again in the backward pass, unless one chunk is all there is.
CHUNK_ELEMENTS = 2**25

Head = Callable[[Tensor], Tensor]


def token_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocabulary: int,
    with_entropy: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` and entropies under softmax(logits / temperature), both `(n,)`, with gradient.

    hidden: `(n, width)`, the states that predict `targets` `(n,)`. temperature: of all rows, or float `(n,)`.
    vocabulary: logits a row. The softmax is taken in float32 (float64 where the model is), whatever the precision of
    the head. A logit of −inf adds 0 to the entropy, which is None unless it is asked for. Raises ValueError for a
    temperature that is not above 0; those that lie on a device already are not looked at.
    """
    if not isinstance(temperature, Tensor) or temperature.device.type == "cpu":
        check_temperature(temperature)
    num_rows = max(1, chunk_elements // vocabulary)
    if hidden.shape[0] <= num_rows:
        return _chunk(head, hidden, targets, temperature, with_entropy)
    states, wanted = hidden.split(num_rows), targets.split(num_rows)
    heat = temperature.split(num_rows) if isinstance(temperature, Tensor) else [temperature] * len(states)
    parts = [
        checkpoint(_chunk, head, *chunk, with_entropy, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(states, wanted, heat, strict=True)
    ]
    log_probs = torch.cat([part[0] for part in parts])
    return log_probs, torch.cat([part[1] for part in parts]) if with_entropy else None


def check_temperature(temperature: float | Tensor) -> None:
    """Raises ValueError for one that is not above 0."""
    if not bool(torch.as_tensor(temperature > 0).all()):
        raise ValueError(f"temperature is {temperature}: the policy is softmax(logits / temperature), give one above 0")


def _chunk(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float | Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    return log_probs_of(logits, targets, with_entropy)
