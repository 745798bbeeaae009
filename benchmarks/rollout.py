"""Tokens per second of the embedded rollout engine against transformers' `generate`, on the same work.

    python benchmarks/rollout.py [--hidden 128 --layers 4 --requests 256 --rounds 3]

Both run the same random float32 decoder, the same prompts and the same response lengths (stop tokens are off, so
each request yields exactly its length), in rounds that take turns. `generate` runs with its dynamic cache in batches
of 32, 64 or all requests, and its fastest counts; where lengths differ a batch must go on until its longest row is
done, since they are not known beforehand.

What profiling found (1 M parameters, 256 rows, 2 cores):
- A decode step of 10 ms is to 40 % the linears, to 20 % the two batched products of attention, to 6 % writing keys
  and values, and to about a tenth the draw (float64 sums, the searched blocks); the rest is many small operations.
- An idle OpenMP pool of another thread costs 40 %: 25 k tokens/s alone, 15 k beside it. So everything here computes
  in threads that end, as the engine itself does.
- Requests that differ in `max_tokens` only must still be drawn together: drawn apart, the long-tail work took 2.3
  times as long.
"""

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distflow.flow.ticket import Version
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream

Work = list[tuple[tuple[int, ...], int]]
"""Prompts with the number of tokens wanted."""


def make_model(hidden: int, layers: int, vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval()


def fixed_work(num_requests: int, vocab: int) -> Work:
    generator = torch.Generator().manual_seed(1)
    return [(_prompt(generator, vocab), 64) for _ in range(num_requests)]


def long_tail_work(num_requests: int, vocab: int) -> Work:
    """Geometric lengths of mean 64, at most 512; groups of 8 have one prompt."""
    generator = torch.Generator().manual_seed(2)
    prompts = [_prompt(generator, vocab) for _ in range(-(-num_requests // 8))]
    lengths = torch.empty(num_requests).geometric_(1 / 64, generator=generator).clamp_(max=512).int().tolist()
    return [(prompts[index // 8], length) for index, length in enumerate(lengths)]


def run_embedded(model: Any, work: Work) -> None:
    async def run() -> None:
        async with EmbeddedEngine(model, None, version=Version(0, 0), max_num_seqs=256) as engine:
            requests = [
                GenerateRequest(prompt, (row % 8,), SamplingParams(max_tokens=length), Stream(1, "bench", 0, row // 8))
                for row, (prompt, length) in enumerate(work)
            ]
            results = await asyncio.gather(*(engine.generate(request) for request in requests))
            for result, (_, length) in zip(results, work, strict=True):
                assert len(result.generations[0].token_ids) == length

    asyncio.run(run())


def run_generate(model: Any, work: Work, batch_size: int) -> None:
    for start in range(0, len(work), batch_size):
        batch = work[start : start + batch_size]
        prompts = torch.tensor([prompt for prompt, _ in batch])
        longest = max(length for _, length in batch)
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == prompts.shape[1] + longest


def measure(name: str, model: Any, work: Work, rounds: int) -> None:
    runners: dict[str, Callable[[], None]] = {"embedded": lambda: run_embedded(model, work)}
    for size in sorted({32, 64, len(work)}):
        runners[f"generate, batch {size}"] = lambda size=size: run_generate(model, work, size)  # type: ignore[misc]
    num_tokens = sum(length for _, length in work)
    seconds: dict[str, list[float]] = {runner: [] for runner in runners}
    for round_index in range(rounds + 1):  # the first warms up
        for runner, run in runners.items():
            start = time.perf_counter()
            in_thread(run)
            if round_index > 0:
                seconds[runner].append(time.perf_counter() - start)
    best = min(statistics.median(times) for runner, times in seconds.items() if runner != "embedded")
    for runner, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:10} {runner:20} {num_tokens / median:10,.0f} tok/s   {best / median:5.2f} x best generate")


def in_thread(run: Callable[[], None]) -> None:
    """Run in a thread that ends, and its OpenMP pool with it."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _prompt(generator: torch.Generator, vocab: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, vocab, (16,), generator=generator).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    made: list[LlamaForCausalLM] = []
    in_thread(lambda: made.append(make_model(arguments.hidden, arguments.layers, arguments.vocab)))
    (model,) = made
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    load = os.getloadavg()[0]
    print(f"{size:.1f} M parameters, float32, {torch.get_num_threads()} threads, load of the machine {load:.1f}")
    for name, make_work in (("fixed", fixed_work), ("long tail", long_tail_work)):
        measure(name, model, make_work(arguments.requests, arguments.vocab), arguments.rounds)


if __name__ == "__main__":
    main()
