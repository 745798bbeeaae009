"""The likeliest tokens that an engine records at each draw, against a plain forward in float64."""

import asyncio
from typing import Any

import pytest
import torch

from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_bench import distribution
from distflow.rollout.hf_engine import HFEngine
from tests.rollout.drive import (
    FIRST,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    tokens_after,
    with_engine,
)
from tests.tiny_models import tiny_tokenizer

PARAMS: list[dict[str, Any]] = [
    {"num_top": 4},
    {},
    {"num_top": 9, "temperature": 0.7, "top_k": 6},
    {"num_top": 3, "top_p": 0.6, "repetition_penalty": 1.4},
    {"num_top": 5, "greedy": True},
]
ENGINES: dict[str, Any] = {
    "embedded": make_engine,
    "embedded, as on a device": lambda model: make_engine(
        model, on_device=DeviceOptions(page_tokens=8, num_pages=400)
    ),
    "embedded, few at a time": lambda model: make_engine(model, max_num_seqs=3),
    "hf": lambda model: HFEngine(model, tiny_tokenizer(), version=FIRST),
}


@torch.no_grad()
def check(model: Any, request: GenerateRequest, response: Segment) -> None:
    """Each record belongs to the draw of its token, and no token left out is likelier."""
    num_top = request.params.num_top
    expected = (len(response.token_ids) if num_top else 0,) * 2
    assert (len(response.top_ids), len(response.top_log_probs)) == expected

    ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    for index, top in enumerate(response.top_ids):
        place = len(request.prompt_ids) + index
        probs = distribution(logits[place - 1], ids[0, :place].tolist(), request.params)
        found = torch.tensor(response.top_log_probs[index]).double().exp()
        assert len(set(top)) == num_top
        torch.testing.assert_close(found, probs[list(top)], rtol=0, atol=1e-5)
        torch.testing.assert_close(found, probs.topk(num_top).values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENGINES)
def test_they_are_those_of_each_draw(name: str) -> None:
    """Requests that want other numbers of them, or none, are drawn together."""
    model = make_model()
    requests = []
    for row, params in enumerate(PARAMS):
        requests.append(request_of(prompt_of(3 + row), (0, 1), row=row, **params))

    for request, responses in zip(requests, run_all(ENGINES[name](model), requests), strict=True):
        for response in responses:
            check(model, request, response)


def test_they_stay_with_their_tokens_where_a_response_is_interrupted() -> None:
    """Keys and values are dropped in the middle, and recomputed."""
    model = make_model()
    request = request_of(prompt_of(5), (0, 1, 2), num_top=4, max_tokens=20)

    async def story(engine: Any) -> None:
        task = asyncio.create_task(engine.generate(request))
        await tokens_after(engine, 24)
        await engine.pause(release=True)
        await engine.load_weights(FIRST, [*model.named_parameters()])
        await engine.resume()
        for response in await task:
            check(model, request, response)

    with_engine(make_engine(make_model()), story)


def test_more_than_there_are_tokens_are_refused() -> None:
    model = make_model()
    request = request_of(prompt_of(3), num_top=model.config.vocab_size + 1)
    with pytest.raises(UserError, match="score_centering_top_k"):
        run_all(make_engine(model), [request])
