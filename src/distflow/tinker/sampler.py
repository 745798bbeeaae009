"""Samples from versions of the weights. One engine over the base serves all low-rank adapters,
which it decodes together; what is no such adapter has an engine over merged weights."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from distflow.models.packed_forward import ModelInputs
from distflow.models.row_adapters import RowAdapter, read_row_adapter, rows_with
from distflow.rollout.engine import (
    GenerateRequest,
    RolloutEngine,
    SamplingParams,
    Stream,
    generate_whole,
)
from distflow.tinker.messages import BadRequest, Json, write_samples, write_top
from distflow.training.torch_engine import TorchScorer

K = TypeVar("K")
T = TypeVar("T")
_MOST_MERGED = 4
_MOST_ADAPTERS = 8


@dataclass(frozen=True)
class SampleRequest:
    """What a client asks of a sampler."""

    prompt_ids: tuple[int, ...]
    num_samples: int
    params: SamplingParams
    seed: int | None
    prompt_log_probs: bool
    top_of_prompt: int
    """The number of most likely tokens at each position of the prompt; 0 for none."""
    top_of_samples: int


def read_sample(body: Json, stop_ids: Sequence[int], context: int) -> SampleRequest:
    """stop_ids: of the model, unless the client names its own. Raises BadRequest."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
        if body.get(name):
            raise BadRequest(f"{name} is not supported: leave it out")

    prompt = list[int]()
    for chunk in body["prompt"]["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise BadRequest(f"the prompt has a chunk of {chunk['type']}: only text is sampled")
        prompt += chunk["tokens"]

    if not prompt or len(prompt) >= context:
        raise BadRequest(f"a prompt has 1 to {context - 1} tokens, this one has {len(prompt)}")

    given = body.get("sampling_params") or {}
    room = context - len(prompt)
    temperature = float(given.get("temperature", 1.0))
    if not 0.0 <= temperature < math.inf:
        raise BadRequest(f"sampling_params.temperature is {temperature}: it is 0 or more")

    texts, ids = _stops(given.get("stop"), tuple(stop_ids))
    params = SamplingParams(
        max_tokens=min(given.get("max_tokens") or room, room),
        temperature=temperature or 1.0,
        top_p=float(given.get("top_p", 1.0)),
        top_k=int(given.get("top_k", -1)),
        stop=texts,
        stop_token_ids=ids,
        greedy=temperature == 0.0,
    )
    num_samples = int(body.get("num_samples", 1))
    if not 1 <= num_samples <= 4096 or params.max_tokens < 1:
        raise BadRequest("num_samples is 1 to 4096, and max_tokens at least 1")

    return SampleRequest(
        tuple(prompt),
        num_samples,
        params,
        given.get("seed"),
        bool(body.get("prompt_logprobs")),
        int(body.get("topk_prompt_logprobs") or 0),
        int(body.get("topk_sample_logprobs") or 0),
    )


def _stops(
    given: str | Sequence[str | int] | None, stop_ids: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop texts and tokens. None keeps the model's own tokens, and so do texts."""
    if given is None:
        return (), stop_ids
    if isinstance(given, str):
        return (given,), stop_ids

    texts = tuple(each for each in given if isinstance(each, str))
    if texts:
        return texts, stop_ids
    return (), tuple(int(each) for each in given)


class Samplers:
    """Engines are entered on first use. Of those over merged weights, and of the adapters that are
    not in use, the last ones stay in memory."""

    def __init__(self, make: Callable[[Path | None], RolloutEngine], scoring: Executor) -> None:
        """make: an engine over a checkpoint's weights, or over the base, whose module
        `make_row_adaptable` was given; called on `scoring`, whose thread also computes log-probs of
        prompts."""
        self._make = make
        self._scoring = scoring
        self._engines: dict[Path | None, asyncio.Future[_Sampler]] = {}
        self._adapters: dict[tuple[Path, int], asyncio.Future[RowAdapter | None]] = {}

    async def sample(self, folder: Path | None, request: SampleRequest, stream: Stream) -> bytes:
        """folder: of the checkpoint, or None for the base."""
        sampler, adapter = await self._find(folder)
        sampler.num_running += 1
        try:
            return await sampler.sample(request, stream, adapter)
        finally:
            sampler.num_running -= 1

    async def close(self) -> None:
        for entered in self._engines.values():
            await (await entered).engine.__aexit__(None, None, None)

    async def _find(self, folder: Path | None) -> "tuple[_Sampler, RowAdapter | None]":
        base = await _once(self._engines, None, partial(self._enter, None))
        if folder is None:
            return base, None

        loop = asyncio.get_running_loop()
        read = partial(
            loop.run_in_executor, self._scoring, read_row_adapter, folder, base.engine.model
        )
        # a checkpoint that is written again has another time
        adapter = await _once(self._adapters, (folder, folder.stat().st_mtime_ns), read)
        if len(self._adapters) > _MOST_ADAPTERS:
            del self._adapters[next(iter(self._adapters))]
        if adapter is not None:
            return base, adapter

        sampler = await _once(self._engines, folder, partial(self._enter, folder))
        idle = []
        for key, entered in self._engines.items():
            if key not in (None, folder) and entered.done() and not entered.result().num_running:
                idle.append(key)

        for key in idle[: max(len(self._engines) - 1 - _MOST_MERGED, 0)]:
            await self._engines.pop(key).result().engine.__aexit__(None, None, None)

        return sampler, None

    async def _enter(self, folder: Path | None) -> "_Sampler":
        loop = asyncio.get_running_loop()
        engine: Any = await loop.run_in_executor(self._scoring, self._make, folder)
        await engine.__aenter__()
        return _Sampler(engine, self._scoring)


async def _once(kept: dict[K, "asyncio.Future[T]"], key: K, make: Callable[[], Awaitable[T]]) -> T:
    """What is kept under this key, made for all who ask meanwhile, and again if that failed. The
    last used one is the last one in `kept`."""
    made = kept.pop(key, None)
    if made is None or (made.done() and made.exception()):
        made = asyncio.ensure_future(make())

    kept[key] = made
    return await asyncio.shield(made)


@dataclass
class _Sampler:
    """An engine that has been entered."""

    engine: Any
    scoring: Executor
    num_running: int = 0
    """Requests that it serves."""

    async def sample(
        self, request: SampleRequest, stream: Stream, adapter: RowAdapter | None
    ) -> bytes:
        samples = tuple(range(request.num_samples))
        asked = GenerateRequest(
            request.prompt_ids,
            samples,
            request.params,
            stream,
            may_continue=True,
            adapter=adapter,
        )
        segments = await generate_whole(self.engine.generate, asked)

        prompt = request.prompt_ids
        of_prompt = None
        if request.prompt_log_probs:
            own = await self._score(self._followers, adapter, prompt)
            of_prompt = torch.cat([torch.full((1,), math.nan), own])
        message = write_samples(segments, of_prompt)

        if request.top_of_prompt:
            ids, values = await self._score(self._top, adapter, prompt, request.top_of_prompt)
            # nothing predicts the first token, which the protocol marks so
            ids = torch.cat([torch.zeros_like(ids[:1]), ids])
            values = torch.cat([torch.full_like(values[:1], -99999.0), values])
            write_top(message.topk_prompt_logprobs, ids, values)

        for segment, sequence in zip(segments, message.sequences, strict=True):
            if request.top_of_samples and segment.token_ids:
                whole = (*prompt, *segment.token_ids)
                ids, values = await self._score(self._top, adapter, whole, request.top_of_samples)
                first = len(prompt) - 1
                write_top(sequence.topk_sampled_logprobs, ids[first:], values[first:])

        encoded: bytes = message.SerializeToString()
        return encoded

    async def _score(
        self, function: Callable[..., Any], adapter: RowAdapter | None, *arguments: object
    ) -> Any:
        """Of one row."""

        def score() -> Any:
            with rows_with([adapter]):
                return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self.scoring, score)

    @torch.no_grad()
    def _followers(self, ids: Sequence[int]) -> Tensor:
        """The log-probs of all tokens but the first: `(tokens - 1,)`, on the CPU."""
        if len(ids) < 2:
            return torch.zeros(0)

        scorer = TorchScorer(self.engine.model)
        given = torch.tensor(ids, dtype=torch.int64, device=scorer.device)
        positions = torch.arange(len(given) - 1, device=scorer.device)
        inputs = ModelInputs(given, torch.tensor([len(given)]), positions, given[1:])
        return scorer.run(inputs, ("log_probs",), 1.0)["log_probs"].float().cpu()

    @torch.no_grad()
    def _top(self, ids: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
        """The k most likely tokens after each token but the last, and their log-probs:
        `(tokens - 1, k)`, on the CPU."""
        model = self.engine.model
        device = next(model.parameters()).device
        logits = model(torch.tensor([list(ids)], device=device)).logits[0, :-1]
        log_probs = logits.float().log_softmax(-1)
        values, tokens = log_probs.topk(min(k, log_probs.shape[1]), dim=1)
        return tokens.cpu(), values.cpu()
