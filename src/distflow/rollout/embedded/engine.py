"""The embedded rollout engine: continuous batching over key-value slots, in a thread of this
process."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.models.cached_decoder import DecoderView
from distflow.rollout.embedded.cuda_lane import CudaRequestLane
from distflow.rollout.embedded.decode_steps import AsyncSteps, DeviceOptions
from distflow.rollout.embedded.engine_thread import StepLoop, settle
from distflow.rollout.embedded.host_lane import RequestLane
from distflow.rollout.embedded.prompt_cache import PromptCache
from distflow.rollout.embedded.scheduler import Scheduler, Sequence, StepTokens, sequences_of
from distflow.rollout.engine import (
    Activity,
    ActivityLog,
    GenerateRequest,
    Host,
    KVOnUpdate,
    WeightReceipt,
)
from distflow.rollout.engine_weights import EngineWeights
from distflow.rollout.stops import check_request, finish_reason
from distflow.scheduling.group_states import TRAIN, Version

Lane = RequestLane | CudaRequestLane

_PROMPT_CACHE_TOKENS: Final = 16384
"""Prefilled prompt tokens that a lane keeps while there is work."""


@dataclass(frozen=True, eq=False)
class _Pending:
    """A call of `generate` that waits for its sequences."""

    future: "asyncio.Future[None]"
    lane: Lane
    sequences: list[Sequence]


@dataclass(eq=False, repr=False)
class EmbeddedEngine:
    """A `RolloutEngine` over the trainer's module, or a copy of it.

    Each draw is determined by the request's stream, the sample index and the number of tokens drawn
    before it. If a row's rounding depends on its batch, bit-equality needs the same batches. All
    slots and cached prompts are dropped when no request is left, so the same requests, submitted in
    the same order during a pause and then resumed, give the same bits, whatever ran before. With
    requests that `may_continue`, whose keys and values stay until the next `load_weights`,
    everything since that load must be the same too.

    Requests of the stream "train" have one lane, all others a second one, which has priority:
    during an evaluation, training sequences wait in their slots, and their batches are the same as
    without it.

    Raises UserError for a model that `DecoderView` cannot run.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    """For stop strings."""
    _: KW_ONLY
    version: Version
    max_num_seqs: int = 256
    """Sequences of a lane that are decoded together."""
    shares_weights: bool = False
    """`model` is the trainer's, so `load_weights` copies nothing."""
    kv_on_update: KVOnUpdate = "keep"
    """With new weights, begun sequences continue with the old keys and values, recompute them, or
    end (finish reason "abort")."""
    num_threads: int | None = None
    """Of torch, if the engine computes on its own thread; None leaves the number unchanged."""
    batch_invariant: bool = False
    """Decode one sequence of a lane at a time and keep no prefixes, so that the bits of a response
    depend on its own request alone: the rounding of a matrix product depends on its shape."""
    max_prefill_tokens: int = 8192
    """See `Scheduler`."""
    enforce_eager: bool = False
    """No CUDA graphs, and no native code."""
    compute_dtype: torch.dtype | None = None
    """See `DecoderView`."""
    on_device: DeviceOptions | None = None
    """Run decode steps asynchronously on the device (`decode_steps.py`); None: unless it is a
    CPU."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")

        self.num_generated_tokens = 0
        self.host: Host | None = None
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        by_torch = self.enforce_eager or (on_cpu and self.on_device is not None)
        self._decoder = DecoderView(
            self.model, native=not by_torch, compute_dtype=self.compute_dtype
        )
        self._activity = ActivityLog()

        # Only the step loop's thread uses the fields down to `_pending`; asyncio's thread posts
        # commands. Only asyncio's thread draws request numbers.
        self._weights = EngineWeights(self.model, self.shares_weights)

        # when the weights were loaded; the version may change without a load
        self._loaded = self.version
        device = self.on_device
        if device is None and self._decoder.device.type != "cpu":
            device = DeviceOptions(graphs=not self.enforce_eager)
        self._num_slots = 1 if self.batch_invariant else self.max_num_seqs
        self._steps: AsyncSteps | None = None
        if device is not None:
            self._steps = AsyncSteps(self._decoder, self.model, 2 * self._num_slots, device)
        self._other, self._train = self._lanes = self._make_lane("eval"), self._make_lane("train")
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._loop = StepLoop(
            "embedded-rollout", self.step, self._has_work, self._fail, self.num_threads, on_cpu
        )

    def _make_lane(self, name: str) -> Lane:
        if self._steps is None:
            num_fitting = None
        else:
            num_fitting = self._steps.num_fitting

        scheduler = Scheduler(self._num_slots, self.max_prefill_tokens, num_fitting)
        parts = (name, scheduler, PromptCache(_PROMPT_CACHE_TOKENS), self._decoder)
        if self._steps is not None:
            return CudaRequestLane(*parts, self._steps)

        return RequestLane(*parts)

    async def __aenter__(self) -> "EmbeddedEngine":
        self._loop.start(self.host)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._loop.stop()  # no other thread uses what `_fail` clears any more
        self._fail(RuntimeError("the rollout engine was closed while requests were waiting"))

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Generate all requested samples. Cancelling aborts them and frees their slots.

        Raises UserError for a request that cannot run, and whatever a failed step raised.
        """
        sizes = (self._decoder.vocab_size, self._decoder.max_positions)
        check_request(request.prompt_ids, request.samples, request.params, *sizes)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()

        if request.stream.name.partition("/")[0] == TRAIN:
            lane = self._train
        else:
            lane = self._other

        sequences = sequences_of(
            number, replace(request, may_continue=request.may_continue and not self.batch_invariant)
        )
        self._loop.post(partial(self._submit, number, _Pending(future, lane, sequences)))

        try:
            await future
            return tuple(sequence.segment() for sequence in sequences)
        except asyncio.CancelledError:
            if self._loop.running:
                self._loop.post(partial(self._abort, number))
            raise

    async def pause(self, release: bool = False) -> None:
        """Returns when no step runs. release: drop all keys and values, which are recomputed after
        `resume`, and the engine's own weights, which must be loaded before `resume`."""

        def pause() -> None:
            self._loop.paused = True
            self._settle()
            self._activity.stopped()

            if release:
                for lane in self._lanes:
                    lane.forget_kv()
                if self._steps is not None:
                    self._steps.release()
                self._weights.release()
                self._refresh_weights()

        await self._loop.call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._refresh_weights()
            self._loop.paused = False

        await self._loop.call(resume)

    async def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return await self._loop.call(self._weights.hashes)

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """Load weights between two steps, all or nothing; no pause is needed. Cached prompts are
        dropped; `kv_on_update` decides about begun sequences. None: only the version changes; only
        the prefix cache is dropped, so that its hits do not depend on how many versions ran in this
        process. Raises ValueError as `EngineWeights.load`.
        """
        return await self._loop.call(partial(self._load_weights, version, weights))

    def take_activity(self) -> list[Activity]:
        """Its activity since the last call; from any thread."""
        return self._activity.take()

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule, run, sample; called by the computing thread."""
        t0 = time.time()
        self._weights.check_whole()
        if self.model.training:
            self.model.eval()

        # A lane may have to wait for memory used by the other.
        lane = next(
            each for each in self._lanes if each.scheduler.running or each.scheduler.can_prefill()
        )
        step_tokens = lane.step(self._loaded)

        # all sequences may have ended meanwhile
        if step_tokens is not None and step_tokens.sequences:
            self._take(lane, step_tokens, t0)

    def _take(self, lane: Lane, step_tokens: StepTokens, t0: float) -> None:
        """Give each sequence its token, and finish those that end with it."""
        finished = []
        version = self.version.step

        for sequence, drawn in zip(*step_tokens, strict=True):
            sequence.append(drawn, version)
            reason = finish_reason(sequence.token_ids, sequence.params, self.tokenizer)
            if reason is not None:
                sequence.finish_reason = reason
                finished.append(sequence)

        lane.keep(finished)
        self.num_generated_tokens += len(step_tokens.sequences)
        self._activity.decoded(
            t0, time.time(), self.version.step, lane.name, len(step_tokens.sequences)
        )
        self._finish(lane, finished)

    def _settle(self) -> None:
        """Read the tokens of all launched steps, before a change of weights or memory. Failed steps
        are detected here at the latest: every waiting request gets the error."""

        def read() -> None:
            for lane in self._lanes:
                while (step_tokens := lane.read()) is not None:
                    self._take(lane, step_tokens, time.time())

        self._loop.attempt(read)

    def _has_work(self) -> bool:
        return any(lane.scheduler.has_work for lane in self._lanes)

    def _finish(self, lane: Lane, finished: list[Sequence]) -> None:
        """Free the slots of finished sequences, and return requests without further ones, in order
        of submission."""
        self._leave(lane, finished)
        for number in sorted({sequence.request for sequence in finished}):
            if all(
                sequence.finish_reason is not None for sequence in self._pending[number].sequences
            ):
                settle(self._pending.pop(number).future, None)

    def _leave(self, lane: Lane, gone: list[Sequence]) -> None:
        lane.leave(gone, lane.scheduler.remove(gone))
        if not self._has_work():
            self._activity.stopped()

    def _submit(self, number: int, pending: _Pending) -> None:
        if self._steps is not None:
            try:
                self._steps.check(pending.sequences[0])
            except UserError as error:
                settle(pending.future, error)
                return

        self._pending[number] = pending
        pending.lane.scheduler.add(pending.sequences)

    def _abort(self, number: int) -> None:
        """Abort a request; does nothing if it finished or failed before the cancellation
        arrived."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._leave(pending.lane, pending.sequences)

    def _fail(self, error: Exception) -> None:
        """Fail all waiting requests with `error`, and reset: later requests run normally."""
        pending = list(self._pending.values())
        self._pending = {}

        for lane in self._lanes:
            self._leave(lane, [*lane.scheduler.waiting, *lane.scheduler.running])
            lane.forget_prefixes()

        if self._steps is not None:
            self._steps.release()  # it may contain NaN
        for waiting in pending:
            settle(waiting.future, error)

    def _load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        self._settle()
        receipt = self._weights.load(self.version, version, weights)
        self.version = version
        for lane in self._lanes:
            lane.forget_prefixes()

        if weights is not None:
            self._loaded = version
            self._refresh_weights()

            for lane in self._lanes:
                lane.prompts.clear()
                if self.kv_on_update == "recompute":
                    lane.forget_kv()
                elif self.kv_on_update == "abort":
                    begun = lane.scheduler.begun()
                    for sequence in begun:
                        sequence.finish_reason = "abort"
                    self._finish(lane, begun)

        return receipt

    def _refresh_weights(self) -> None:
        """Drop copies and addresses of the weights, which are no longer valid."""
        self._decoder.refresh_weights()
        if self._steps is not None:
            self._steps.graphs.drop_if_moved()
