"""Context parallelism: ranks divide the rows of a packed row between them.

Each rank runs the layers on its own rows and reads the keys and values of all, which attention
gathers; their gradients are summed back to the rank that computed them. Outputs of tokens are
gathered on every rank, so losses see whole sequences, and the gradient of an output goes only to
the rank that computed it: gradients of weights are shares that add up over the ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from distflow.device_transfer import send
from distflow.models.packed_layout import Sharing

CONTEXT = "context_group"
"""The attribute of a model whose packed rows are divided: the ranks' process group."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive rows, and what their attention reads. Each piece of a sequence attends to the
    sequence from its first token on."""

    num_queries: Tensor
    """int64 `(pieces,)`, on the CPU."""
    num_keys: Tensor
    """int64 `(pieces,)`, on the CPU: of the sequence up to the piece's last token."""
    keys: slice | Tensor
    """The rows of these tokens, piece after piece."""
    device: torch.device

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """int32 `(pieces + 1,)` on the device: where queries and keys of each piece start, and
        the end."""
        found = []
        for number in (self.num_queries, self.num_keys):
            starts = torch.cat((number.new_zeros(1), number.cumsum(0)))
            found.append(send(starts.int(), self.device))
        return found[0], found[1]

    @cached_property
    def masks(self) -> list[Tensor]:
        """By piece, `(queries, keys)` on the device: which keys a query reads. Layers share them,
        so they are floats, as attention would otherwise convert and keep them in each layer."""
        found = []
        for queries, keys in zip(self.num_queries.tolist(), self.num_keys.tolist(), strict=True):
            hidden = torch.full((queries, keys), float("-inf"), device=self.device)
            found.append(hidden.triu(keys - queries + 1))
        return found


@dataclass(frozen=True, eq=False)
class ContextShare:
    """This rank's rows of a packed row, which is padded by a sequence of its own so that all ranks
    have equally many. Of twice as many chunks as ranks each has one from the head and one from the
    tail: later tokens of a sequence cost more."""

    group: dist.ProcessGroup
    tokens: Tensor
    """int64 `(own rows,)` on the device: the packed token of each; the first one for padding."""
    position_ids: Tensor
    """int64 `(own rows,)` on the CPU: the place of each in its sequence."""
    chunks: tuple[Chunk, Chunk]
    order: Tensor
    """int64 `(rows,)` on the device: where each row is among those of all ranks in turn."""
    place: Tensor
    """int64 `(tokens,)` on the device: the row of each packed token."""

    @staticmethod
    def of(
        lengths: Tensor, sharing: Sharing | None, group: dist.ProcessGroup, device: torch.device
    ) -> "ContextShare":
        """lengths: int64 `(sequences,)`, all at least 1, on the CPU."""
        num_tokens = int(lengths.sum())
        positions = place = torch.arange(num_tokens)
        if sharing is not None:
            positions = sharing.positions.cpu()  # FSDP moves its arguments to the device
            place = sharing.place.cpu()

        size = dist.get_world_size(group)
        num_rows = len(positions)
        padding = torch.arange(-num_rows % (2 * size))
        if len(padding):
            lengths = torch.cat((lengths, torch.tensor([len(padding)])))
            positions = torch.cat((positions, num_tokens + padding))
            place = torch.cat((place, num_rows + padding))

        parts = torch.arange(len(positions)).chunk(2 * size)
        of_ranks = [torch.cat((parts[i], parts[-1 - i])) for i in range(size)]
        rank = dist.get_rank(group)
        own = positions[of_ranks[rank]]
        ends = lengths.cumsum(0)
        starts = ends - lengths
        sequences = torch.searchsorted(ends, own, right=True)

        def chunk(part: Tensor) -> Chunk:
            packed = positions[part]
            pieces = torch.searchsorted(ends, packed, right=True)
            pieces, num_queries = pieces.unique_consecutive(return_counts=True)
            first = starts[pieces]
            after = packed[num_queries.cumsum(0) - 1] + 1
            keys: slice | Tensor = slice(int(first[0]), int(after[-1]))
            if sharing is not None:
                read = [place[i:j] for i, j in zip(first.tolist(), after.tolist(), strict=True)]
                keys = send(torch.cat(read), device)
            return Chunk(num_queries, after - first, keys, device)

        return ContextShare(
            group,
            send(own.where(own < num_tokens, 0), device),
            own - starts[sequences],
            (chunk(parts[rank]), chunk(parts[-1 - rank])),
            send(torch.cat(of_ranks).argsort(), device),
            send(place, device),
        )

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def find(self, predicting: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the packed tokens `predicting` `(n,)` are this rank's, as indices `(own,)`, and
        their rows among its own."""
        size = len(self.tokens)
        at = self.order[self.place[predicting]] - dist.get_rank(self.group) * size
        own = ((at >= 0) & (at < size)).nonzero()[:, 0]
        return own, at[own]

    def gather_rows(self, values: Tensor) -> Tensor:
        """The rows of all ranks `(rows, ...)`, in order, from `(own rows, ...)`."""
        return _GatherRows.apply(values, self.order, self.group)

    def gather_outputs(self, values: Tensor, own: Tensor, number: int) -> Tensor:
        """The outputs of `number` tokens on every rank, of which `values` are this rank's, at
        `own`. All ranks do the same with the result."""
        return _GatherOutputs.apply(values, own, number, self.group)


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        everyone = values.new_empty((len(order), *values.shape[1:]))
        parts = everyone.chunk(dist.get_world_size(group))
        dist.all_gather(list(parts), values.contiguous(), group=group)
        return everyone.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)  # 16 bits would round each sum
        of_ranks = torch.empty_like(grad, dtype=wide, memory_format=torch.contiguous_format)
        of_ranks.index_copy_(0, order, grad.to(wide))
        parts = of_ranks.chunk(dist.get_world_size(ctx.group))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, list(parts), group=ctx.group)
        return own.to(grad.dtype), None, None


class _GatherOutputs(Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, own: Tensor, number: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(own)
        everyone = values.new_zeros((number, *values.shape[1:]))
        everyone.index_copy_(0, own, values)
        dist.all_reduce(everyone, group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grad.index_select(0, own), None, None, None
