"""What the embedded engine generates: against transformers, against plain forwards, and against
itself."""

import asyncio
import random
from typing import Any

import pytest
import torch

from distflow.errors import UserError
from distflow.rollout.engine import GenerateRequest
from tests.rollout.drive import (
    forward_log_probs,
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    tokens_of,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5, "max_tokens": 30},
    {"min_p": 0.05, "repetition_penalty": 1.2, "max_tokens": 3},
    {"greedy": True, "max_tokens": 25},
    {"stop_token_ids": (10, 11, 12, 13, 14, 15, 16, 17, 18), "max_tokens": 40},
]


def mixed_requests(samples: tuple[int, ...] = (0, 1, 2)) -> list[GenerateRequest]:
    lengths = (3, 17, 1, 40, 8, 9, 3, 25)
    return [
        request_of(prompt_of(length, seed=row), samples, row=row, **MIXED[row % len(MIXED)])
        for row, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_plain_forward(family):
    name, changes = FAMILIES[family]
    model = make_model(name, **changes)

    requests = mixed_requests()
    for request, result in zip(
        requests, run_all(make_engine(model, max_num_seqs=7), requests), strict=True
    ):
        for generation in result:
            expected = forward_log_probs(
                model, request.prompt_ids, generation, request.params.temperature
            )
            assert generation.rollout_log_probs == pytest.approx(expected, abs=1e-4)
            assert (
                len(generation.sampling_log_probs)
                == len(generation.versions)
                == len(generation.token_ids)
            )

            # truncation raises the rest
            if not request.params.greedy and request.params.repetition_penalty == 1.0:
                pairs = zip(
                    generation.sampling_log_probs, generation.rollout_log_probs, strict=True
                )
                assert all(sampling >= rollout - 1e-9 for sampling, rollout in pairs)


def test_tokens_do_not_depend_on_slots_order_or_company():
    model = make_model("qwen3")
    requests = mixed_requests()
    alone = [tokens_of(run_all(make_engine(model), [request])) for request in requests]

    for max_num_seqs in (1, 2, 5, 64):
        results = run_all(make_engine(model, max_num_seqs=max_num_seqs), requests)
        assert [tokens_of([result]) for result in results] == alone

    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    shuffled = run_all(
        make_engine(model, max_num_seqs=6, max_prefill_tokens=20), [requests[row] for row in order]
    )
    assert [tokens_of([result]) for result in shuffled] == [alone[row] for row in order]


def test_equal_prompts_are_prefilled_once():
    model = make_model()
    seen = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(inputs[0].shape))
    )
    engine = make_engine(model, max_num_seqs=2)
    seen.clear()
    run_all(
        engine,
        [request_of(prompt_of(9), (0, 1, 2, 3, 4), max_tokens=4), request_of(prompt_of(9), (5,))],
    )
    assert [shape for shape in seen if len(shape) == 2] == [(1, 9)]


def test_adapters_are_applied_unmerged():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make_model("qwen2"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)

    model.eval()
    request = request_of(prompt_of(8), max_tokens=20)
    (result,) = run_all(make_engine(model), [request])
    generation = result[0]
    assert generation.rollout_log_probs == pytest.approx(
        forward_log_probs(model, request.prompt_ids, generation), abs=1e-4
    )
    with model.disable_adapter():
        plain = forward_log_probs(model, request.prompt_ids, generation)
    assert max(abs(a - b) for a, b in zip(plain, generation.rollout_log_probs, strict=True)) > 0.1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 509, "512 positions"),
        ("temperature", 0.0, "rollout.temperature"),
        ("top_p", 0.0, "rollout.top_p"),
        ("top_p", 1.1, "rollout.top_p"),
        ("top_k", 0, "rollout.top_k"),
        ("min_p", 1.1, "rollout.min_p"),
        ("min_p", -0.1, "rollout.min_p"),
        ("repetition_penalty", 0.0, "rollout.repetition_penalty"),
        ("max_tokens", 0, "rollout.max_tokens"),
        ("stop", ("",), "rollout.stop"),
    ],
)
def test_requests_that_cannot_run_are_refused(name, value, message):
    with pytest.raises(UserError, match=message):
        run_all(make_engine(make_model()), [request_of(prompt_of(4), **{name: value})])


@pytest.mark.parametrize("prompt", [(), (5, 10_000), (-1,)])
def test_prompts_that_cannot_run_are_refused(prompt):
    with pytest.raises(UserError, match="prompt"):
        run_all(make_engine(make_model()), [request_of(prompt)])


def test_the_last_position_of_the_model_can_be_used():
    request = request_of(prompt_of(500), max_tokens=12)
    model = make_model()
    (result,) = run_all(make_engine(model), [request])
    expected = forward_log_probs(model, request.prompt_ids, result[0])
    assert result[0].rollout_log_probs == pytest.approx(expected, abs=1e-4)


def test_the_same_submissions_give_the_same_bits_whatever_ran_before():
    model = make_model("qwen2")

    async def run() -> None:
        async with make_engine(model, max_num_seqs=5) as engine:
            first = await generate_all(engine, mixed_requests())
            await generate_all(
                engine, [request_of(prompt_of(30, seed=9), tuple(range(9)), row=7, max_tokens=60)]
            )
            await asyncio.gather(*(engine.generate(request) for request in mixed_requests()[:3]))
            assert await generate_all(engine, mixed_requests()) == first

    asyncio.run(run())
