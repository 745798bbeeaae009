"""A packed row's way through a decoder by native code: each layer is three operations in place of some fifty, whose
parts stay in the processor's cache. For models and machines where there is none, `transformers` computes."""

from typing import Any

import torch
from torch import Tensor

from distflow.models.decoder import FAMILIES
from distflow.models.native import build as native
from distflow.models.native.attend import Sequences, attend
from distflow.models.native.layer import after_attention, before_attention
from distflow.models.native.packing import check, parts

LARGEST = 2**19
"""Numbers of a matrix of a gated MLP: of more the cache no longer holds what a thread works with, and torch's products
gain on ours."""


def runs_natively(decoder: Any) -> bool:
    """Whether `packed_layers` computes what the decoder does, as it is now: a small one, with its weights in float32 on
    a CPU, and nothing in it that is another's than `transformers`'."""
    config = decoder.config
    if config.model_type not in FAMILIES or torch.is_autocast_enabled("cpu") or not native.is_there():
        return False
    if config.hidden_size * config.intermediate_size > LARGEST:
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
    """Last hidden states `(rows, hidden)` of a row of tokens, both `(rows,)`; differentiable once."""
    hidden = decoder.embed_tokens(input_ids)
    cos, sin = (each[0] for each in decoder.rotary_emb(hidden, position_ids[None]))
    for layer in decoder.layers:
        queries, keys, values = before_attention(layer, hidden, cos, sin)
        mixed = attend(queries, keys, values, sequences, layer.self_attn.scaling)
        hidden = after_attention(layer, hidden, mixed)
    states: Tensor = decoder.norm(hidden)
    return states
