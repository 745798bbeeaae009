"""What `benchmarks/gpu.py` divides by: formulas against brute counts; and that all of it runs."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.roofline import Decoder, decode_bytes, forward_flops, update_flops
from tests.tiny_models import tiny_config

FOLDER = Path(__file__).parents[2] / "benchmarks"
PUBLISHED = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512}
"""Weights of Qwen2.5-0.5B, 1.5B and 7B, as their files have them."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu

    return gpu


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def counted_flops(model, length: int, backward: bool) -> int:
    """Of all matrix products that the model's own code makes, but for the table of rotations."""
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.zeros(2, length, dtype=torch.int64), use_cache=False).logits
        if backward:
            logits.sum().backward()
    counts = counter.get_flop_counts()
    return sum(counts["Global"].values()) - sum(sum(c.values()) for n, c in counts.items() if n.endswith(".rotary_emb"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_torch_counts(family: str, backward: bool) -> None:
    config = tiny_config(family, head_dim=16)
    formula = update_flops if backward else forward_flops
    # The model's own attention computes both halves, and logits of all tokens.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert counted_flops(model, 33, backward) == formula(Decoder.of(config), [33, 33], 66, causal=False)


def test_of_causal_attention_half_is_counted() -> None:
    decoder = Decoder(
        hidden=8, intermediate=4, layers=3, heads=2, kv_heads=1, head_dim=5, vocabulary=7, tied=True, bias=False
    )
    alone = forward_flops(decoder, [1], 0)
    # a third token looks at 3 keys with 2 heads of 5, in 3 layers: products for scores and for values, 2 each
    assert forward_flops(decoder, [3], 0) - forward_flops(decoder, [2], 0) - alone == 3 * 2 * 5 * (3 - 1) * 2 * 2
    assert forward_flops(decoder, [1], 2) - alone == 2 * 2 * 8 * 7
    assert forward_flops(decoder, [2, 3], 0) == forward_flops(decoder, [2], 0) + forward_flops(decoder, [3], 0)


def test_the_shapes_are_those_that_were_published(bench: ModuleType) -> None:
    for shape, number in PUBLISHED.items():
        model = on_meta(bench.config_of(shape))
        assert sum(p.numel() for p in model.parameters()) == Decoder.of(model.config).weights == number


@pytest.mark.parametrize("tied", [True, False])
def test_a_decode_step_moves_weights_and_what_is_seen(tied: bool) -> None:
    config = tiny_config("qwen2", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    cache = DynamicCache(config=config)
    model(input_ids=torch.ones(2, 9, dtype=torch.int64), past_key_values=cache)
    seen = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    weights = sum(p.nbytes for n, p in model.named_parameters() if tied or "embed_tokens" not in n)
    written, rows = seen // 9, 2 * config.hidden_size * 4
    assert decode_bytes(Decoder.of(config), [9, 9], 4) == weights + seen + written + rows
    assert 2 * decode_bytes(Decoder.of(config), [3, 15], 2) == weights + seen + written + rows


@pytest.mark.slow
def test_the_benchmark_runs(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--batch 2 --new-tokens 4 --tokens 32 --prompts 1 --longest 8 --rounds 1"
    monkeypatch.setattr(sys, "argv", f"gpu.py --device cpu --shape tiny --checkpointing {sizes}".split())
    bench.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert [row.split(" | ")[1].partition(",")[0] for row in rows] == ["decode", "prefill", "update", "long tail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without CUDA: it would measure it")
def test_without_a_gpu_it_says_so(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="torch finds none here"):
        bench.main()
