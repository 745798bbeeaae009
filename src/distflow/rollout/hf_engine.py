"""The reference engine: `generate` of transformers, for any of its causal language models."""

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from distflow.data.sample import FinishReason, Segment
from distflow.models.image_inputs import own_inputs
from distflow.models.lora import unwrapped
from distflow.models.number_head import NumberHead, normal_log_probs, normal_of
from distflow.models.row_adapters import rows_with
from distflow.rollout.embedded.engine_thread import outcome_of, settle
from distflow.rollout.engine import GenerateRequest, SamplingParams, WeightReceipt
from distflow.rollout.engine_weights import EngineWeights
from distflow.rollout.random_draws import sample_key, uniforms
from distflow.rollout.stops import check_request, finish_reason
from distflow.scheduling.group_states import Version

T = TypeVar("T")

_MOST_ROWS = 512
"""About so many are in one call of `generate` for several prompts."""


@dataclass(frozen=True, eq=False)
class _PendingRequest:
    """A request, whether it was cancelled, and where its result goes."""

    request: GenerateRequest
    cancelled: threading.Event
    result: "asyncio.Future[tuple[Segment, ...]]"


class HFEngine(AbstractAsyncContextManager["HFEngine"]):
    """A `RolloutEngine` with transformers' forward, cache, penalties and truncations.

    Requests run one after another, each as one call of `generate`; those with images or for
    drawn numbers that arrive together, and have prompts of one length, share a call. Only the
    draw is ours, as the last logits processor: one counter-based uniform number per token, the same
    as in the embedded engine, so both draw the same tokens up to rounding. New weights are loaded
    between two tokens; keys and values of old ones are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        version: Version,
        shares_weights: bool = False,
        num_threads: int | None = None,
    ) -> None:
        """tokenizer: for stop strings. shares_weights: `model` is the trainer's, so `load_weights`
        copies nothing. num_threads: of torch; None leaves the number unchanged."""
        self.version = version
        self.num_generated_tokens = 0
        self.model: Any = model
        self.tokenizer = tokenizer
        self._weights = EngineWeights(model, shares_weights)
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="hf-rollout",
            initializer=partial(torch.set_num_threads, num_threads) if num_threads else None,
        )
        self._pending: list[_PendingRequest] = []
        self._open = asyncio.Event()
        self._open.set()
        self.between_tokens = _BetweenTokens()

    async def __aexit__(self, *exception: object) -> None:
        self.between_tokens.resume()
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Generate all requested samples in one batch; cancelling ends it after the current token.

        Raises UserError for a request that cannot run.
        """
        config = self.model.config.get_text_config()
        sizes = (config.vocab_size, getattr(config, "max_position_embeddings", None))
        check_request(request.prompt_ids, request.samples, request.params, *sizes)
        await self._open.wait()
        loop = asyncio.get_running_loop()
        pending = _PendingRequest(request, threading.Event(), loop.create_future())
        self._pending.append(pending)

        if request.images or request.params.head:
            loop.call_soon(self._start)  # after others that wait for the same event
        else:
            self._start()

        try:
            return await pending.result
        except asyncio.CancelledError:
            pending.cancelled.set()
            raise

    async def pause(self, release: bool = False) -> None:
        """Halt requests before their next token. Keys and values of a running one stay, also with
        `release`."""
        self._open.clear()
        self.between_tokens.is_paused = True
        await self._call(self._weights.release if release else lambda: None)

    async def resume(self) -> None:
        self.between_tokens.resume()
        self._open.set()

    async def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return self._weights.hashes()

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """Load weights between two tokens; raises ValueError as the embedded engine does."""
        return await self._call(partial(self._load_weights, version, weights))

    async def _call(self, work: Callable[[], T]) -> T:
        """Do this in the engine's thread, before the next token."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.between_tokens.asked.put(lambda: settle(future, outcome_of(work)))
        loop.run_in_executor(self._worker, self.between_tokens.do_asked)
        return await future

    def _start(self) -> None:
        """Queue the waiting requests, those that can share a call together."""
        self._pending.sort(
            key=lambda pending: (str(pending.request.stream), pending.request.samples)
        )

        calls = dict[object, list[_PendingRequest]]()
        num_rows = Counter[object]()
        for pending in self._pending:
            request = pending.request
            alike: object = pending
            if request.images or request.params.head:
                alike = (
                    len(request.prompt_ids),
                    len(request.images),
                    request.params,
                    request.adapter,
                )
            num_rows[alike] += len(request.samples)
            calls.setdefault((alike, num_rows[alike] // _MOST_ROWS), []).append(pending)

        self._pending = []

        for call in calls.values():
            made = asyncio.get_running_loop().run_in_executor(self._worker, self._generate, call)
            made.add_done_callback(partial(_answer, call))

    @torch.no_grad()
    def _generate(self, call: Sequence[_PendingRequest]) -> list[tuple[Segment, ...]]:
        """The results of requests with prompts of one length, the same parameters, and as many
        images."""
        requests = []
        samples = []
        keys = []
        cancelled = []
        for pending in call:
            for sample in pending.request.samples:
                requests.append(pending.request)
                samples.append(sample)
                keys.append(sample_key(pending.request.stream, sample))
                cancelled.append(pending.cancelled)

        self.between_tokens.wait(cancelled)
        if all(event.is_set() for event in cancelled):
            return []

        self._weights.check_whole()
        self.model.eval()
        prompts = [request.prompt_ids for request in requests]
        prompt = torch.tensor(prompts, device=self.model.device)
        params = requests[0].params
        num_drawn = [request.num_drawn for request in requests]
        draw = _Draw(self, keys, num_drawn, params)
        stop = _Stop(self, prompt.shape[1], params, cancelled)
        adapters = [request.adapter for request in requests]
        with rows_with(adapters, prompt.device):
            ids = self._run(prompt, [request.images for request in requests], draw, stop)

        segments = _segments(samples, ids, draw, stop)

        return [tuple(islice(segments, len(pending.request.samples))) for pending in call]

    def _run(
        self, prompt: Tensor, images: list[tuple[str, ...]], draw: "_Draw", stop: "_Stop"
    ) -> Tensor:
        """transformers' `generate`; prompts with responses, `(rows, tokens)`."""
        inputs = own_inputs(self.model, prompt, images) if images[0] else {}
        causal = unwrapped(self.model)
        defaults = causal.generation_config
        causal.generation_config = transformers.GenerationConfig()

        try:
            ids: Tensor = self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,  # the processors leave exactly one token to choose
                max_new_tokens=draw.params.max_tokens,
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList(
                    [draw.see, *_warpers(draw.params), draw]
                ),
                stopping_criteria=transformers.StoppingCriteriaList([stop]),
                **inputs,
            )
        # the defaults that come with a model may forbid tokens; they are saved with it again
        finally:
            causal.generation_config = defaults

        return ids

    def _load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        receipt = self._weights.load(self.version, version, weights)
        self.version = version
        return receipt


