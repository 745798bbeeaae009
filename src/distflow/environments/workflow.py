"""What a workflow is: one async function that turns a prompt into finished trajectories.

It knows no engine: it receives a `generate` function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distflow.data.sample import Segment


@dataclass(frozen=True)
class Turn:
    """What the policy said in one turn. `text` is the turn's tokens decoded, without special tokens."""

    segment: Segment
    text: str
    finish_reason: str


class Generate(Protocol):
    """Continues token ids once for each sample of the group, in the order of the samples."""

    async def __call__(self, prompt_ids: Sequence[int]) -> list[Turn]: ...
