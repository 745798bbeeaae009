"""The reference engine agrees with the embedded one, and keeps the same protocol."""

import asyncio
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from distflow.acting.action_head import ActionHead
from distflow.errors import UserError
from distflow.rollout.hf_engine import HFEngine
from distflow.rollout.random_draws import sample_key, uniforms
from tests.rollout.drive import (
    FIRST,
    forward_log_probs,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    tokens_of,
)
from tests.tiny_models import tiny_tokenizer

OPTIONS: list[dict[str, Any]] = [
    {},
    {"greedy": True},
    {"temperature": 0.6, "top_p": 0.8},
    {"top_k": 6},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    {"stop_token_ids": tuple(range(10, 20))},
    {"stop": ("a", "Q", "7")},
]


def make_hf(model: Any, **options: Any) -> HFEngine:
    return HFEngine(model, tiny_tokenizer(), version=FIRST, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_both_engines_draw_the_same_tokens(options):
    """Penalties, truncations and the forward are transformers' own there; only the uniform numbers
    are common."""
    model = make_model("qwen3")
    requests = [
        request_of(prompt_of(n), (0, 5, 2), row=n, **{"max_tokens": 25, **options}) for n in (1, 9)
    ]
    for ours, theirs in zip(
        run_all(make_engine(model), requests), run_all(make_hf(model), requests), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            assert one.sample == other.sample and one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason and one.versions == other.versions
            assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-4)
            assert one.sampling_log_probs == pytest.approx(other.sampling_log_probs, abs=1e-4)


@pytest.mark.parametrize("make", [make_engine, make_hf])
def test_a_later_turn_goes_on_in_the_random_stream(make):
    """Two turns with nothing said between them are one; without `num_drawn` the second repeats the
    first's numbers."""
    model = make_model("qwen3")
    request = request_of(prompt_of(5), (3,), max_tokens=20)
    (whole,) = tokens_of(run_all(make(model), [request]))
    first = replace(request, params=replace(request.params, max_tokens=8))
    second = replace(request, prompt_ids=(*request.prompt_ids, *whole[:8]), num_drawn=8)
    second = replace(second, params=replace(request.params, max_tokens=12))
    turns = [
        tokens_of(run_all(make(model), [turn]))[0]
        for turn in (first, second, replace(second, num_drawn=0))
    ]
    assert turns[0] + turns[1] == whole
    assert turns[2] != turns[1]


def test_the_models_own_end_token_ends_nothing_unless_asked_for():
    model = make_model("llama")
    with torch.no_grad():
        # every token is equally likely: greedy takes the first, of id 0
        model.lm_head.weight.zero_()
        model.generation_config.eos_token_id = 0

    (result,) = run_all(make_hf(model), [request_of(prompt_of(3), greedy=True, max_tokens=7)])
    assert list(result[0].token_ids) == [0] * 7
    assert result[0].finish_reason == "length"


@pytest.mark.parametrize(
    "defaults",
    [
        *(
            {"suppress_tokens": list(range(3, 60))},
            {"no_repeat_ngram_size": 1},
            {"min_new_tokens": 20},
        ),
        *(
            {"num_beams": 2},
            {"return_dict_in_generate": True},
            {"max_time": 1e-9},
            {"forced_eos_token_id": 2},
        ),
        *(
            {"repetition_penalty": 1.5},
            {"num_return_sequences": 2, "do_sample": True},
            {"bad_words_ids": [[5], [9]]},
        ),
    ],
    ids=lambda defaults: next(iter(defaults)),
)
def test_the_models_own_defaults_of_generation_change_nothing(defaults):
    """Draws and log-probs are of the policy, which the trainer computes without them."""
    model = make_model("llama")
    request = request_of(prompt_of(3), (0, 1), max_tokens=20)
    expected = run_all(make_hf(model), [request])
    model.generation_config.update(**defaults)
    before = model.generation_config
    assert run_all(make_hf(model), [request]) == expected
    assert model.generation_config is before and before.to_dict().items() >= defaults.items()


def test_other_families_run():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=98, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    ).eval()
    request = request_of(prompt_of(4), max_tokens=10)
    (result,) = run_all(make_hf(model), [request])
    expected = forward_log_probs(model, request.prompt_ids, result[0])
    assert result[0].rollout_log_probs == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="64 positions"):
        run_all(make_hf(model), [request_of(prompt_of(4), max_tokens=61)])


