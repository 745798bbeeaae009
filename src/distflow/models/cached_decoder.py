"""Runs a Hugging Face decoder by our own prefill and cached decode, over the module's parameters.

The module's projections, norms and MLPs are called unchanged (so LoRA layers and replaced
submodules work); only the attention and the key-value memory are ours.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.models.cpu_kernels.build import NotNative
from distflow.models.cpu_kernels.decode_step import NativeStep
from distflow.models.cpu_kernels.weight_layout import is_plain
from distflow.models.lora import unwrapped

if TYPE_CHECKING:
    from distflow.models.gpu_kernels.decode_step import PagedStep

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Takes layer number, queries `(rows, heads, head_dim)`, keys and values
`(rows, kv_heads, head_dim)` of one token per row, and the scaling of scores; stores keys and
values, and returns the attention's output, as large as the queries."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LONGEST_NATIVE = 128
LONGEST_OF_FEW = 256
FEW_TOKENS = 64
"""Longest context, in tokens, after which native code runs the rest of prompts: it attends query by
query, but starts fast, which counts if all rests together have few tokens."""
# frequencies that do not depend on the length seen so far
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class PromptKV:
    """Keys and values of prefilled prompts, and where their decoding starts.

    keys, values: `(layers, prompts, kv_heads, longest, head_dim)`, values in bfloat16 if native
    code decodes in it; entries beyond a prompt's length are finite and meaningless. hidden:
    `(prompts, hidden)`, after the final norm, of each prompt's last token.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor


