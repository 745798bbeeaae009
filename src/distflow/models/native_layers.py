"""A decoder's layers over packed sequences by native code, where there is some for the model and
the machine.

On a CPU in float32 a layer is three operations, which stay in the processor's cache, instead of
some fifty; in larger layers, in bfloat16, and on CUDA, torch computes the products and native code
the rest.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from distflow.models.cached_decoder import FAMILIES
from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels import training_layer as cpu_layer
from distflow.models.cpu_kernels.weight_layout import check_modules, layer_modules, side_by_side
from distflow.models.packed_attention import attend_together
from distflow.models.packed_layout import Packing

LARGEST = 2**19
"""Elements of a gated MLP's float32 matrix above which the cache cannot hold a thread's data, so
torch's products are faster than ours."""


def runs_natively(decoder: Any) -> bool:
    """Whether `packed_layers` computes the same as the decoder in its present state, with only
    modules of `transformers`: on a CPU with float32 weights, perhaps under autocast to bfloat16; on
    CUDA with products in bfloat16."""
    config = decoder.config
    if config.model_type not in FAMILIES or not _has_code(decoder):
        return False

    head_dim = decoder.layers[0].self_attn.head_dim
    if 2 * len(decoder.rotary_emb.inv_freq) != head_dim:  # only a part of each head is rotated
        return False
    if decoder.training and config.attention_dropout:
        return False

    modules = list(layer_modules(decoder))
    device = decoder.embed_tokens.weight.device.type
    if device == "cuda":
        if head_dim & (head_dim - 1):  # Triton needs powers of two
            return False
        modules.remove(decoder.embed_tokens)  # it is called, as it may have a checkpointing hook
    elif decoder.training and any(layer.gradient_checkpointing for layer in decoder.layers):
        return False

    try:
        check_modules((decoder, *decoder.layers, *modules), config.rms_norm_eps, device)
    except native.NotNative:
        return False

    return True


def _has_code(decoder: Any) -> bool:
    """Whether there is native code for the decoder's device and the dtype of its products."""
    device = decoder.embed_tokens.weight.device.type
    if device == "cpu":
        return native.is_there() and _products_of(decoder) in (torch.float32, torch.bfloat16)
    return device == "cuda" and gpu_layer() is not None and _products_of(decoder) == torch.bfloat16


@functools.cache
def gpu_layer() -> Any:
    """The kernels of `gpu_kernels/training_layer.py`; None without Triton, or if it cannot
    compile."""
    try:
        from distflow.models.gpu_kernels import decode_step, training_layer

        decode_step.try_to_compile(torch.device("cuda"))
    except (ImportError, native.NotNative):
        return None

    return training_layer


def _products_of(decoder: Any) -> torch.dtype:
    weight = decoder.embed_tokens.weight
    kind = weight.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def packed_layers(decoder: Any, embedded: Tensor, position_ids: Tensor, packing: Packing) -> Tensor:
    """Last hidden states `(rows, hidden)` of a row of embedded tokens, which have positions
    `(rows,)`; in float32 if the weights are. Differentiable once."""
    dtype = _products_of(decoder)
    weight = decoder.embed_tokens.weight
    config = decoder.config
    hidden = embedded.float()
    cos, sin = (each[0] for each in decoder.rotary_emb(hidden, position_ids[None]))

    with torch.autocast(weight.device.type, enabled=False):
        if weight.device.type == "cuda":
            code = LayerCode(gpu_layer(), partial(attend_together, packing), dtype)
            hidden = _by_torchs_products(decoder.layers, hidden, cos, sin, code)
        elif dtype == torch.bfloat16 or config.hidden_size * config.intermediate_size > LARGEST:
            code = LayerCode(cpu_layer, partial(_on_cpu, packing), dtype)
            hidden = _by_torchs_products(decoder.layers, hidden, cos, sin, code)
        else:
            for layer in decoder.layers:
                operands = cpu_layer.before_attention(layer, hidden, cos, sin)
                mixed = _on_cpu(packing, *operands, layer.self_attn.scaling)
                hidden = cpu_layer.after_attention(layer, hidden, mixed)

        return decoder.norm(hidden).to(weight.dtype)


class LayerCode(NamedTuple):
    """What is computed between the products with weights."""

    kernels: Any
    """A module with `add_norm`, `split_heads` and `gate`."""
    attend: Callable[..., Tensor]
    """Takes queries, keys, values and the scale of scores."""
    dtype: torch.dtype
    """Of the products' inputs and outputs."""


def _on_cpu(
    packing: Packing, queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    return cpu_layer.attend(queries, keys, values, packing.sequences, scale)


def _by_torchs_products(
    layers: Any, hidden: Tensor, cos: Tensor, sin: Tensor, code: LayerCode
) -> Tensor:
    """`(rows, hidden)` after all layers. cos, sin: `(rows, head_dim)`."""
    kernels, attend, dtype = code

    def product(x: Tensor, *modules: nn.Linear) -> Tensor:
        """The outputs of each for x, side by side."""
        return linear(x, *side_by_side(modules, dtype))

    def through(layer: Any, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        attention = layer.self_attn
        mlp = layer.mlp
        hidden, normed = kernels.add_norm(hidden, added, layer.input_layernorm, dtype)
        projected = product(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        mixed = attend(*kernels.split_heads(projected, cos, sin, attention), attention.scaling)
        added = product(mixed.flatten(1).to(dtype), attention.o_proj)
        hidden, normed = kernels.add_norm(hidden, added, layer.post_attention_layernorm, dtype)
        gated = kernels.gate(product(normed, mlp.gate_proj, mlp.up_proj))

        return hidden, product(gated, mlp.down_proj)

    added = None
    for layer in layers:
        if layer.training and layer.gradient_checkpointing:
            hidden, added = checkpoint(
                through, layer, hidden, added, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden, added = through(layer, hidden, added)

    return hidden if added is None else hidden + added
