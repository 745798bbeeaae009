"""Asynchronous decode steps: each reads its input from the device, where the previous step left it,
so the host need not wait.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from distflow.device_transfer import free_bytes, send
from distflow.errors import UserError
from distflow.models.cached_decoder import DecoderView, PromptKV
from distflow.models.row_adapters import RowAdapter, rows_with
from distflow.rollout.embedded.decode_graphs import CudaGraphs
from distflow.rollout.embedded.decode_state import DecodeState, Laws, Lease
from distflow.rollout.embedded.page_memory import PageCopy, PageMemory, PagePool, pages_for
from distflow.rollout.embedded.prefix_cache import PrefixCache
from distflow.rollout.embedded.sampler import rows_by_law
from distflow.rollout.embedded.scheduler import SamplingLaw, Sequence

MEMORY_SHARE = 0.5
"""The share used of the device memory that is free when keys and values are first needed; the rest
is the trainer's."""


_RECORDED_ADAPTERS = 4
"""Each has graphs of its own."""


@dataclass(frozen=True)
class DeviceOptions:
    """How decode steps run on a device."""

    lag: int = 1
    """Decode steps that run while the host reads earlier tokens."""
    page_tokens: int = 64
    """Per page of keys and values."""
    num_pages: int | None = None
    """None for as many as memory holds."""
    graphs: bool = True
    """Use CUDA graphs on a CUDA device."""