class DecoderView:
    """Prefill and decode for Llama-like models. Owns no weights: it sees each in-place update of
    the module's."""

    def __init__(
        self,
        model: nn.Module,
        native: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """native: decode by native code (CUDA: kernels) if available for this machine and model.
        compute_dtype: bfloat16 means products in it and the rest in float32, like a trainer with
        autocast; attention is in float32 with float32 weights, and keys and values in bfloat16 with
        bfloat16 weights. None: everything in the weights' dtype. Raises UserError for a family that
        it cannot run, or whose logits differ from the module's."""
        causal = unwrapped(model)
        config = causal.config
        refusal = why_not_embedded(config)
        if refusal is None and not hasattr(causal, "lm_head"):
            refusal = "it has no lm_head"

        if refusal is not None:
            raise UserError(
                f"the embedded rollout engine cannot run this model: {refusal}; set "
                "actor_rollout_ref.rollout.name=hf"
            )

        self._body = causal.model
        self._module = causal

        self._low = None if compute_dtype == torch.float32 else compute_dtype

        self._fused = self.device.type != "cpu" and _has_plain_norms(self._body)
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = self._body.layers[0].self_attn.head_dim
        self.vocab_size: int = causal.lm_head.out_features
        self.max_positions: int = config.max_position_embeddings
        self._cos = self._sin = torch.empty(0, self.head_dim)
        self._native: NativeStep | None = None
        self._kernels: PagedStep | None = None
        self._values_dtype = self.dtype

        if native:
            with suppress(NotNative):
                self._take_native(causal)

        self._check_against_module()

    def _take_native(self, causal: nn.Module) -> None:
        if self.device.type != "cuda":
            self._native = NativeStep(causal, halves=self._low is not None)
            self._values_dtype = self._native.values_dtype
            return

        try:
            from distflow.models.gpu_kernels.decode_step import PagedStep
        except ImportError as error:  # Triton comes with torch's builds for CUDA
            raise NotNative(f"there is no Triton: {error}") from error

        self._kernels = PagedStep(causal, self._low)

    @property
    def device(self) -> torch.device:
        return self._body.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._body.embed_tokens.weight.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """`(rows, hidden)` → `(rows, vocab)`."""
        if self._native is not None and self._native.refresh_head():
            return self._native.logits(hidden)
        with self._autocast():
            return self._module.lm_head(self._narrow(hidden))

    def refresh_weights(self) -> None:
        """Reload weights, which may have changed without torch counting it."""
        if self._native is not None:
            self._native.expire()

    def prefill(self, prompts: list[tuple[int, ...]]) -> PromptKV:
        """Run prompts, padded on the right: under a causal mask no real token sees the padding."""
        ids = self._padded(prompts)
        longest = ids.shape[1]
        lengths = send(torch.tensor([len(prompt) for prompt in prompts]), self.device)
        keys, values = self._memory(len(prompts), longest)

        def attend_to(
            index: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> Tensor:
            keys[index] = key.transpose(1, 2)
            values[index] = value.transpose(1, 2)
            unrounded = value.transpose(1, 2).to(keys.dtype)
            return self._attend_all(query, keys[index], unrounded, scale, is_causal=True)

        positions = torch.arange(longest, device=self.device)[None]
        hidden = self._through_layers(ids, positions, longest, attend_to)
        last = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        return PromptKV(keys, values, self._norm(self._body.norm, last))

    def prefill_after(
        self, prompts: list[tuple[int, ...]], prefixes: list[tuple[Tensor, Tensor]]
    ) -> PromptKV:
        """As `prefill`, but only runs the tokens after each prompt's prefix, at least one.
        prefixes: keys and values of the first tokens, `(layers, kv_heads, tokens, head_dim)`."""
        begins = [keys.shape[-2] for keys, _ in prefixes]
        rests = [prompt[begin:] for prompt, begin in zip(prompts, begins, strict=True)]
        ids = self._padded(rests)
        width = ids.shape[1]
        extent = max(begins) + width

        keys, values = self._memory(len(prompts), extent)
        for row, (old_keys, old_values) in enumerate(prefixes):
            keys[:, row, :, : begins[row]] = old_keys
            values[:, row, :, : begins[row]] = old_values

        ends = [len(rest) - 1 for rest in rests]
        first, last = send(torch.tensor([begins, ends]), self.device)
        positions = first[:, None] + torch.arange(width, device=self.device)
        rows = torch.arange(len(prompts), device=self.device)

        longest_native = LONGEST_NATIVE
        if ids.numel() <= FEW_TOKENS:
            longest_native = LONGEST_OF_FEW

        if self._native is not None and extent <= longest_native and self._native.refresh():
            rotary = self._rotary_rows(extent, keys)
            states = self._native.decode(ids.flatten(), positions.flatten(), keys, values, *rotary)
            hidden = states.unflatten(0, ids.shape)[rows, last]
        else:
            states = self._run_after(ids, positions, keys, values)
            hidden = self._norm(self._body.norm, states[rows, last])

        longest = max(len(prompt) for prompt in prompts)
        return PromptKV(keys[..., :longest, :], values[..., :longest, :], hidden)

    def _run_after(self, ids: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The last layer's output for these tokens, whose keys and values are written to the
        memory, and which see what it has before them."""
        extent = keys.shape[-2]
        rows = torch.arange(len(ids), device=self.device)[:, None]
        seen = (torch.arange(extent, device=self.device) <= positions[..., None])[:, None]

        def attend_to(
            index: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> Tensor:
            keys[index][rows, :, positions] = key
            values[index][rows, :, positions] = value.to(values.dtype)
            known = values[index].to(keys.dtype)
            return self._attend_all(query, keys[index], known, scale, attn_mask=seen)

        # Padding may lie beyond the model's positions. The table must not grow for it: CUDA graphs
        # read the old one.
        last = min(extent, self.max_positions) - 1
        return self._through_layers(ids, positions.clamp(max=last), last + 1, attend_to)

    def _padded(self, prompts: list[tuple[int, ...]]) -> Tensor:
        """int64 `(prompts, longest)`, on the device."""
        longest = max(len(prompt) for prompt in prompts)
        rows = [prompt + (0,) * (longest - len(prompt)) for prompt in prompts]
        return send(torch.tensor(rows), self.device)

    def _memory(self, num_rows: int, extent: int) -> tuple[Tensor, Tensor]:
        """Zeros for keys and values, see `PromptKV`."""
        shape = (self.num_layers, num_rows, self.num_kv_heads, extent, self.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return keys, torch.zeros_like(keys, dtype=self._values_dtype)

    def _attend_all(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, **mask: Any
    ) -> Tensor:
        """Attention of queries `(rows, tokens, heads, head_dim)`, which it returns, to keys and
        values `(rows, kv_heads, extent, head_dim)`."""
        shares_keys = self.num_heads != self.num_kv_heads
        mixed = scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, scale=scale, enable_gqa=shares_keys, **mask
        )
        return mixed.transpose(1, 2)

    def decode(self, token_ids: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One token per row, written to the memory at its position and attending up to it.

        token_ids, positions: `(rows,)`. keys, values: `(layers, rows, kv_heads, extent, head_dim)`,
        written in place; `extent` is above every position, and the memory beyond a row's position
        must be finite. Each layer's rows should be contiguous: with strides the products take up to
        three times as long. Returns `(rows, hidden)` after the final norm.
        """
        extent = keys.shape[-2]
        if self._native is not None and self._native.refresh():
            rotary = self._rotary_rows(extent, keys)
            return self._native.decode(token_ids, positions, keys, values, *rotary)

        rows = torch.arange(token_ids.shape[0], device=self.device)
        bias = self._bias(positions, extent)

        def attend_to(
            index: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> Tensor:
            keys[index][rows, :, positions] = key
            values[index][rows, :, positions] = value.to(values.dtype)
            return attend(query, keys[index], values[index].to(keys.dtype), bias, scale)

        hidden = self._through_layers(token_ids, positions, extent, attend_to)
        return self._norm(self._body.norm, hidden)

    def decode_paged(
        self, token_ids: Tensor, positions: Tensor, keys: Tensor, values: Tensor, tables: Tensor
    ) -> Tensor:
        """As `decode`, over pages: keys and values are
        `(layers, pages, kv_heads, page_tokens, head_dim)`, finite, and tables `(rows, width)` are
        the pages of each row in order."""
        if self._kernels is not None:
            hidden = self._embed(token_ids)
            rotary = self._rotary_rows(self.max_positions, hidden)
            with self._autocast():
                return self._kernels.decode(hidden, positions, rotary, tables, keys, values)

        num_heads, page_tokens = keys.shape[2:4]
        bias = self._bias(positions, tables.shape[1] * page_tokens)
        page = tables.gather(1, (positions // page_tokens)[:, None]).squeeze(1)
        offset = positions % page_tokens
        heads = torch.arange(num_heads, device=self.device)

        # (rows, kv heads, width)
        gathered = (tables[:, None] * num_heads + heads[:, None]).flatten()

        def write_and_gather(memory: Tensor, new: Tensor) -> Tensor:
            memory[page, :, offset] = new
            pages = memory.flatten(0, 1).index_select(0, gathered)
            return pages.view(len(new), num_heads, -1, self.head_dim)

        def attend_to(
            index: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> Tensor:
            all_keys = write_and_gather(keys[index], key)
            all_values = write_and_gather(values[index], value)
            return attend(query, all_keys, all_values, bias, scale)

        hidden = self._through_layers(token_ids, positions, self.max_positions, attend_to)
        return self._norm(self._body.norm, hidden)

    def _through_layers(
        self, token_ids: Tensor, positions: Tensor, extent: int, attend_to: Attend
    ) -> Tensor:
        """The last layer's output `(..., hidden)` for tokens `(...)` at these positions, all below
        `extent`."""
        hidden = self._embed(token_ids)
        tables = self._rotary_rows(extent, hidden)
        cos, sin = (table[positions].unsqueeze(-2) for table in tables)

        for index, layer in enumerate(self._body.layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            mixed = attend_to(index, query, key, value, layer.self_attn.scaling)
            hidden = self._rest_of_layer(layer, hidden, mixed)

        return hidden

    def _bias(self, positions: Tensor, extent: int) -> Tensor:
        """`(rows * kv_heads, heads of each, extent)`: 0 up to the row's position, -inf after it."""
        unseen = torch.arange(extent, device=self.device) > positions[:, None]
        dtype = torch.promote_types(self.dtype, torch.float32)
        bias = torch.zeros(len(positions), 1, extent, dtype=dtype, device=self.device)
        bias = bias.masked_fill_(unseen[:, None], float("-inf"))
        per_head = self.num_heads // self.num_kv_heads
        return bias.repeat_interleave(self.num_kv_heads, 0).expand(-1, per_head, -1)

    def _project(
        self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `(..., heads, head_dim)`, rotated keys and values
        `(..., kv_heads, head_dim)`."""
        attention = layer.self_attn
        normed = self._narrow(self._norm(layer.input_layernorm, hidden))

        with self._autocast():
            query, key, value = (
                project(normed).unflatten(-1, (-1, self.head_dim))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )

        if hasattr(attention, "q_norm") and hasattr(attention, "k_norm"):
            query = attention.q_norm(query)
            key = attention.k_norm(key)

        # (first, second) · cos + (-second, first) · sin, of the halves of each head
        both = torch.cat((query, key), dim=-2)
        rolled = torch.roll(both, self.head_dim // 2, -1)
        both = torch.addcmul(both * cos, rolled, sin).to(self.dtype)

        return both[..., : self.num_heads, :], both[..., self.num_heads :, :], value

    def _rest_of_layer(self, layer: Any, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and MLP with their residuals. mixed: attention's result, equally many
        numbers per token."""
        with self._autocast():
            hidden = hidden + layer.self_attn.o_proj(mixed.reshape(*hidden.shape[:-1], -1))
            normed = self._norm(layer.post_attention_layernorm, hidden)
            return hidden + layer.mlp(self._narrow(normed))

    def _autocast(self) -> AbstractContextManager[object]:
        """Autocast for products with weights only."""
        if self._low in (None, self.dtype):
            return nullcontext()
        return torch.autocast(self.device.type, self._low)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """The start of the residual stream, which is float32 if only products have a lower
        precision."""
        hidden = self._body.embed_tokens(token_ids)
        return hidden if self._low is None else hidden.float()

    def _narrow(self, normed: Tensor) -> Tensor:
        """Cast the input of products with weights of their dtype; autocast handles other
        weights."""
        if self._low == self.dtype:
            return normed.to(self.dtype)
        return normed

    def _norm(self, module: Any, hidden: Tensor) -> Tensor:
        """The norm; in float32 one kernel instead of six."""
        if self._fused and hidden.dtype == torch.float32:
            return rms_norm(
                hidden, hidden.shape[-1:], module.weight.float(), module.variance_epsilon
            )
        return module(hidden)

    def _rotary_rows(self, extent: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary table `(positions, head_dim)`, at least `extent` long; computed once by the
        module itself. The sines of the first half are negative, see `_project`."""
        table = self._cos
        if table.shape[0] < extent or table.dtype != like.dtype or table.device != like.device:
            positions = torch.arange(max(extent, 2 * table.shape[0]), device=like.device)[None]
            cos, sin = self._body.rotary_emb(like, positions)
            first, second = sin[0].chunk(2, dim=-1)
            self._cos = cos[0]
            self._sin = torch.cat((-first, second), dim=-1)

        return self._cos, self._sin

    @torch.no_grad()
    def _check_against_module(self) -> None:
        """Compare logits of a prefill and two decoded tokens with the module's forward.

        Supported families agree up to rounding; a variant that only looks like one is off by far
        more. The bound is 1e-3 of the logits' size in float32 (absolute below size 1) and 0.1 of it
        in 16-bit types.
        """
        was_training = self._module.training
        self._module.eval()
        tokens = [(7 * i + 3) % self.vocab_size for i in range(7)]
        ids = torch.tensor(tokens, device=self.device)
        with self._autocast():
            expected = self._module(input_ids=ids[None], use_cache=False).logits[0].float()
        prompts = self.prefill([tuple(tokens[:5]), tuple(tokens[:3])])
        found = [self.logits(prompts.hidden)]
        keys = nn.functional.pad(prompts.keys, (0, 0, 0, 59))
        values = nn.functional.pad(prompts.values, (0, 0, 0, 59))
        decode = self.decode
        if self._kernels is not None:  # a page of 64 tokens for each row
            decode = partial(self.decode_paged, tables=torch.arange(2, device=self.device)[:, None])

        for step in range(2):
            positions = torch.tensor([5 + step, 3 + step], device=self.device)
            found.append(self.logits(decode(ids[positions], positions, keys, values)))

        self._module.train(was_training)
        gaps = torch.cat(found).float() - expected[[4, 2, 5, 3, 6, 4]]
        difference = gaps.abs().max().item()

        relative = 0.1
        if (self._low or self.dtype) == torch.float32:
            relative = 1e-3

        tolerance = relative * max(1.0, expected.abs().max().item())
        if not difference <= tolerance:
            raise UserError(
                "the embedded rollout engine computes different logits than this "
                f"{self._module.config.model_type} model itself (difference {difference:.2g}, "
                f"allowed {tolerance:.2g}); set actor_rollout_ref.rollout.name=hf"
            )


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Batched products over (row, kv head); the query heads of a kv head are the rows of one
    matrix.

    query: `(rows, heads, head_dim)`; bias: `(rows * kv_heads, heads of each, extent)`, in float32
    like the scores if keys are 16-bit, in which case the attention weights are rounded once, as in
    fused kernels.
    """
    keys = keys.flatten(0, 1)
    values = values.flatten(0, 1)

    query = query.reshape(len(keys), -1, keys.shape[-1])
    if keys.device.type == "cuda" and bias.dtype != keys.dtype:
        scores = torch.baddbmm(bias, query, keys.transpose(1, 2), bias.dtype, alpha=scaling)
    else:  # torch has a product of another dtype than its operands' only for CUDA
        query = query.to(bias.dtype)
        scores = torch.baddbmm(bias, query, keys.transpose(1, 2).to(bias.dtype), alpha=scaling)

    return torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values)


def _has_plain_norms(body: Any) -> bool:
    """Whether the norms of a decoder's residual stream are those of `transformers`, without
    hooks."""
    norms = [body.norm]
    for layer in body.layers:
        norms += (layer.input_layernorm, layer.post_attention_layernorm)
    return all(is_plain(norm, "RMSNorm") for norm in norms)


def why_not_embedded(config: Any) -> str | None:
    """Why a model with this config of `transformers` cannot run here, or None."""
    family = config.model_type
    if family not in FAMILIES:
        return f"family {family!r} is not one of {', '.join(FAMILIES)}"

    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        return f"rotary type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}"

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ()
    slides = "sliding_attention" in layer_types or family == "mistral"
    if slides and window is not None and window < config.max_position_embeddings:
        return f"it uses a sliding window of {window} tokens"

    return None