class _BetweenTokens:
    """Holds the thread that generates between two tokens, and does there what others ask for."""

    def __init__(self) -> None:
        self.asked = queue.SimpleQueue[Callable[[], None]]()
        self.is_paused = False

    def resume(self) -> None:
        self.is_paused = False
        self.asked.put(lambda: None)  # wakes the thread

    def do_asked(self) -> None:
        while not self.asked.empty():
            self.asked.get()()

    def wait(self, cancelled: Sequence[threading.Event]) -> None:
        """Do what was asked, and more while paused, unless all rows are cancelled."""
        self.do_asked()
        while self.is_paused and not all(event.is_set() for event in cancelled):
            try:
                self.asked.get(timeout=0.05)()
            except queue.Empty:
                continue


def _answer(
    call: Sequence[_PendingRequest], made: "asyncio.Future[list[tuple[Segment, ...]]]"
) -> None:
    """Give each request its result, or what the call raised."""
    for number, pending in enumerate(call):
        if pending.result.done():  # cancelled
            continue

        if made.cancelled():  # the engine has ended
            pending.result.cancel()
        elif (error := made.exception()) is not None:
            pending.result.set_exception(error)
        else:
            pending.result.set_result(made.result()[number])


def _segments(
    samples: Sequence[int], ids: Tensor, draw: "_Draw", stop: "_Stop"
) -> Iterator[Segment]:
    """What was drawn for each row, up to its end."""
    start = stop.prompt_length
    for row, sample in enumerate(samples):
        number, reason = stop.ends.get(row, (0, "abort"))  # of a cancelled request
        yield Segment.drawn(
            sample,
            ids[row, start : start + number].tolist(),
            [step[row] for step in draw.rollout_log_probs[:number]],
            [step[row] for step in draw.sampling_log_probs[:number]],
            draw.versions[:number],
            reason,
            values=[step[row] for step in draw.values[:number]],
            top_ids=[step[row] for step in draw.top_ids[:number]],
            top_log_probs=[step[row] for step in draw.top_log_probs[:number]],
        )