def test_pause_holds_requests_until_resume_and_a_cancelled_one_ends():
    async def run() -> None:
        request = request_of(prompt_of(4))
        async with make_hf(make_model()) as engine:
            first = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(0)
            await engine.pause()  # before its first token or between two
            before = engine.num_generated_tokens
            held, cancelled = (asyncio.create_task(engine.generate(request)) for _ in range(2))
            await asyncio.sleep(0.05)
            assert engine.num_generated_tokens == before and not held.done()
            assert await engine.hashes()  # it answers while it is paused
            cancelled.cancel()
            await engine.resume()
            assert await held == await first
            with pytest.raises(asyncio.CancelledError):
                await cancelled

    asyncio.run(run())


@torch.no_grad()
def test_a_flow_begins_with_noise_and_ends_after_its_steps():
    """Each step by the sample's own uniform numbers, from the number before it; greedy begins with
    0, without noise."""
    model = make_model("qwen3")
    head = ActionHead(10, dim=2, steps=3, bins=4, noise=0.6)
    requests = [
        request_of(prompt_of(6, n), (n, n + 3), row=n, max_tokens=16, head=head) for n in range(3)
    ]

    greedy = [replace(each, params=replace(each.params, greedy=True)) for each in requests]
    for request, result in zip(
        (*requests, *greedy), run_all(make_hf(model), [*requests, *greedy]), strict=True
    ):
        for made, sample in zip(result, request.samples, strict=True):
            key = np.array([sample_key(request.stream, sample)], np.uint64)
            ids = torch.tensor([[*request.prompt_ids, *made.token_ids]])
            logits = (
                model(input_ids=ids, use_cache=False)
                .logits[0]
                .double()[len(request.prompt_ids) - 1 : -1]
            )

            for place, (token, value) in enumerate(zip(made.token_ids, made.values, strict=True)):
                step = place % 8 // 2
                mean = 0.0
                spread = 1.0
                if step:  # at the times 0, 1/3 and 2/3
                    noisy = made.values[place - 2]
                    action = float(logits[place, 10 + 4 * place])
                    mean = noisy + (action - noisy) / (1 - (step - 1) / 3) / 3
                    spread = 0.6 / math.sqrt(3)

                normal = NormalDist(mean, spread)
                drawn = 0.5 if request.params.greedy else float(uniforms(key, np.array([place]))[0])
                assert value == pytest.approx(normal.inv_cdf(drawn), abs=1e-4)
                assert made.rollout_log_probs[place] == pytest.approx(
                    math.log(normal.pdf(value)), abs=1e-4
                )
                assert token == 10 + 4 * place + min(max(math.floor(value + 2), 0), 3)


@torch.no_grad()
def test_numbers_of_actions_are_drawn_by_the_inverse_normal_distribution():
    """By the sample's own uniform numbers, however requests share a call; greedy takes the mean."""
    model = make_model("qwen3")
    first = 20
    requests = [
        request_of(prompt_of(6, n), (n, n + 3), row=n, max_tokens=5, head=ActionHead(first))
        for n in range(3)
    ]
    together = [made for result in run_all(make_hf(model), requests) for made in result]
    alone = [made for each in requests for made in run_all(make_hf(model), [each])[0]]

    keys = [sample_key(each.stream, sample) for each in requests for sample in each.samples]
    for made, other, key, request in zip(
        together, alone, keys, (r for r in requests for _ in r.samples), strict=True
    ):
        assert (
            list(made.token_ids) == [first + 2 * place for place in range(5)]
            and made.finish_reason == "length"
        )
        assert (
            made.values == pytest.approx(other.values, abs=1e-5)
            and made.sampling_log_probs == made.rollout_log_probs
        )
        ids = torch.tensor([[*request.prompt_ids, *made.token_ids]])
        logits = (
            model(input_ids=ids, use_cache=False)
            .logits[0]
            .double()[len(request.prompt_ids) - 1 : -1]
        )

        for place, token in enumerate(made.token_ids):
            spread = math.exp(-3 + 2 * (math.tanh(float(logits[place, token + 1])) + 1))
            normal = NormalDist(float(logits[place, token]), spread)
            drawn = float(uniforms(np.array([key], np.uint64), np.array([place]))[0])
            assert made.values[place] == pytest.approx(
                normal.inv_cdf(drawn), abs=1e-4 * spread + 1e-5
            )
            assert made.rollout_log_probs[place] == pytest.approx(
                math.log(normal.pdf(made.values[place])), abs=1e-4
            )

    greedy = replace(requests[0], params=replace(requests[0].params, greedy=True))
    for made in run_all(make_hf(model), [greedy])[0]:
        ids = torch.tensor([[*greedy.prompt_ids, *made.token_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0][len(greedy.prompt_ids) - 1 : -1]
        assert made.values == pytest.approx(
            logits.gather(-1, ids[0, 6:, None])[:, 0].tolist(), abs=1e-5
        )
