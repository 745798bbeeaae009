"""The state of each sequence on the device, with its random numbers.

The uniform numbers are those of `rollout/random_draws.py`, bit for bit. A slot keeps the state
of SplitMix64 at its next draw, computed from key and position, as an int64 with the bits of the
uint64, because torch has few operations on uint64: two's-complement sums and products wrap
identically, and a mask removes the sign bits from a shift.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.device_transfer import send
from distflow.rollout.embedded.page_memory import TRASH
from distflow.rollout.embedded.sampler import Draws, draw_by_law, most_wanted, policy_of
from distflow.rollout.embedded.scheduler import SamplingLaw, Sequence

_BITS = 1 << 64
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9 - _BITS
_MIX_2 = 0x94D049BB133111EB - _BITS
NEXT = _WEYL - _BITS
"""Added to a state to get that of the next draw."""


def state_of(key: int, position: int) -> int:
    """The generator's state, as a signed number, for a 64-bit key. position: how many numbers were
    drawn before."""
    state = (key + (position + 1) * _WEYL) % _BITS
    return state - _BITS if state >= _BITS // 2 else state


def uniforms(states: Tensor) -> Tensor:
    """One float64 in [0, 1) for each state, int64, with 53 random bits."""
    mixed = (states ^ _shifted(states, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


Laws = list[tuple[SamplingLaw, Tensor]]
"""The rows of a batch by their sampling parameters."""


@dataclass(eq=False)
class Lease:
    """The slot and pages of a running request."""

    slot: int
    pages: list[int]
    num_drawn: int
    """Its tokens, including those that the host has not read."""


class DecodeState:
    """State by slot: `token`, the last one, to be fed next, at `position`; `random`, the
    generator's state at the next draw; `tables`, the pages, `(slots, most pages of a sequence)`.
    All int64. The slot after the last is for padding rows: token and position 0, in the page
    `TRASH`.
    """

    def __init__(
        self, num_slots: int, most_pages: int, vocab_size: int, device: torch.device
    ) -> None:
        self.trash = num_slots
        self.token, self.position, self.random = torch.zeros(
            3, num_slots + 1, dtype=torch.int64, device=device
        )
        self.tables = torch.full(
            (num_slots + 1, most_pages), TRASH, dtype=torch.int64, device=device
        )
        self._vocab_size = vocab_size

        # bool (slots, vocab), allocated when a penalty is first used
        self._seen: Tensor | None = None

        # a Python `True` would be copied from the host
        self._true = torch.ones((), dtype=torch.bool, device=device)
        self.free = list(range(num_slots - 1, -1, -1))

    def begin(self, sequences: Rows[Sequence], leases: Rows[Lease]) -> None:
        """Write each sequence's state for the first draw, after the last token of its prefilled
        context."""
        width = max(len(lease.pages) for lease in leases)
        rows = []
        for sequence, lease in zip(sequences, leases, strict=True):
            state = state_of(sequence.key, sequence.num_drawn + len(sequence.token_ids))
            pages = [*lease.pages, *[TRASH] * (width - len(lease.pages))]
            rows.append([lease.slot, sequence.position, state, *pages])

        written = send(torch.tensor(rows), self.token.device)
        slots = written[:, 0]
        self.position[slots] = written[:, 1]
        self.random[slots] = written[:, 2]
        self.tables[slots, :width] = written[:, 3:]
        if all(sequence.law.repetition_penalty == 1.0 for sequence in sequences):
            return

        if self._seen is None:
            self._seen = torch.zeros(
                self.trash + 1, self._vocab_size, dtype=torch.bool, device=self.token.device
            )

        occurred = [
            (lease.slot, token)
            for sequence, lease in zip(sequences, leases, strict=True)
            for token in set(sequence.context)
        ]
        slot, token = send(torch.tensor(occurred), self.token.device).unbind(-1)
        self._seen.index_fill_(0, slots, False)
        self._seen[slot, token] = self._true

    def draw(self, logits: Tensor, slots: Tensor, laws: Laws) -> Tensor:
        """Draw one token per row from logits `(rows, vocab)`, and advance `slots` by it.

        Returns float64 `(rows, columns)`: 1 where the logits were finite, then the columns of
        `Draws`. Does not wait.
        """
        logits = logits.float()
        uniform = uniforms(self.random[slots])
        num_top = most_wanted(law for law, _ in laws)
        wanted = [(law._replace(num_top=num_top), rows) for law, rows in laws]
        parts = [self._draw_law(logits, slots, uniform, law, rows) for law, rows in wanted]

        if len(laws) == 1:
            draws, finite = parts[0]
        else:
            back = torch.cat([rows for _, rows in laws]).argsort()
            draws = Draws(
                *(
                    torch.cat(column)[back]
                    for column in zip(*(part for part, _ in parts), strict=True)
                )
            )
            finite = torch.cat([each for _, each in parts])[back]

        nobody = slots == self.trash
        self.token[slots] = draws.token_ids.masked_fill(nobody, 0)
        self.position[slots] = (self.position[slots] + 1).masked_fill(nobody, 0)
        self.random[slots] = self.random[slots] + NEXT
        if self._seen is not None:
            self._seen[slots, draws.token_ids] = self._true
        return torch.column_stack([finite.double(), *(each.double() for each in draws)])

    def _draw_law(
        self, logits: Tensor, slots: Tensor, uniform: Tensor, law: SamplingLaw, rows: Tensor
    ) -> tuple[Draws, Tensor]:
        """rows: those of the law; if as many as all rows, they are all rows in order."""
        if len(rows) != len(slots):
            logits = logits[rows]
            slots = slots[rows]
            uniform = uniform[rows]

        policy = policy_of(logits, law)
        penalised = law.repetition_penalty != 1.0 and self._seen is not None
        if penalised and self._seen is not None:
            seen = self._seen[slots]
        else:
            seen = None

        draws = draw_by_law(policy, logits, law, uniform, seen, (logits.shape[-1],))
        return draws, torch.isfinite(policy.top).squeeze(-1)