def _warpers(params: SamplingParams) -> list[transformers.LogitsProcessor]:
    """transformers' own warpers, in the order in which it applies them."""
    warpers: list[transformers.LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        warpers.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    warpers.append(transformers.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    return warpers


@dataclass
class _Draw(transformers.LogitsProcessor):
    """Chooses one token per row by its uniform number, and masks the rest."""

    engine: HFEngine
    keys: list[int]
    num_drawn: list[int]
    params: SamplingParams
    rollout_log_probs: list[list[float]] = field(default_factory=list)
    """Of each step, one per row; as `sampling_log_probs` and `values`."""
    sampling_log_probs: list[list[float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights of each step."""
    values: list[list[float]] = field(default_factory=list)
    """Of continuous actions."""
    top_ids: list[list[list[int]]] = field(default_factory=list)
    """Those of the likeliest tokens, if wanted, as `top_log_probs`."""
    top_log_probs: list[list[list[float]]] = field(default_factory=list)

    def see(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The first of the processors, to which the model's own scores come."""
        self._policy = (scores.float() / self.params.temperature).log_softmax(dim=-1)
        return scores

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = np.array(self.num_drawn, dtype=np.int64) + len(self.versions)
        keys = np.array(self.keys, dtype=np.uint64)
        uniform = torch.from_numpy(uniforms(keys, position)).to(scores.device)
        if self.params.head is not None:
            return self._draw_numbers(scores, uniform, self.params.head)

        probs = scores.double().softmax(dim=-1)
        cumulative = probs.cumsum(dim=-1)
        total = cumulative[:, -1]
        target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, target[:, None], right=True)
        if self.params.greedy:
            chosen = scores.argmax(dim=-1, keepdim=True)

        rollout = self._policy.gather(-1, chosen)
        sampling = probs.gather(-1, chosen).log()
        self.rollout_log_probs.append(rollout[:, 0].tolist())
        self.sampling_log_probs.append(sampling[:, 0].tolist())
        self.versions.append(self.engine.version.step)
        if self.params.num_top:
            likeliest = probs.topk(self.params.num_top, dim=-1)
            self.top_ids.append(likeliest.indices.tolist())
            self.top_log_probs.append(likeliest.values.log().tolist())

        return torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)

    def _draw_numbers(self, scores: Tensor, uniform: Tensor, head: NumberHead) -> Tensor:
        """Draw the next number, float32, by the inverse of the normal distribution; greedy takes
        the mean."""
        place = len(self.values)
        earlier = [0.0] * len(scores)
        if place >= head.dim:
            earlier = self.values[-head.dim]

        before = torch.tensor(earlier, device=scores.device)
        tokens = torch.full_like(before, head.first + head.bins * place, dtype=torch.int64)
        mean, log_std = normal_of(scores.float(), head.normals(tokens, before))
        mean = mean.double()
        log_std = log_std.double()
        noise = torch.special.ndtri(uniform + 2.0**-54)
        values = (mean if self.params.greedy else mean + log_std.exp() * noise).float()
        self.values.append(values.tolist())
        log_probs = normal_log_probs(values.double(), mean, log_std).tolist()
        self.rollout_log_probs.append(log_probs)
        self.sampling_log_probs.append(log_probs)
        self.versions.append(self.engine.version.step)

        return torch.full_like(scores, float("-inf")).scatter(
            -1, head.tokens_of(place, values)[:, None], 0.0
        )


@dataclass
class _Stop(transformers.StoppingCriteria):
    """Ends each row at its own stop, and counts the engine's tokens."""

    engine: HFEngine
    prompt_length: int
    params: SamplingParams
    cancelled: list[threading.Event]
    ends: dict[int, tuple[int, FinishReason]] = field(default_factory=dict)
    """Number of response tokens and finish reason of each finished row, which continues as
    padding."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self.engine.num_generated_tokens += len(input_ids) - len(self.ends)
        for row, response in enumerate(input_ids[:, self.prompt_length :].tolist()):
            if row in self.ends:
                continue
            reason = finish_reason(response, self.params, self.engine.tokenizer)
            if reason is not None:
                self.ends[row] = len(response), reason

        self.engine.between_tokens.wait(self.cancelled)
        done = [self.cancelled[row].is_set() or row in self.ends for row in range(len(input_ids))]
        return torch.tensor(done, device=input_ids.device)
