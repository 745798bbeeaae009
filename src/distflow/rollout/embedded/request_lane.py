"""A request lane: sequences that are decoded together, with their queue, slots and cached prompts."""

from collections.abc import Collection
from typing import NamedTuple

from distflow.rollout.embedded.kv_cache import KVSlots, PromptCache
from distflow.rollout.embedded.scheduler import Scheduler, Sequence


class Drawn(NamedTuple):
    """One token of each sequence, read on the host; log-probs as in `Generation`."""

    sequences: list[Sequence]
    token_ids: list[int]
    rollout_log_probs: list[float]
    sampling_log_probs: list[float]


class RequestLane:
    """Shares nothing with another lane, so that requests there do not affect the batches here."""

    def __init__(self, name: str, max_num_seqs: int, max_prefill_tokens: int, prompt_cache_tokens: int) -> None:
        self.name = name
        self.scheduler = Scheduler(max_num_seqs, max_prefill_tokens)
        self.slots = KVSlots()
        self.prompts = PromptCache(prompt_cache_tokens)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        return self.has_work

    def leave(self, gone: Collection[Sequence]) -> None:
        """Forget sequences, finished or aborted; with the last one all memory is dropped."""
        self.slots.move(self.scheduler.remove(gone))
        if not self.has_work:
            self.slots.reset()
            self.prompts.clear()

    def forget_kv(self) -> None:
        """Running sequences go back to the head of the queue, with the tokens that they have."""
        self.scheduler.preempt()
        self.prompts.clear()
        self.slots.reset()
