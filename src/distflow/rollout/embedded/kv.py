"""Key-value memory: slots of running sequences, and a bounded cache of prefilled prompts."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from distflow.models.decoder import PromptKV
from distflow.rollout.embedded.scheduler import Move

EXTENT_BLOCK = 64


class KVSlots:
    """`keys (layers, slots, kv_heads, head_dim, extent)`, `values (layers, slots, kv_heads, extent, head_dim)`.

    Both the number of slots and the extent grow with need, and shrink to nothing at `reset`. Memory that was never
    written is zero: attention masks it, but a NaN in it would still spread. The tensors are made in inference mode and
    may be written in it only, and aborts move slots outside of any step: hence the decorators.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = torch.empty(0, 0, 0, 0, 0)

    @torch.inference_mode()
    def fill(self, prompts: PromptKV, rows: list[int], first_slot: int) -> None:
        """Copy the prompts' rows into consecutive slots."""
        longest, end = prompts.keys.shape[-1], first_slot + len(rows)
        if self.keys.numel() == 0:
            self._allocate(prompts, end, longest)
        self.ensure(end, longest)
        index = torch.tensor(rows, device=prompts.keys.device)
        self.keys[:, first_slot:end, ..., :longest] = prompts.keys[:, index]
        self.values[:, first_slot:end, :, :longest] = prompts.values[:, index]

    def window(self, num_slots: int, extent: int) -> tuple[Tensor, Tensor]:
        """Views of the first slots, long enough for `extent` tokens."""
        self.ensure(num_slots, extent)
        return self.keys[:, :num_slots, ..., :extent], self.values[:, :num_slots, :, :extent]

    @torch.inference_mode()
    def move(self, moves: list[Move]) -> None:
        """Copy whole slots; sources and destinations are different slots."""
        if moves:
            source, destination = (torch.tensor(slots, device=self.keys.device) for slots in zip(*moves, strict=True))
            self.keys[:, destination] = self.keys[:, source]
            self.values[:, destination] = self.values[:, source]

    @torch.inference_mode()
    def ensure(self, num_slots: int, extent: int) -> None:
        """Grow, by at least a half where something grows, so that copies stay rare."""
        has_slots, has_extent = self.keys.shape[1], self.keys.shape[-1]
        more_slots = max(num_slots, has_slots * 3 // 2) - has_slots if num_slots > has_slots else 0
        more_extent = _rounded(max(extent, has_extent * 3 // 2)) - has_extent if extent > has_extent else 0
        if more_slots or more_extent:
            self.keys = pad(self.keys, (0, more_extent, 0, 0, 0, 0, 0, more_slots))
            self.values = pad(self.values, (0, 0, 0, more_extent, 0, 0, 0, more_slots))

    def _allocate(self, prompts: PromptKV, num_slots: int, extent: int) -> None:
        num_layers, _, num_kv_heads, head_dim, _ = prompts.keys.shape
        extent = _rounded(extent)
        self.keys = prompts.keys.new_zeros(num_layers, num_slots, num_kv_heads, head_dim, extent)
        self.values = prompts.values.new_zeros(num_layers, num_slots, num_kv_heads, extent, head_dim)


class PromptCache:
    """Prefilled prompts by (weight version, tokens); the oldest forwards go first when it is full.

    The unit is a whole forward, because its prompts share their storage: dropping one alone would free nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._rows: dict[tuple[object, tuple[int, ...]], tuple[PromptKV, int]] = {}
        self._forwards: OrderedDict[int, tuple[int, list[tuple[object, tuple[int, ...]]]]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        self._forwards.clear()
        self._num_tokens = 0

    def rows(
        self, version: object, contexts: list[tuple[int, ...]], prefill: Callable[[list[tuple[int, ...]]], PromptKV]
    ) -> list[tuple[PromptKV, int]]:
        """Where each context lies; those that are not there are prefilled together and kept."""
        missing = [context for context in contexts if (version, context) not in self._rows]
        made: dict[tuple[int, ...], tuple[PromptKV, int]] = {}
        if missing:
            forward = prefill(missing)
            made = {context: (forward, row) for row, context in enumerate(missing)}
        found = [made.get(context) or self._rows[version, context] for context in contexts]
        if missing:
            self._keep(version, missing, forward)
        return found

    def _keep(self, version: object, contexts: list[tuple[int, ...]], forward: PromptKV) -> None:
        num_tokens = len(contexts) * forward.keys.shape[-1]
        if num_tokens > self.max_tokens:
            return
        names: list[tuple[object, tuple[int, ...]]] = [(version, context) for context in contexts]
        self._rows.update({name: (forward, row) for row, name in enumerate(names)})
        self._forwards[id(forward)] = (num_tokens, names)
        self._num_tokens += num_tokens
        while self._num_tokens > self.max_tokens:
            _, (freed_tokens, old_names) = self._forwards.popitem(last=False)
            self._num_tokens -= freed_tokens
            for name in old_names:
                del self._rows[name]


def _rounded(extent: int) -> int:
    return -(-extent // EXTENT_BLOCK) * EXTENT_BLOCK
