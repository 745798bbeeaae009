"""A packed row's way through a decoder by native code. In float32 a layer is three operations in place of some fifty,
whose parts stay in the processor's cache; in bfloat16 products are torch's, and what stands between them is ours. For
models and machines where there is none, `transformers` computes."""

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
    """Whether `packed_layers` computes what the decoder does, as it is now: under autocast to bfloat16, or a small one,
    with its weights in float32 on a CPU, and nothing in it that is another's than `transformers`'."""
    config = decoder.config
    if config.model_type not in FAMILIES or not native.is_there():
        return False
    if torch.is_autocast_enabled("cpu"):
        if torch.get_autocast_dtype("cpu") != torch.bfloat16:
            return False
    elif config.hidden_size * config.intermediate_size > LARGEST:
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
    hidden = decoder.embed_tokens(input_ids)
    cos, sin = (each[0] for each in decoder.rotary_emb(hidden, position_ids[None]))
    through = _in_bfloat16 if torch.is_autocast_enabled("cpu") else _in_float32
    with torch.autocast("cpu", enabled=False):
        states: Tensor = decoder.norm(through(decoder.layers, hidden, cos, sin, sequences))
    return states


def _in_float32(layers: Any, hidden: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
    for layer in layers:
        queries, keys, values = before_attention(layer, hidden, cos, sin)
        mixed = attend(queries, keys, values, sequences, layer.self_attn.scaling)
        hidden = after_attention(layer, hidden, mixed)
    return hidden


def _in_bfloat16(layers: Any, hidden: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
    added = None
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        hidden, normed = add_norm(hidden, added, layer.input_layernorm)
        projected = _linear(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        mixed = attend(*split_heads(projected, cos, sin, attention), sequences, attention.scaling)
        added = _linear(mixed.flatten(1).bfloat16(), attention.o_proj)
        hidden, normed = add_norm(hidden, added, layer.post_attention_layernorm)
        added = _linear(gate(_linear(normed, mlp.gate_proj, mlp.up_proj)), mlp.down_proj)
    return hidden if added is None else hidden + added


def _linear(x: Tensor, *modules: nn.Linear) -> Tensor:
    """What each makes of x, side by side; rounded as by autocast."""
    return linear(x, *side_by_side(modules, torch.bfloat16))
