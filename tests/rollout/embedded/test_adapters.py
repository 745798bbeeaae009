"""Requests with different adapters are served by one engine over one base, each as by an engine
over the merged model."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.models.lora import merge_adapter
from distflow.models.row_adapters import RowAdapter, make_row_adaptable, read_row_adapter
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.hf_engine import HFEngine
from tests.models.test_row_adapters import write_adapter
from tests.rollout.drive import (
    FIRST,
    forward_log_probs,
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    with_engine,
)
from tests.tiny_models import tiny_tokenizer

PAGES = DeviceOptions(page_tokens=16, num_pages=200)
ENGINES: dict[str, dict[str, Any]] = {
    "native": {},
    "torch": {"enforce_eager": True},
    "device": {"on_device": PAGES},
}


def adapted(folder: Path, model: Any) -> tuple[list[RowAdapter | None], list[Any]]:
    """Two adapters and none, and the model with each of them merged; then it takes adapters."""
    merged = []
    for number in (1, 2):
        write_adapter(model, folder / str(number), rank=4 * number, seed=number)
        merged.append(merge_adapter(copy.deepcopy(model), str(folder / str(number))))
    merged.append(copy.deepcopy(model))

    make_row_adaptable(model)
    adapters = [read_row_adapter(folder / str(number), model) for number in (1, 2)]
    return [*adapters, None], merged


def requests_of(adapters: list[RowAdapter | None], **params: Any) -> list[GenerateRequest]:
    """Of several lengths, some with one prompt for all adapters."""
    requests = []
    for row in range(12):
        request = request_of(prompt_of(5 + 3 * (row // 3)), (0, 1), row=row, **params)
        requests.append(replace(request, adapter=adapters[row % 3]))
    return requests


@pytest.mark.parametrize("engine", [*ENGINES, "hf"])
def test_what_is_drawn_together_is_what_each_merged_model_draws(tmp_path, engine):
    model = make_model("qwen3")
    adapters, merged = adapted(tmp_path, model)
    requests = requests_of(adapters)

    def engine_of(over: Any) -> Any:
        if engine == "hf":
            return HFEngine(over, tiny_tokenizer(), version=FIRST)
        return make_engine(over, **ENGINES[engine])

    together = run_all(engine_of(model), requests)
    for number, one in enumerate(merged):
        own = [replace(request, adapter=None) for request in requests[number::3]]
        alone = run_all(engine_of(one), own)
        for request, drawn, expected in zip(own, together[number::3], alone, strict=True):
            for segment, same in zip(drawn, expected, strict=True):
                assert segment.token_ids == same.token_ids
                log_probs = forward_log_probs(one, request.prompt_ids, segment)
                assert segment.rollout_log_probs == pytest.approx(log_probs, abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefix_is_found_by_its_adapter_alone(tmp_path, engine):
    model = make_model("qwen3")
    adapters, merged = adapted(tmp_path, model)
    first = replace(request_of(prompt_of(40), max_tokens=20), may_continue=True)

    async def tell(own: EmbeddedEngine) -> None:
        ((drawn,),) = await generate_all(own, [replace(first, adapter=adapters[0])])
        later = replace(first, prompt_ids=(*first.prompt_ids, *drawn.token_ids, 7, 8))
        asked = [replace(later, adapter=adapter) for adapter in adapters]
        found = [result[0] for result in await generate_all(own, asked)]
        assert [bool(each.num_cached_tokens) for each in found] == [True, False, False]
        for one, segment in zip(merged, found, strict=True):
            log_probs = forward_log_probs(one, later.prompt_ids, segment)
            assert segment.rollout_log_probs == pytest.approx(log_probs, abs=1e-4)

    with_engine(make_engine(model, **ENGINES[engine]), tell)
