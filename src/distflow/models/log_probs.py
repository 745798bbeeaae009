"""Log-probs of chosen tokens and entropies from logits, without further matrices of that size.

Autograd over the formulas keeps, or creates in the backward pass, five matrices of the size of the
logits. Here the log-probs overwrite the logits, the gradient overwrites the log-probs, and
intermediate results are computed for a few rows at a time, which stay in the processor's cache; on
other devices, where many small operations cost more than they save, for all rows at once.

Token log-probs and entropy straight from hidden states, in chunks of rows: full logits never exist.
Tokens that stand for numbers (`number_head.py`) have a normal density in place of a probability.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from distflow.models.number_head import Normals, NumberTargets, normal_log_probs, normal_of

BLOCK_ELEMENTS = 2**19
# lower values are clamped to this: exp of it is 0 in any precision, and 0 times it is 0
_NEVER = -1e4


class _LogProbs(Function):
    """Log-probs of `targets` int64 `(n,)`, or k of each row `(n, k)`, under softmax(logits
    `(n, vocabulary)`) and, if wanted, its entropies `(n,)`, differentiable once. A logit of −inf
    adds 0 to the entropy. Logits that require a gradient are overwritten."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        memory = logits.detach() if ctx.needs_input_grad[0] else None
        columns = targets if targets.dim() == 2 else targets[:, None]
        chosen = logits.new_empty(columns.shape)
        entropy = logits.new_empty(len(logits)) if with_entropy else None
        for rows in _blocks(logits):
            log_probs = logits[rows].log_softmax(-1)
            chosen[rows] = log_probs.gather(-1, columns[rows])

            if memory is not None or with_entropy:
                log_probs = torch.clamp(
                    log_probs, min=_NEVER, out=log_probs if memory is None else memory[rows]
                )

            if entropy is not None:
                entropy[rows] = log_probs.exp().mul_(log_probs).sum(-1).neg_()

        ctx.save_for_backward(memory, columns, entropy)
        ctx.set_materialize_grads(False)
        return chosen.view(targets.shape), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_chosen: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        """With p the probabilities and H the entropy: d log p_t / dz = 1_t − p, dH / dz = −p (log p
        + H)."""
        grad, columns, entropy = ctx.saved_tensors
        if of_chosen is None:
            of_chosen = grad.new_zeros(columns.shape)
        of_chosen = of_chosen.reshape(columns.shape)
        of_rows = of_chosen.sum(-1, keepdim=True)

        for rows in _blocks(grad):
            block = grad[rows]
            weight = -of_rows[rows]
            if of_entropy is not None:
                of_log = -of_entropy[rows, None]
                weight = torch.addcmul(weight + of_log * entropy[rows, None], block, of_log)
            block.exp_().mul_(weight)

        return grad.scatter_add_(-1, columns, of_chosen), None, None


def _blocks(matrix: Tensor) -> Iterator[slice]:
    num_rows = max(
        1, BLOCK_ELEMENTS // matrix.shape[1] if matrix.device.type == "cpu" else len(matrix)
    )
    return (slice(start, start + num_rows) for start in range(0, len(matrix), num_rows))


# Logits held at a time, on a CPU and on a device, where each chunk adds to the whole head's
# gradient. Chunks are recomputed in the backward pass, unless there is only one.
CHUNK_ELEMENTS = 2**25
CHUNK_ON_DEVICE = 2**27

Head = Callable[[Tensor], Tensor]


