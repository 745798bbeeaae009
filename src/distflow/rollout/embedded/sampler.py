"""Draws tokens by inverse CDF in vocabulary order, with log-probs before and after truncations and
penalties.

Every row is computed separately, with a uniform number from its own counter, so draws do not depend
on the batch. Top-k, top-p and min-p only mask; nothing is reordered.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels.decode_step import draw
from distflow.rollout.embedded.scheduler import DrawInputs, SamplingLaw

# the CDF is first searched in blocks of this many tokens; float64 is needed only for one block per
# row
BLOCK = 256
# numbers in rows drawn together on a CPU: intermediate results stay in its cache
TILE_NUMBERS = 2**18
# the nucleus is searched among this many tokens before the whole vocabulary is sorted
TOP_P_CANDIDATES = 1024

NOT_FINITE = "the model's logits are not finite: its weights contain NaN or inf, or it overflowed"


class Draws(NamedTuple):
    """One token per row: ids int64 `(rows,)`; log-probs float64 `(rows,)`, see `Segment`. The
    likeliest tokens and their log-probs are `(rows, num_top)`."""

    token_ids: Tensor
    rollout_log_probs: Tensor
    sampling_log_probs: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


class Distribution:
    """The softmax of float32 scores `(rows, vocab)`, as unnormalised masses whose sums are accurate
    to float64."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self.top = scores.amax(dim=-1, keepdim=True)
        self.masses = torch.exp(scores - self.top)
        width = min(BLOCK, scores.shape[-1])
        missing = -scores.shape[-1] % width
        self.blocks = (pad(self.masses, (0, missing)) if missing else self.masses).unflatten(
            -1, (-1, width)
        )
        self.block_masses = self.blocks.sum(dim=-1, dtype=torch.float64)
        self.total = self.block_masses.sum(dim=-1)

    def log_probs(self, token_ids: Tensor) -> Tensor:
        """token_ids: `(rows,)`, or several of each row."""
        of_rows = token_ids.view(len(token_ids), -1)
        chosen = self.scores.gather(-1, of_rows).double() - self.top.double()
        return (chosen - self.total.log()[:, None]).view(token_ids.shape)

    def likeliest(self, number: int) -> tuple[Tensor, Tensor]:
        """The ids of so many tokens, by their probability, and their log-probs."""
        ids = self.scores.topk(number, dim=-1).indices
        return ids, self.log_probs(ids)

    def draw(self, uniform: Tensor) -> Tensor:
        """The first token whose cumulative mass exceeds `uniform` (float64 `(rows,)`, in [0, 1)) of
        the total."""
        cumulative = self.block_masses.cumsum(dim=-1)
        target = _below(uniform[:, None] * cumulative[:, -1:], cumulative[:, -1:])

        # Searching a NaN sum ends after the last block, hence the bounds.
        block = torch.searchsorted(cumulative, target, right=True).clamp_(
            max=cumulative.shape[-1] - 1
        )
        before = pad(cumulative, (1, 0)).gather(-1, block)
        rows = torch.arange(len(block), device=block.device)
        inside = self.blocks[rows, block.squeeze(-1)].double().cumsum(dim=-1)
        offset = torch.searchsorted(inside, _below(target - before, inside[:, -1:]), right=True)
        token_ids = (block * self.blocks.shape[-1] + offset).squeeze(-1)

        return token_ids.clamp_(max=self.scores.shape[-1] - 1)


def rows_by_law(laws: Sequence[SamplingLaw]) -> dict[SamplingLaw, list[int]]:
    """The rows of a batch that are drawn together."""
    # compared without their hashes, which take most of this function
    if laws and laws.count(laws[0]) == len(laws):
        return {laws[0]: list(range(len(laws)))}

    rows: dict[SamplingLaw, list[int]] = {}
    for row, law in enumerate(laws):
        rows.setdefault(law, []).append(row)
    return rows


def most_wanted(laws: Iterable[SamplingLaw]) -> int:
    """The most of the likeliest tokens that a law wants."""
    return max(law.num_top for law in laws)


def sample(logits: Tensor, inputs: DrawInputs) -> Draws:
    """Draw a token for each row of logits, `(rows, vocab)` in any float type. All rows get as many
    of the likeliest tokens as any wants.

    Raises FloatingPointError for logits that are NaN or +inf, or -inf for a whole row.
    """
    groups = rows_by_law(inputs.laws)
    if len(groups) == 1:
        return _draw_tiles(logits, inputs, inputs.laws[0])

    parts = list[Draws]()
    indices = list[Tensor]()
    num_top = most_wanted(groups)
    for law, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        law = law._replace(num_top=num_top)
        parts.append(_draw_tiles(logits[index], inputs.take(rows), law))
        indices.append(index)

    in_order = torch.cat(indices).argsort()
    return Draws(*(torch.cat(column)[in_order] for column in zip(*parts, strict=True)))


