"""What the tests of the rollout room share: tiny decoders, requests, and running an engine to the
end."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from distflow.data.sample import Segment
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from distflow.rollout.servers.fleet import Fleet
from distflow.rollout.servers.http_engine import HttpEngine
from distflow.scheduling.group_states import Version
from tests.tiny_models import tiny_config, tiny_tokenizer

FIRST = Version(0, 0)
DEADLINE_S = 60


class Served(Fleet):
    """A fleet of one server, with the attributes of its engine."""

    def __init__(self, engine: HttpEngine) -> None:
        super().__init__([engine])
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def make_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()


def make_engine(model: Any, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, tiny_tokenizer(), version=FIRST, **options)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, 90, (length,), generator=generator).tolist())


def request_of(
    prompt: tuple[int, ...],
    samples: tuple[int, ...] = (0,),
    row: int = 0,
    seed: int = 1,
    **params: Any,
) -> GenerateRequest:
    return GenerateRequest(
        prompt, samples, SamplingParams(**{"max_tokens": 12, **params}), Stream(seed, "t", 0, row)
    )


async def generate_all(
    engine: Any, requests: Sequence[GenerateRequest]
) -> list[tuple[Segment, ...]]:
    """Submit in order to the paused engine, then let it run."""
    await engine.pause()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.resume()
    return list(await asyncio.gather(*tasks))


def run_all(engine: Any, requests: Sequence[GenerateRequest]) -> list[tuple[Segment, ...]]:
    async def run() -> list[tuple[Segment, ...]]:
        async with engine:
            return await generate_all(engine, requests)

    return asyncio.run(run())


def tokens_of(results: Sequence[tuple[Segment, ...]]) -> list[list[int]]:
    return [list(generation.token_ids) for result in results for generation in result]


@torch.no_grad()
def forward_log_probs(
    model: Any, prompt: tuple[int, ...], generation: Segment, temperature: float = 1.0
) -> list[float]:
    """Of the generated tokens, by a plain forward of the whole sequence."""
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    log_probs = (
        model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    ).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


def with_engine(engine: EmbeddedEngine, story: Callable[[EmbeddedEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        async with engine:
            await asyncio.wait_for(story(engine), DEADLINE_S)

    asyncio.run(run())


async def tokens_after(engine: EmbeddedEngine, count: int) -> None:
    """Wait until `count` more tokens are there. The engine then rests between two steps until
    something is asked of it: on a busy machine it would be done before the test goes on."""
    steps, target, reached = engine._loop, engine.num_generated_tokens + count, asyncio.Event()
    step, tell = steps._step, asyncio.get_running_loop().call_soon_threadsafe

    def counted_step() -> None:
        step()
        if engine.num_generated_tokens >= target:
            steps._step = step
            tell(reached.set)
            deadline = time.monotonic() + DEADLINE_S / 2
            while steps._commands.empty() and time.monotonic() < deadline:
                time.sleep(0.0005)

    steps.post(lambda: setattr(steps, "_step", counted_step))
    await reached.wait()