def token_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor | NumberTargets,
    *,
    temperature: float | Tensor = 1.0,
    vocabulary: int,
    with_entropy: bool = True,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` and entropies `(n,)` under softmax(logits / temperature), with
    gradient.

    hidden: `(n, width)`, the states that predict `targets` `(n,)` or `(n, k)`. temperature: of all
    rows, or float `(n,)`. vocabulary: logits per row. The softmax is in float32 (float64 for such
    models), whatever the head's precision. A logit of −inf adds 0 to the entropy, which is None
    unless requested. Numbers have the log-density and the entropy of their normal
    distribution, which the temperature does not change. Raises ValueError for a temperature that is
    not above 0; those already on a device are not checked.
    """
    num_rows = _rows_at_once(hidden, vocabulary, temperature, chunk_elements)
    if len(hidden) <= num_rows:
        return _chunk(head, hidden, targets, temperature, with_entropy)

    log_probs = []
    entropies = []
    for rows, states, heat in _chunks(hidden, temperature, num_rows):
        given = (head, states, some_targets(targets, rows), heat, with_entropy)
        part, entropy = checkpoint(_chunk, *given, use_reentrant=False, preserve_rng_state=False)
        log_probs.append(part)
        entropies.append(entropy)

    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


@torch.no_grad()
def likeliest_tokens(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    count: int,
    *,
    num_tokens: int | None = None,
    temperature: float | Tensor = 1.0,
    vocabulary: int,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of `targets` `(n,)`, and ids and log-probs `(n, count)` of the likeliest tokens, in
    the order of their probability; without gradient.

    num_tokens: only lower ids are among them, since a head may have more rows than there are
    tokens. Other arguments as of `token_log_probs`.
    """
    num_rows = _rows_at_once(hidden, vocabulary, temperature, chunk_elements)
    log_probs = hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype))
    ids = targets.new_empty(len(hidden), count)
    of_ids = log_probs.new_empty(len(hidden), count)

    for rows, states, heat in _chunks(hidden, temperature, num_rows):
        logits = _heated(_logits(head, states), heat)
        for block in _blocks(logits):
            place = slice(rows.start + block.start, rows.start + min(block.stop, len(logits)))
            scores = logits[block].log_softmax(-1)
            log_probs[place] = scores.gather(-1, targets[place, None])[:, 0]
            of_ids[place], ids[place] = scores[:, :num_tokens].topk(count)
        del logits  # before those of the next chunk exist

    return log_probs, ids, of_ids


def _rows_at_once(
    hidden: Tensor, vocabulary: int, temperature: float | Tensor, chunk_elements: int | None
) -> int:
    """Raises ValueError as `token_log_probs`."""
    if not isinstance(temperature, Tensor) or temperature.device.type == "cpu":
        check_temperature(temperature)
    on_cpu = hidden.device.type == "cpu"
    elements = chunk_elements or (CHUNK_ELEMENTS if on_cpu else CHUNK_ON_DEVICE)
    return max(1, elements // vocabulary)


def _chunks(
    hidden: Tensor, temperature: float | Tensor, num_rows: int
) -> Iterator[tuple[slice, Tensor, float | Tensor]]:
    """The rows, the states and the temperature of each chunk."""
    start = 0
    for states in hidden.split(num_rows):
        rows = slice(start, start + len(states))
        start = rows.stop
        yield rows, states, temperature[rows] if isinstance(temperature, Tensor) else temperature


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(head: Head, hidden: Tensor) -> Tensor:
    logits = head(hidden)
    return logits.to(_wide(logits.dtype))


def _heated(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits / temperature[:, None]
    if temperature != 1.0:
        return logits / temperature
    return logits


def some_targets(targets: Tensor | NumberTargets, rows: slice | Tensor) -> Tensor | NumberTargets:
    if isinstance(targets, Tensor):
        return targets[rows]
    tokens, values, is_number, normals = targets
    own = Normals(*(each[rows] for each in normals))
    return NumberTargets(tokens[rows], values[rows], is_number[rows], own)


def check_temperature(temperature: float | Tensor) -> None:
    """Raises ValueError for a temperature that is not above 0."""
    if not bool(torch.as_tensor(temperature > 0).all()):
        raise ValueError(
            f"temperature is {temperature}: it must be above 0 (softmax(logits / temperature))"
        )


def _chunk(
    head: Head,
    hidden: Tensor,
    targets: Tensor | NumberTargets,
    temperature: float | Tensor,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = _logits(head, hidden)

    # before the logits are replaced or overwritten
    normal = None if isinstance(targets, Tensor) else normal_of(logits, targets.normals)

    logits = _heated(logits, temperature)

    if isinstance(targets, Tensor):
        return _LogProbs.apply(logits, targets, with_entropy)

    assert normal is not None, "above"
    mean, log_std = normal
    log_probs, entropy = _LogProbs.apply(logits, targets.tokens, with_entropy)
    densities = normal_log_probs(targets.values.to(mean.dtype), mean, log_std)
    log_probs = torch.where(targets.is_number, densities, log_probs)

    if entropy is not None:
        of_normal = log_std + (1 + math.log(2 * math.pi)) / 2
        entropy = torch.where(targets.is_number, of_normal, entropy)

    return log_probs, entropy