def _draw_tiles(logits: Tensor, inputs: DrawInputs, law: SamplingLaw) -> Draws:
    """Draw rows with the same sampling parameters, in batch tiles if the vocabulary is large: five
    times as fast at 151,936."""
    uniform = torch.from_numpy(inputs.uniforms).to(logits.device)

    if logits.device.type == "cpu":
        size = max(1, TILE_NUMBERS // logits.shape[-1])
    else:
        size = len(logits)

    tiles = [slice(first, first + size) for first in range(0, len(logits), size)]
    drawn = [
        _draw_rows(logits[tile].float(), law, uniform[tile], inputs.contexts[tile])
        for tile in tiles
    ]

    return Draws(*(torch.cat(column) for column in zip(*drawn, strict=True)))


def _draw_rows(
    logits: Tensor, law: SamplingLaw, uniform: Tensor, contexts: list[tuple[int, ...]]
) -> Draws:
    truncates = 0 < law.top_k < logits.shape[-1] or law.top_p < 1.0 or law.min_p > 0.0

    # drawn directly from the policy
    is_plain = not (law.greedy or truncates or law.repetition_penalty != 1.0)
    if is_plain and logits.device.type == "cpu" and native.is_there():
        drawn = draw(logits, law.temperature, uniform)
        if drawn is None:
            raise FloatingPointError(NOT_FINITE)
        token_ids, log_probs = drawn
        if law.num_top:
            top = policy_of(logits, law).likeliest(law.num_top)
        else:
            top = (token_ids[:, None][:, :0], log_probs[:, None][:, :0])
        return Draws(token_ids, log_probs, log_probs, *top)

    policy = policy_of(logits, law)
    if not torch.isfinite(policy.top).all():
        raise FloatingPointError(NOT_FINITE)

    seen = None
    if law.repetition_penalty != 1.0:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, context in enumerate(contexts):
            seen[row, list(set(context))] = True

    return draw_by_law(policy, logits, law, uniform, seen, (TOP_P_CANDIDATES, logits.shape[-1]))


def policy_of(logits: Tensor, law: SamplingLaw) -> Distribution:
    """softmax(logits / temperature), `(rows, vocab)`."""
    return Distribution(logits if law.temperature == 1.0 else logits / law.temperature)


def draw_by_law(
    policy: Distribution,
    logits: Tensor,
    law: SamplingLaw,
    uniform: Tensor,
    seen: Tensor | None,
    candidates: tuple[int, ...],
) -> Draws:
    """One token per row. seen: bool `(rows, vocab)`, tokens in prompt or response, if they are
    penalised; candidates: the numbers of tokens among which the nucleus is searched, one after the
    other. With a single number nothing waits for the device, and every index is in bounds, whatever
    the logits are (even NaN)."""
    drawn_from = policy
    if seen is not None:
        # Positive logits are divided by the penalty, others multiplied (CTRL, 2019).
        penalised = torch.where(
            logits > 0, logits / law.repetition_penalty, logits * law.repetition_penalty
        )
        drawn_from = Distribution(torch.where(seen, penalised, logits) / law.temperature)

    drawn_from = _truncated(drawn_from, law, candidates)
    if law.greedy:
        token_ids = drawn_from.scores.argmax(dim=-1)
    else:
        token_ids = drawn_from.draw(uniform)

    log_probs = sampling = policy.log_probs(token_ids)
    if drawn_from is not policy:
        sampling = drawn_from.log_probs(token_ids)
    return Draws(token_ids, log_probs, sampling, *drawn_from.likeliest(law.num_top))


def _truncated(
    current: Distribution, law: SamplingLaw, candidates: tuple[int, ...]
) -> Distribution:
    """Top-k, then top-p of the rest, then min-p; tokens tied with the last one kept are kept
    too."""
    if 0 < law.top_k < current.scores.shape[-1]:
        least = current.scores.topk(law.top_k, dim=-1).values[:, -1:]
        current = Distribution(current.scores.masked_fill(current.scores < least, float("-inf")))

    if law.top_p < 1.0:
        least = _nucleus_edge(current, law.top_p, candidates)
        current = Distribution(current.scores.masked_fill(current.scores < least, float("-inf")))

    if law.min_p > 0.0:
        current = Distribution(
            current.scores.masked_fill(current.masses < law.min_p, float("-inf"))
        )

    return current


def _nucleus_edge(current: Distribution, top_p: float, candidates: tuple[int, ...]) -> Tensor:
    """The score, `(rows, 1)`, of the last token of the smallest set of likeliest tokens with mass
    `top_p`."""
    vocab_size = current.scores.shape[-1]
    wanted = top_p * current.total[:, None]

    for num_candidates in candidates:
        scores = current.scores.topk(min(num_candidates, vocab_size), dim=-1).values
        before = pad(torch.exp(scores - current.top).double().cumsum(dim=-1), (1, 0))
        if num_candidates == candidates[-1] or (before[:, -1:] >= wanted).all():
            break

    inside = (before[:, :-1] < wanted).sum(dim=-1, keepdim=True)
    return scores.gather(-1, (inside - 1).clamp_(min=0))


def _below(value: Tensor, bound: Tensor) -> Tensor:
    """`value`, or the largest number below `bound` if rounding took it to the bound or beyond."""
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))
