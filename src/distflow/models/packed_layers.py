"""A packed row's way through a decoder by native code. In float32 a layer is three operations in place of some fifty,
whose parts stay in the processor's cache; of a larger one, and in bfloat16, products are torch's, and what stands
between them is ours. For models and machines where there is none, `transformers` computes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distflow.models.decoder import FAMILIES
from distflow.models.native import build as native
from distflow.models.native.attend import Sequences, attend
from distflow.models.native.between import add_norm, gate, split_heads
from distflow.models.native.layer import after_attention, before_attention
from distflow.models.native.packing import check, parts, side_by_side

LARGEST = 2**19
"""Numbers of a matrix of a gated MLP in float32: of more the cache no longer holds what a thread works with, and
torch's products gain on ours."""


def runs_natively(decoder: Any) -> bool:
    """Whether `packed_layers` computes what the decoder does, as it is now: under autocast to bfloat16 or none, with
    its weights in float32 on a CPU, and nothing in it that is another's than `transformers`'."""
    config = decoder.config
    if config.model_type not in FAMILIES or not native.is_there():
        return False
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return False
    if 2 * len(decoder.rotary_emb.inv_freq) != decoder.layers[0].self_attn.head_dim:  # a part of each head is rotated
        return False
    if decoder.training and (config.attention_dropout or any(layer.gradient_checkpointing for layer in decoder.layers)):
        return False
    try:
        check((decoder, *decoder.layers, *parts(decoder)), config.rms_norm_eps)
    except native.NotNative:
        return False
    return True


def packed_layers(decoder: Any, input_ids: Tensor, position_ids: Tensor, sequences: Sequences) -> Tensor:
    """Last hidden states `(rows, hidden)` in float32 of a row of tokens, both `(rows,)`; differentiable once."""
    hidden, config = decoder.embed_tokens(input_ids), decoder.config
    cos, sin = (each[0] for each in decoder.rotary_emb(hidden, position_ids[None]))
    given = (decoder.layers, hidden, cos, sin, sequences)
    low = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False):
        if low or config.hidden_size * config.intermediate_size > LARGEST:
            hidden = _by_torchs_products(*given, torch.bfloat16 if low else torch.float32)
        else:
            hidden = _in_cache(*given)
        states: Tensor = decoder.norm(hidden)
    return states


def _in_cache(layers: Any, hidden: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
    for layer in layers:
        queries, keys, values = before_attention(layer, hidden, cos, sin)
        mixed = attend(queries, keys, values, sequences, layer.self_attn.scaling)
        hidden = after_attention(layer, hidden, mixed)
    return hidden


def _by_torchs_products(
    layers: Any, hidden: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences, dtype: torch.dtype
) -> Tensor:
    """dtype: of what products take and make."""

    def linear_of(x: Tensor, *modules: nn.Linear) -> Tensor:  # what each makes of x, side by side
        return linear(x, *side_by_side(modules, dtype))

    added = None
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        hidden, normed = add_norm(hidden, added, layer.input_layernorm, dtype)
        projected = linear_of(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        mixed = attend(*split_heads(projected, cos, sin, attention), sequences, attention.scaling)
        added = linear_of(mixed.flatten(1).to(dtype), attention.o_proj)
        hidden, normed = add_norm(hidden, added, layer.post_attention_layernorm, dtype)
        added = linear_of(gate(linear_of(normed, mlp.gate_proj, mlp.up_proj)), mlp.down_proj)
    return hidden if added is None else hidden + added