class AsyncSteps:
    """Decode steps of all lanes of an engine.

    A sequence has one slot, and all pages that it may need, from its first step to its last, so
    nothing moves or grows, and no step needs the host. Sequences that start from one prompt share
    its full pages. Steps are padded to one of a few numbers of rows, and tables to one of a few
    widths.
    """

    def __init__(
        self, decoder: DecoderView, model: nn.Module, num_slots: int, options: DeviceOptions
    ) -> None:
        """num_slots: of all lanes together."""
        self.lag = options.lag
        self.graphs = CudaGraphs(model, options.graphs and decoder.device.type == "cuda")
        self._decoder = decoder
        self._options = options
        self._num_slots = num_slots
        self._most_pages = pages_for(decoder.max_positions, options.page_tokens)
        self._memory: PageMemory | None = None

        self._adapters: set[RowAdapter] = set()

        # by size: the slots written in the tensor
        self._rows: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._laws: tuple[tuple[SamplingLaw, ...], Laws] = ((), [])
        self.prefixes: PrefixCache[int] = PrefixCache(options.page_tokens)
        self.pages = PagePool(0, self.prefixes.pop_oldest)
        self._state = DecodeState(0, 0, 0, torch.device("cpu"))

    def release(self) -> None:
        """Drop all memory; no sequence may have a lease. It is allocated again with the next
        one."""
        self.graphs.clear()
        self.forget_prefixes()
        self._memory = None
        self._rows.clear()
        self._state = DecodeState(0, 0, 0, torch.device("cpu"))

    def check(self, sequence: Sequence) -> None:
        """Raises UserError for a sequence that does not fit into all pages together."""
        room = self._open().keys.shape[1] - 1
        if self._num_needed(sequence) > room:
            raise UserError(
                f"a prompt of {len(sequence.prompt_ids)} tokens with up to "
                f"{sequence.params.max_tokens} new ones: the device has memory for keys and values "
                f"of {room * self._options.page_tokens} tokens; lower data.max_prompt_length or "
                "data.max_response_length"
            )

    def num_fitting(self, waiting: Iterable[Sequence], most: int) -> int:
        """How many of the first waiting sequences can get slot and pages, at most `most`."""
        self._open()
        free = self.pages.num_free
        count = 0
        for sequence in islice(waiting, most):
            free -= self._num_needed(sequence)
            if free < 0:
                break
            count += 1

        return count

    def lease(
        self, row: int, sequences: Rows[Sequence], found: list[int]
    ) -> tuple[list[Lease], list[PageCopy]]:
        """Leases for sequences with one context, which was prefilled as that row, and the copies to
        make for them. found: pages that hold the start of the context."""
        size = self._options.page_tokens
        length = len(sequences[0].context)

        leases: list[Lease] = []
        parts: list[PageCopy] = []
        common = found
        for sequence in sequences:
            self.pages.share(common)
            pages = common + self.pages.take(self._num_needed(sequence) - len(common))
            parts.append((row, len(common) * size, length, pages))
            common = pages[: length // size]
            leases.append(Lease(self._state.free.pop(), pages, len(sequence.token_ids)))

        return leases, parts

    def free(self, lease: Lease) -> None:
        """Free slot and pages. Launched steps may still write to them, but the next owner's steps
        run later."""
        self._state.free.append(lease.slot)
        self.pages.give_back(lease.pages)

    def keep(self, root: tuple[object, ...], sequence: Sequence, lease: Lease) -> None:
        """Keep the sequence's full pages findable until they are needed for something else."""
        self.prefixes.add(
            root, sequence.context[:-1], lambda index: self.pages.keep(lease.pages[index])
        )

    def gathered(self, pages: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values, `(layers, kv_heads, tokens, head_dim)`."""
        memory = self._open()
        index = send(torch.tensor(pages, dtype=torch.int64), self._decoder.device)
        keys, values = (
            each[:, index].transpose(1, 2).flatten(2, 3) for each in (memory.keys, memory.values)
        )
        return keys, values

    def forget_prefixes(self) -> None:
        self.prefixes.clear()
        self.pages.forget_kept()

    # Steps return the result of `DecodeState.draw`; the sequences' columns come first.

    def first_draw(
        self,
        fills: list[tuple[PromptKV, list[PageCopy]]],
        hidden: Tensor,
        sequences: Rows[Sequence],
        leases: Rows[Lease],
    ) -> Tensor:
        """Fill the pages of new leases, and draw after the last tokens of their contexts. hidden:
        `(rows, hidden)`."""
        memory = self._open()
        for forward, parts in fills:
            memory.fill(forward, parts)
        self._state.begin(sequences, leases)
        slots = send(torch.tensor([lease.slot for lease in leases]), self._decoder.device)

        return self._state.draw(
            self._decoder.logits(hidden), slots, self._laws_of(sequences, len(sequences))
        )

    def decode(self, sequences: Rows[Sequence], leases: Rows[Lease]) -> Tensor:
        size = padded(len(leases), self._num_slots)
        longest = max(
            len(sequence.prompt_ids) + lease.num_drawn
            for sequence, lease in zip(sequences, leases, strict=True)
        )
        width = min(rounded(pages_for(longest, self._options.page_tokens)), self._most_pages)
        slots, laws = self._slots_of(leases, size), self._laws_of(sequences, size)
        forward = partial(self._logits, slots, width)

        adapters = [sequence.adapter for sequence in sequences]
        nobody = [adapters[0]] * (size - len(adapters))
        with rows_with([*adapters, *nobody], self._decoder.device):
            if len({*adapters}) > 1:
                # which rows have which adapter differs from step to step, so it is not recorded
                return self._state.draw(forward(), slots, laws)

            shape = (size, width, self._recorded(adapters[0]))
            if len(laws) == 1:  # the only law covers all rows
                return self.graphs.run(
                    (*shape, laws[0][0]), lambda: self._state.draw(forward(), slots, laws)
                )

            return self._state.draw(self.graphs.run((*shape, None), forward), slots, laws)

    def _recorded(self, adapter: RowAdapter | None) -> int | None:
        """The number of an adapter, which lives while graphs read it. Too many drop all graphs."""
        if adapter is None:
            return None

        if adapter not in self._adapters and len(self._adapters) == _RECORDED_ADAPTERS:
            self.graphs.clear()
            self._adapters.clear()

        self._adapters.add(adapter)
        return adapter.number

    def _logits(self, slots: Tensor, width: int) -> Tensor:
        state = self._state
        memory = self._open()
        positions = state.position[slots]
        tables = state.tables[:, :width][slots]
        hidden = self._decoder.decode_paged(
            state.token[slots], positions, memory.keys, memory.values, tables
        )

        return self._decoder.logits(hidden)

    def _slots_of(self, leases: Rows[Lease], size: int) -> Tensor:
        """The slots as a tensor, always the same one for a size, rewritten if it holds other
        slots."""
        wanted = tuple(lease.slot for lease in leases) + (self._state.trash,) * (size - len(leases))
        has, tensor = self._rows.get(size, ((), None))
        if tensor is None:
            tensor = torch.zeros(size, dtype=torch.int64, device=self._decoder.device)

        if has != wanted:
            tensor.copy_(send(torch.tensor(wanted), self._decoder.device))
            self._rows[size] = (wanted, tensor)

        return tensor

    def _laws_of(self, sequences: Rows[Sequence], size: int) -> Laws:
        """Rows without a sequence have the sampling parameters of the first."""
        laws = tuple(sequence.law for sequence in sequences) + (sequences[0].law,) * (
            size - len(sequences)
        )
        if self._laws[0] != laws:
            groups = [
                (law, send(torch.tensor(rows), self._decoder.device))
                for law, rows in rows_by_law(laws).items()
            ]
            self._laws = (laws, groups)

        return self._laws[1]

    # Memory.

    def _num_needed(self, sequence: Sequence) -> int:
        return pages_for(
            len(sequence.prompt_ids) + sequence.params.max_tokens, self._options.page_tokens
        )

    @torch.inference_mode()
    def _open(self) -> PageMemory:
        if self._memory is None:
            decoder = self._decoder
            options = self._options

            num_pages = options.num_pages
            if num_pages is None:
                # As many as all slots could need, or fit into the share of free memory, plus
                # `TRASH`.
                num_pages = self._num_slots * self._most_pages
                if (device := decoder.device).type != "cpu":
                    numbers = (
                        2
                        * decoder.num_layers
                        * decoder.num_kv_heads
                        * decoder.head_dim
                        * options.page_tokens
                    )
                    num_pages = min(
                        num_pages,
                        int(MEMORY_SHARE * free_bytes(device))
                        // (numbers * decoder.dtype.itemsize),
                    )

                num_pages += 1

            self._memory = PageMemory(decoder, num_pages, options.page_tokens)
            self.pages = PagePool(num_pages, self.prefixes.pop_oldest)
            self._state = DecodeState(
                self._num_slots, self._most_pages, decoder.vocab_size, decoder.device
            )

        return self._memory


def padded(num_rows: int, most: int) -> int:
    """The next power of two up to 32, then the next multiple of 32; at most `most`."""
    return min(
        1 << (num_rows - 1).bit_length() if num_rows <= 32 else -(-num_rows // 32) * 32, most
    )


def rounded(num_pages: int) -> int:
    """Rounded up to three significant bits: at most a quarter more than needed."""
    step = 1 << max(0, num_pages.bit_length() - 3)
    return -(-num_pages // step) * step
