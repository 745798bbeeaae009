"""GGUF files through `transformers`' own loader: a llama file written by the format's rules, read
back exactly."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distflow.launch.run_folders.export_checkpoint import export_model
from distflow.models.loading import load_model, load_tokenizer, stop_token_ids
from tests.tiny_models import tiny_tokenizer, write_tiny_model

pytest.importorskip("gguf", reason="wants the extra smollm2")

IDS = torch.arange(3, 40)[None]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """ "model.layers.1.mlp.up_proj.weight" → "blk.1.ffn_up.weight"."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleave_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The format keeps the two halves of a rotary pair side by side."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def packed_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def packed_entry(key: str, value: Any) -> bytes:
    """A metadata entry: the key, the number of the value's type, the value."""
    if isinstance(value, str):
        content = struct.pack("<I", 8) + packed_string(value)
    elif isinstance(value, float):
        content = struct.pack("<If", 6, value)
    elif isinstance(value, int):
        content = struct.pack("<II", 4, value)
    elif isinstance(value[0], str):
        content = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(packed_string, value))
    else:
        content = struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)

    return packed_string(key) + content


def write_gguf(path: Path, model: Any) -> None:
    """A llama of `tiny_models` with its characters as a byte-level vocabulary whose last token is
    "ok"."""
    config = model.config
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(config.vocab_size - 1)] + ["ok"]
    metadata = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["o k"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (config.vocab_size - 3),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    table = b""
    data = b""

    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        weight = parameter.detach().numpy()
        part = name.split(".")[-2]
        weight = interleave_rotary(weight, heads[part]) if part in heads else weight
        shape = weight.shape[::-1]
        table += packed_string(gguf_name(name)) + struct.pack(
            f"<I{len(shape)}Q", len(shape), *shape
        )
        table += struct.pack("<IQ", 0, len(data))  # float32, and where
        data += weight.tobytes() + b"\0" * (-weight.nbytes % 32)

    header = b"GGUF" + struct.pack("<IQQ", 3, len(parameters), len(metadata))
    header += b"".join(packed_entry(key, value) for key, value in metadata.items()) + table
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)


@pytest.fixture
def model(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "m"))
    (tmp_path / "g").mkdir()
    write_gguf(tmp_path / "g" / "tiny.gguf", model)
    return model


def test_weights_and_tokens_come_out_as_they_went_in(tmp_path, model):
    loaded = load_model(tmp_path / "g", gguf_file="tiny.gguf")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    tokenizer = load_tokenizer(tmp_path / "g", gguf_file="tiny.gguf")
    assert tokenizer("1+ok").input_ids[-3:] == [*tiny_tokenizer()("1+").input_ids, 98]
    assert stop_token_ids(loaded, tokenizer) == (2,)
    critic = load_model(tmp_path / "g", gguf_file="tiny.gguf", critic=True)
    assert torch.equal(
        critic.model.layers[1].self_attn.q_proj.weight,
        model.model.layers[1].self_attn.q_proj.weight,
    )


def test_exported_it_is_a_plain_folder(tmp_path, model):
    loaded = load_model(tmp_path / "g", gguf_file="tiny.gguf")
    tokenizer = load_tokenizer(tmp_path / "g", gguf_file="tiny.gguf")
    out = export_model(loaded, tokenizer, tmp_path / "out")
    assert torch.equal(load_model(out)(IDS).logits, model(IDS).logits)
    assert load_tokenizer(out)("1+ok").input_ids == tokenizer("1+ok").input_ids
