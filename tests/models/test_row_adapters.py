"""A batch whose rows have adapters is what each merged model computes of its rows."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distflow.models.cached_decoder import DecoderView
from distflow.models.cpu_kernels import build as native
from distflow.models.lora import add_lora, merge_adapter
from distflow.models.row_adapters import (
    RowAdaptedLinear,
    RowAdapter,
    make_row_adaptable,
    new_adapter,
    read_row_adapter,
    rows_with,
)
from tests.models.cpu_kernels.test_decode_step import decoded, far, some_rows
from tests.models.test_cached_decoder import make

needs_native = pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}
ATTENTION = ["q_proj", "v_proj", "o_proj"]


def write_adapter(model: Any, folder: Path, rank: int, seed: int, **options: Any) -> None:
    """One that differs from nothing."""
    adapted: Any = add_lora(copy.deepcopy(model), rank=rank, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    adapted.save_pretrained(str(folder))


def adapted_and_merged(family: str, folder: Path) -> tuple[Any, list[RowAdapter | None], list[Any]]:
    """A model, adapters over it, and the models with these merged into them; the last one has
    nothing."""
    model = make(family, FAMILIES[family])
    options: list[dict[str, Any]] = [{"rank": 3}, {"rank": 40, "alpha": 40}]
    options.append({"rank": 2, "target_modules": ATTENTION})
    merged = []
    for number, each in enumerate(options):
        write_adapter(model, folder / str(number), seed=number + 1, **each)
        merged.append(merge_adapter(copy.deepcopy(model), str(folder / str(number))))

    plain = copy.deepcopy(model)
    make_row_adaptable(model)
    adapters = [read_row_adapter(folder / str(number), model) for number in range(len(options))]
    assert all(adapters)

    return model, [*adapters, None], [*merged, plain]


def by_each(models: list[Any], whose: list[int], ids: list[list[int]], starts: list[int]) -> Tensor:
    """Each row by the model of its number, in float64."""
    rows = []
    for number, row, start in zip(whose, ids, starts, strict=True):
        model = copy.deepcopy(models[number]).double()
        with torch.no_grad():
            rows.append(model(input_ids=torch.tensor([row])).logits[0, start:])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 5, 61])
def test_each_row_of_a_step_is_its_merged_models(
    tmp_path: Path, kind: str, family: str, count: int
) -> None:
    model, adapters, merged = adapted_and_merged(family, tmp_path)
    view = DecoderView(model, native=kind == "native")
    ids, starts = some_rows(count, steps=3)
    whose = [(row * row) % 4 for row in range(count)]
    with rows_with([adapters[number] for number in whose]):
        found = decoded(view, ids, starts)

    assert (view._native is not None) == (kind == "native")
    assert far(found, by_each(merged, whose, ids, starts)) < 2e-5


@pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_row_with_an_adapter_does_not_depend_on_its_batch(
    tmp_path: Path, compute_dtype: torch.dtype | None
) -> None:
    model, adapters, _ = adapted_and_merged("qwen3", tmp_path)
    view = DecoderView(model, native=True, compute_dtype=compute_dtype)
    ids, starts = some_rows(61)
    whose = [adapters[row % 4] for row in range(61)]
    with rows_with(whose), torch.inference_mode():
        kv = view.prefill([tuple(row[:start]) for row, start in zip(ids, starts, strict=True)])

    tokens = torch.tensor([row[start] for row, start in zip(ids, starts, strict=True)])

    def step(rows: slice) -> Tensor:
        kept = [memory[:, rows] for memory in (kv.keys, kv.values)]
        keys, values = (nn.functional.pad(each, (0, 0, 0, 2)) for each in kept)
        with rows_with(whose[rows]), torch.inference_mode():
            return view.decode(tokens[rows], torch.tensor(starts[rows]), keys, values)

    together = step(slice(61))
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for rows in (slice(61), slice(20, 27), slice(30, 55), slice(3, 4)):
                assert torch.equal(step(rows), together[rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)
def test_in_bfloat16_products_of_adapters_are_rounded_as_the_trainer_rounds_them(
    tmp_path: Path,
) -> None:
    model, adapters, merged = adapted_and_merged("llama", tmp_path)
    ids, starts = some_rows(40, steps=3)
    whose = [row % 4 for row in range(40)]
    exact = by_each(merged, whose, ids, starts)
    off = dict[bool, float]()
    for by_native in (True, False):
        view = DecoderView(model, native=by_native, compute_dtype=torch.bfloat16)
        with rows_with([adapters[number] for number in whose]):
            off[by_native] = far(decoded(view, ids, starts), exact)

    # torch rounds each product, too
    assert 1e-4 < off[True] < 2 * off[False]


@pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)
def test_the_rest_of_a_prompt_has_the_adapter_too(tmp_path: Path) -> None:
    model, adapters, merged = adapted_and_merged("qwen2", tmp_path)
    ids, starts = some_rows(9, steps=4)
    whose = [row % 4 for row in range(9)]
    view = DecoderView(model, native=True)
    with rows_with([adapters[number] for number in whose]), torch.inference_mode():
        kv = view.prefill([tuple(row[:start]) for row, start in zip(ids, starts, strict=True)])
        prefixes = []
        for row, start in enumerate(starts):
            prefixes.append((kv.keys[:, row, :, :start], kv.values[:, row, :, :start]))
        made = view.prefill_after([tuple(row) for row in ids], prefixes)

    found = view.logits(made.hidden)[:, None]
    assert far(found, by_each(merged, whose, ids, starts)[:, -1:]) < 2e-5


@pytest.mark.parametrize("change", [{"use_rslora": True}, {"peft_type": "IA3"}])
def test_an_adapter_of_another_kind_is_not_read(tmp_path: Path, change: dict[str, Any]) -> None:
    model = make("llama", {})
    write_adapter(model, tmp_path, rank=2, seed=0)
    make_row_adaptable(model)
    assert read_row_adapter(tmp_path, model) is not None
    place = tmp_path / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    assert read_row_adapter(tmp_path, model) is None


def test_an_adapter_of_the_output_head_is_not_read(tmp_path: Path) -> None:
    model = make("llama", {})
    write_adapter(model, tmp_path, rank=2, seed=0, target_modules=["q_proj", "lm_head"])
    make_row_adaptable(model)
    assert read_row_adapter(tmp_path, model) is None


def test_a_new_adapter_is_that_of_a_run_with_its_seed() -> None:
    """To the bit."""
    model = make("qwen3", FAMILIES["qwen3"])
    expected = {}
    for name, weight in add_lora(copy.deepcopy(model), rank=3, seed=5).named_parameters():
        if ".lora_" in name:
            expected[name.replace(".default.", ".")] = weight

    make_row_adaptable(model)
    layers = [each for each in model.modules() if isinstance(each, RowAdaptedLinear)]
    found = new_adapter(layers, rank=3, seed=5)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
