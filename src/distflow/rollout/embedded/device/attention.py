"""Attention of one token a row over paged memory: the row's pages are gathered, then the products of `DecoderView`.

torch has a kernel that reads pages where they lie (`torch.nn.attention.varlen`, `block_table`), but only with an
implementation of FlashAttention that has to be installed besides; FlexAttention needs a compiler.
"""

import torch
from torch import Tensor

from distflow.models.decoder import attend
from distflow.rollout.embedded.device.pages import PageMemory


class PagedAttention:
    """Of one decode step. All layers share the places that are written and gathered."""

    def __init__(self, memory: PageMemory, tables: Tensor, positions: Tensor, bias: Tensor) -> None:
        """tables: `(rows, width)`, pages of each row in order; positions: `(rows,)`, of the rows' tokens; bias: see
        `attend`, of `width` pages."""
        self._memory = memory
        self._bias = bias
        num_kv_heads = memory.keys.shape[2]
        self._page = tables.gather(1, (positions // memory.page_tokens)[:, None]).squeeze(1)
        self._offset = positions % memory.page_tokens
        heads = torch.arange(num_kv_heads, device=tables.device)
        self._gathered = (tables[:, None] * num_kv_heads + heads[:, None]).flatten()  # (rows, kv heads, width)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Keep the tokens' keys and values, `(rows, kv_heads, head_dim)`, and attend to all up to them."""
        keys, values = self._kept(self._memory.keys[layer], key), self._kept(self._memory.values[layer], value)
        return attend(query, keys, values, self._bias, scaling)

    def _kept(self, memory: Tensor, new: Tensor) -> Tensor:
        """Write what is new; all of each row, `(rows, kv_heads, width * page_tokens, head_dim)`."""
        memory[self._page, :, self._offset] = new
        pages = memory.flatten(0, 1).index_select(0, self._gathered)
        return pages.view(len(new), memory.shape[1], -1, memory.shape[-1])
