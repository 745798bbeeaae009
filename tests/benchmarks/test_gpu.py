"""What `benchmarks/gpu.py` divides by: formulas against brute counts; that all of it runs, and is
written down."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.roofline import Decoder, decode_bytes, forward_flops, update_flops
from benchmarks.workload import Shape, Work
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
    return sum(counts["Global"].values()) - sum(
        sum(c.values()) for n, c in counts.items() if n.endswith(".rotary_emb")
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_torch_counts(family: str, backward: bool) -> None:
    config = tiny_config(family, head_dim=16)
    formula = update_flops if backward else forward_flops
    # The model's own attention computes both halves, and logits of all tokens.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert counted_flops(model, 33, backward) == formula(
        Decoder.of(config), [33, 33], 66, causal=False
    )


def test_of_causal_attention_half_is_counted() -> None:
    decoder = Decoder(
        hidden=8,
        intermediate=4,
        layers=3,
        heads=2,
        kv_heads=1,
        head_dim=5,
        vocabulary=7,
        tied=True,
        bias=False,
    )
    alone = forward_flops(decoder, [1], 0)
    # a third token looks at 3 keys with 2 heads of 5, in 3 layers: products for scores and for
    # values, 2 each
    assert (
        forward_flops(decoder, [3], 0) - forward_flops(decoder, [2], 0) - alone
        == 3 * 2 * 5 * (3 - 1) * 2 * 2
    )
    assert forward_flops(decoder, [1], 2) - alone == 2 * 2 * 8 * 7
    assert forward_flops(decoder, [2, 3], 0) == forward_flops(decoder, [2], 0) + forward_flops(
        decoder, [3], 0
    )


def test_the_shapes_are_those_that_were_published(bench: ModuleType) -> None:
    for shape, number in PUBLISHED.items():
        model = on_meta(bench.config_of(shape))
        assert (
            sum(p.numel() for p in model.parameters()) == Decoder.of(model.config).weights == number
        )


@pytest.mark.parametrize("tied", [True, False])
def test_a_decode_step_moves_weights_and_what_is_seen(tied: bool) -> None:
    config = tiny_config("qwen2", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    cache = DynamicCache(config=config)
    model(input_ids=torch.ones(2, 9, dtype=torch.int64), past_key_values=cache)
    seen = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    weights = sum(p.nbytes for n, p in model.named_parameters() if tied or "embed_tokens" not in n)
    written = seen // 9
    rows = 2 * config.hidden_size * 4
    assert decode_bytes(Decoder.of(config), [9, 9], 4) == weights + seen + written + rows
    assert 2 * decode_bytes(Decoder.of(config), [3, 15], 2) == weights + seen + written + rows


@pytest.mark.slow
def test_the_benchmark_runs(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what it prints as a section before older ones."""
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\nAll of them.\n\n## 2026-01-01, a machine\n\nold\n")
    sizes = "--batch 2 --new-tokens 4 --tokens 32 --prompts 1 --longest 8 --rounds 1"
    arguments = f"--device cpu --shape tiny --checkpointing {sizes} --record {results}"
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments.split()])
    bench.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    works = ["decode", "decode", "prefill", "update", "long tail"]
    assert [row.split(" | ")[1].partition(",")[0] for row in rows] == works
    head, new, old = results.read_text().split("\n## ")
    assert head == "# Results\n\nAll of them.\n" and old == "2026-01-01, a machine\n\nold\n"
    assert (
        all(row in new for row in rows)
        and f"`python benchmarks/gpu.py {arguments}`" in new
        and "commit" in new
    )


def test_shares_are_of_the_measured_rates_and_of_the_data_sheet(bench: ModuleType) -> None:
    sheet = bench.data_sheet("NVIDIA H100 80GB HBM3")
    assert sheet == bench.Rates(3.35e12, 989e12) != bench.data_sheet("NVIDIA H100 PCIe")
    # a decode step of 7 B weights in bfloat16, and an update of 10^15 FLOPs
    assert bench.Needed(15.2e9, "bandwidth").share(0.00907, sheet) == "50.0%"
    assert bench.Needed(1e15, "flops").share(2.0, sheet) == "50.6%"
    assert (
        bench.Needed(1e15, "flops").share(2.0, bench.data_sheet("a device of somebody's own"))
        == "-"
    )
    assert bench.data_sheet("NVIDIA L40") is None != bench.data_sheet("NVIDIA L4")
    assert (
        bench.data_sheet("NVIDIA A100-SXM4-80GB").bandwidth
        > bench.data_sheet("NVIDIA A100 80GB PCIe").bandwidth
    )


@pytest.mark.slow
def test_a_whole_step_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On whatever device a run takes; without TRL."""
    small = Work(Shape(hidden=64, layers=1), longest=4, prompts=2)
    monkeypatch.setitem(bench.TRAINED, "gpu-135m", small)
    monkeypatch.setattr(bench.train_step, "TRL", Path("no/such/python"))
    bench.whole_step(rounds=1, num_steps=3)
    assert re.search(
        r"A GRPO step of gpu-135m: \d+\.\d\d s, 64 tokens; not compared", capsys.readouterr().out
    )


def test_a_benchmark_that_breaks_off_says_so(bench: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n")
    with pytest.raises(RuntimeError), bench.recorded(results, "some command"):
        print("| a row |")
        raise RuntimeError("out of memory")
    assert re.search(
        "`some command`:\n\n\\| a row \\|\n\nIt ended early: RuntimeError: out of memory",
        results.read_text(),
    )


TESTS = """
import pytest
def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip
def test_left_out(): pass
"""


@pytest.mark.slow
def test_what_the_tests_for_a_gpu_leave_is_written_down(bench: ModuleType, tmp_path: Path) -> None:
    import record

    (tmp_path / "test_some.py").write_text(TESTS)
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\n## older\n")
    assert record.run_tests(results, str(tmp_path), "-p", "no:cacheprovider", "-n", "0") == 1
    new = results.read_text()
    assert (
        "1 passed, 1 failed, 1 skipped" in new
        and "test_some.test_wrong" in new
        and new.endswith("\n## older\n")
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="wants a machine without CUDA: it would measure it"
)
def test_without_a_gpu_it_says_so(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="torch finds none here"):
        bench.main()
