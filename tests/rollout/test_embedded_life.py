"""The embedded engine's life: pause, cancel, failures, new weights in flight, closing."""

import asyncio
import gc
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from distflow.rollout import engine_weights
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.scheduling.group_states import Version
from tests.rollout.drive import (
    DEADLINE_S,
    FIRST,
    forward_log_probs,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    tokens_after,
    tokens_of,
    with_engine,
)
from tests.sparse_params import one_fast_in

NEXT = Version(0, 1)


def test_a_pause_stops_decoding_and_resume_goes_on_as_if_nothing_happened():
    model = make_model()
    request = request_of(prompt_of(5), (0, 1), max_tokens=250)

    async def story(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        await tokens_after(engine, 20)
        await engine.pause()
        before = engine.num_generated_tokens
        await asyncio.sleep(0.1)
        assert engine.num_generated_tokens == before < 500
        assert not task.done()
        await engine.resume()
        assert tokens_of([await task]) == undisturbed

    undisturbed = tokens_of(run_all(make_engine(model), [request]))
    with_engine(make_engine(model), story)


def test_a_releasing_pause_drops_the_memory_and_recomputes_it():
    model, request = make_model(), request_of(prompt_of(5), (0, 1, 2), max_tokens=200)

    async def story(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        await tokens_after(engine, 30)
        await engine.pause(release=True)
        await engine.resume()
        result = await task
        assert tokens_of([result]) == undisturbed

        for generation in result:
            expected = forward_log_probs(model, request.prompt_ids, generation)
            assert generation.rollout_log_probs == pytest.approx(expected, abs=1e-4)

    undisturbed = tokens_of(run_all(make_engine(model), [request]))
    with_engine(make_engine(model, shares_weights=True), story)


@pytest.mark.parametrize("dtype", one_fast_in(2, [torch.bfloat16, torch.float32]))
def test_an_engine_that_released_its_own_weights_needs_them_again(dtype):
    model, request = make_model().to(dtype), request_of(prompt_of(5), (0, 1), max_tokens=20)
    weights = [(name, weight.detach().clone()) for name, weight in model.named_parameters()]
    pages = DeviceOptions(page_tokens=8, num_pages=40)
    elsewhere = keys_and_values()

    async def story(engine: EmbeddedEngine) -> None:
        first = await engine.generate(request)
        hashes = await engine.hashes()
        whole = held(model)
        dropped = await engine.pause(release=True)
        await engine.resume()
        assert dropped is None and held(model) < whole / 50
        assert not [
            each.shape for number, each in keys_and_values().items() if number not in elsewhere
        ]
        assert await engine.hashes() == hashes, "of the weights that generated"
        with pytest.raises(RuntimeError, match="has released its weights"):
            await engine.generate(request)
        receipt = await engine.load_weights(NEXT, weights)
        assert held(model) == whole and receipt.hashes == hashes == await engine.hashes()
        assert tokens_of([await engine.generate(request)]) == tokens_of([first])

    for on_device in (None, pages):
        with_engine(make_engine(model, on_device=on_device), story)


def held(model: torch.nn.Module) -> int:
    """Bytes of its weights."""
    return sum(weight.untyped_storage().nbytes() for weight in model.parameters())


def keys_and_values() -> dict[int, torch.Tensor]:
    """Of all engines, also those that earlier tests have left: no other tensors have five axes. By
    identity."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return {id(each): each for each in tensors if each.dim() == 5 and each.numel()}


def test_an_error_in_the_model_reaches_every_waiting_request_and_the_next_is_served():
    model, request = make_model(), request_of(prompt_of(5), max_tokens=300)

    async def story(engine: EmbeddedEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for _ in range(5)]
        await tokens_after(engine, 10)

        def explode(*_: Any) -> None:
            raise ArithmeticError("planted in the second layer")

        hook = model.model.layers[1].mlp.register_forward_hook(explode)
        await engine.resume()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, ArithmeticError) and "planted" in str(outcome)
        with pytest.raises(ArithmeticError):
            await engine.generate(request)
        hook.remove()
        assert tokens_of([await engine.generate(request)]) == undisturbed

    undisturbed = tokens_of(run_all(make_engine(model), [request]))
    with_engine(make_engine(model, max_num_seqs=2), story)


def test_weights_that_hold_nan_are_an_error_and_leave_no_nan_behind():
    model = make_model()
    request = request_of(prompt_of(5), max_tokens=20)
    weight = model.model.layers[0].self_attn.k_proj.weight
    healthy = weight.detach().clone()

    async def story(engine: EmbeddedEngine) -> None:
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(FloatingPointError, match="not finite"):
            await engine.generate(request)
        with torch.no_grad():
            weight.copy_(healthy)
        assert tokens_of([await engine.generate(request)]) == undisturbed

    undisturbed = tokens_of(run_all(make_engine(model), [request]))
    with_engine(make_engine(model), story)


def changed(model: Any) -> Any:
    """Another model of the same shapes."""
    other = make_model(seed=7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05)
    return other


def test_cached_prompts_are_dropped_with_the_weights_that_made_them():
    """The first request keeps the engine busy, so its prompt is still cached when the second one
    asks for it."""
    model = make_model()
    other = changed(make_model())
    prompt = prompt_of(20)

    async def story(engine: EmbeddedEngine) -> None:
        running = asyncio.create_task(engine.generate(request_of(prompt, max_tokens=400)))
        await tokens_after(engine, 5)
        await engine.pause()
        await engine.load_weights(NEXT, other.named_parameters())
        second = asyncio.create_task(engine.generate(request_of(prompt, (1, 2), max_tokens=15)))
        await asyncio.sleep(0)
        await engine.resume()

        for generation in await second:
            expected = forward_log_probs(other, prompt, generation)
            assert generation.rollout_log_probs == pytest.approx(expected, abs=1e-4)
            assert list(generation.versions) == [1] * 15

        running.cancel()

    with_engine(make_engine(model), story)


def test_shared_storage_copies_nothing_and_follows_updates_in_place():
    model, prompt = make_model(), prompt_of(10)

    async def story(engine: EmbeddedEngine) -> None:
        await engine.generate(request_of(prompt))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)

        receipt = await engine.load_weights(NEXT, model.named_parameters())
        assert receipt.shared and receipt.version == engine.version == NEXT
        (generation,) = await engine.generate(request_of(prompt))
        assert generation.rollout_log_probs == pytest.approx(
            forward_log_probs(model, prompt, generation), abs=1e-4
        )
        with pytest.raises(ValueError, match="stored elsewhere"):
            await engine.load_weights(NEXT, changed(model).named_parameters())

    with_engine(make_engine(model, shares_weights=True), story)


def test_a_copy_that_fails_in_the_middle_is_not_served(monkeypatch):
    request, others = request_of(prompt_of(4)), list(make_model(seed=1).named_parameters())

    def failing(module: nn.Module, weights: Any) -> dict[str, str]:
        with torch.no_grad():
            next(module.parameters()).zero_()
        raise MemoryError("no room for the second tensor")

    async def story(engine: EmbeddedEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine_weights, "copy_weights", failing)
            with pytest.raises(MemoryError):
                await engine.load_weights(NEXT, others)

        assert engine.version == FIRST
        with pytest.raises(RuntimeError, match="only a part "):
            await engine.generate(request)
        await engine.load_weights(NEXT, None)
        with pytest.raises(RuntimeError, match="only a part "):
            await engine.generate(request)
        await engine.load_weights(Version(0, 2), others)
        assert (await engine.generate(request))[0].versions[0] == 2

    with_engine(make_engine(make_model()), story)


def test_closing_fails_what_still_waits():
    async def run() -> None:
        async with make_engine(make_model()) as engine:
            await engine.pause()
            task = asyncio.create_task(engine.generate(request_of(prompt_of(5))))
            await asyncio.sleep(0)

        with pytest.raises(RuntimeError, match="closed .* waiting"):
            await asyncio.wait_for(task, DEADLINE_S)
        with pytest.raises(RuntimeError, match="not running"):
            await engine.generate(request_of(prompt_of(5)))

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_cancels_and_pauses_leaves_the_others_tokens_alone(seed):
    model = make_model("qwen3")
    rng = random.Random(seed)
    requests = [
        request_of(
            prompt_of(rng.randint(1, 30)),
            tuple(range(rng.randint(1, 4))),
            row=row,
            max_tokens=rng.randint(1, 60),
        )
        for row in range(24)
    ]

    async def story(engine: EmbeddedEngine) -> None:
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(engine.generate(request)))
            await asyncio.sleep(rng.choice((0, 0, 0.002, 0.01)))

            action = rng.random()
            if action < 0.3:
                rng.choice(tasks).cancel()
            elif action < 0.5:
                await engine.pause(release=rng.random() < 0.5)
                await engine.resume()

        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finished = [
            (row, outcome)
            for row, outcome in enumerate(outcomes)
            if not isinstance(outcome, BaseException)
        ]
        assert all(isinstance(outcome, tuple | asyncio.CancelledError) for outcome in outcomes)
        assert len(finished) >= 10
        for row, outcome in finished:
            assert tokens_of([outcome]) == undisturbed[row]

    undisturbed = [
        tokens_of([result]) for result in run_all(make_engine(model, max_num_seqs=64), requests)
    ]
    with_engine(make_engine(model, max_num_seqs=7, shares_weights=True), story)


def test_no_thread_computes_while_there_is_nothing_to_do():
    before = set(threading.enumerate())

    def names() -> set[str]:
        """Of threads that came since: other tests may have left an engine behind."""
        return {thread.name for thread in set(threading.enumerate()) - before}

    async def story(engine: EmbeddedEngine) -> None:
        await engine.generate(request_of(prompt_of(5)))
        await asyncio.sleep(0.2)
        assert "embedded-rollout" in names() and "embedded-rollout-busy" not in names()

    with_engine(make_engine(make_model()), story)
    assert "embedded-rollout" not in names()
