"""The embedded rollout engine: continuous batching over key-value slots, in a thread of this process."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.errors import UserError
from distflow.models.cached_decoder import DecoderView
from distflow.models.cpu_kernels.weight_layout import prepack
from distflow.rollout.embedded.cuda.async_steps import Chain, DeviceOptions
from distflow.rollout.embedded.cuda.request_lane import CudaRequestLane
from distflow.rollout.embedded.engine_loop import StepLoop, settle
from distflow.rollout.embedded.host_steps import Tiles, step_here
from distflow.rollout.embedded.request_lane import Drawn, RequestLane
from distflow.rollout.embedded.scheduler import Sequence, sequences_of
from distflow.rollout.engine import Activity, ActivityLog, GenerateRequest, GenerateResult, Host, KVOnUpdate, Receipt
from distflow.rollout.generation_rules import check_request, finish_reason
from distflow.rollout.weights import check_shared, check_version, copy_weights, stripe_hashes
from distflow.scheduling.groups import TRAIN, Version


@dataclass(frozen=True, eq=False)
class _Pending:
    """A call of `generate` that waits for its sequences."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[GenerateResult]"
    lane: RequestLane | CudaRequestLane
    sequences: list[Sequence]


class EmbeddedEngine:
    """A `RolloutEngine` over the module that the trainer holds, or over a copy of it.

    Each draw is determined by the request's stream, the sample index and the number of tokens drawn before it. If the
    rounding of a row depends on its batch, bit-equality needs the same batches: when no request is left
    all slots and caches are dropped, so the same requests submitted in the same order while paused, and then resumed,
    give the same bits, whatever ran before.

    Requests of the stream "train" have a lane of their own, and all others have one. The other lane goes first: while
    an evaluation runs, training sequences keep their slots and wait, and their batches are what they would have been.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        version: Version,
        max_num_seqs: int = 256,
        shares_weights: bool = False,
        kv_on_update: KVOnUpdate = "keep",
        num_threads: int | None = None,
        batch_invariant: bool = False,
        max_prefill_tokens: int = 8192,
        prompt_cache_tokens: int = 16384,
        enforce_eager: bool = False,
        compute_dtype: torch.dtype | None = None,
        on_device: DeviceOptions | None = None,
    ) -> None:
        """Raises UserError for a model that `DecoderView` cannot run.

        tokenizer: for stop strings. max_num_seqs: sequences of a lane decoded together. shares_weights: `model` is the
        trainer's, so `load_weights` copies nothing. kv_on_update: with new weights, begun sequences continue with the
        old keys and values, get those of the new weights, or end (finish reason "abort"). num_threads: of torch, where
        the engine computes on a thread of its own; None leaves them as they are. batch_invariant: see `Tiles`, which
        says what it promises. max_prefill_tokens: of one step. prompt_cache_tokens: prefilled prompt tokens that a lane
        keeps while it has work. enforce_eager: no CUDA graphs, and no native code. compute_dtype: see `DecoderView`.
        on_device: run decode steps asynchronously on the device (`cuda/`); None: if it is a CUDA device, and the engine
        is not `batch_invariant`.
        """
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.version = version
        self.num_generated_tokens = 0
        self._model = model
        self._tokenizer = tokenizer
        if not shares_weights:
            prepack(model)
        by_torch = batch_invariant or enforce_eager or on_device is not None
        self._decoder = DecoderView(model, in_blocks=batch_invariant, native=not by_torch, compute_dtype=compute_dtype)
        self._tiles = Tiles(self._decoder) if batch_invariant else None
        self._shares_weights = shares_weights
        self._kv_on_update = kv_on_update
        self._activity = ActivityLog()
        # Down to `_pending` only the step loop's thread uses these: asyncio's thread posts commands. Only the request
        # numbers are drawn by asyncio's thread alone.
        self._is_whole = True  # False: a copy failed in the middle
        self._num_loads = 0  # identifies the weights: an alias changes only their version
        if on_device is None and self._decoder.device.type == "cuda" and not batch_invariant:
            on_device = DeviceOptions(graphs=not enforce_eager)
        self._chain = Chain(self._decoder, model, 2 * max_num_seqs, on_device) if on_device is not None else None
        self._other, self._train = self._lanes = tuple(
            self._make_lane(name, max_num_seqs, max_prefill_tokens, prompt_cache_tokens) for name in ("eval", "train")
        )
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self.host: Host | None = None
        self._loop = StepLoop("embedded-rollout", self.step, self._has_work, self._fail, num_threads)

    def _make_lane(self, name: str, *limits: int) -> RequestLane | CudaRequestLane:
        return (
            RequestLane(name, *limits)
            if self._chain is None
            else CudaRequestLane(name, self._chain, self._decoder, *limits)
        )

    async def __aenter__(self) -> "EmbeddedEngine":
        self._loop.start(self.host)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._loop.stop()  # no other thread is left that touches what `_fail` clears
        self._fail(RuntimeError("the rollout engine was closed while requests were waiting"))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate all wanted samples. Cancelling aborts them and frees their slots.

        Raises UserError for a request that cannot run, and whatever a failed step raised.
        """
        check_request(request, vocab_size=self._decoder.vocab_size, max_positions=self._decoder.max_positions)
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        lane = self._train if request.stream.name.partition("/")[0] == TRAIN else self._other
        pending = _Pending(loop, loop.create_future(), lane, sequences_of(number, request))
        self._loop.post(partial(self._submit, number, pending))
        try:
            return await pending.future
        except asyncio.CancelledError:
            if self._loop.running:
                self._loop.post(partial(self._abort, number))
            raise

    async def pause(self, release: bool = False) -> None:
        """Returns when no step runs. release: drop all keys and values; they are recomputed after `resume`."""

        def pause() -> None:
            self._loop.paused = True
            self._settle()
            self._activity.stopped()
            if release:
                self._release()

        await self._loop.call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._look_at_weights()
            self._loop.paused = False

        await self._loop.call(resume)

    async def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return await self._loop.call(lambda: stripe_hashes(self._model.named_parameters(remove_duplicate=False)))

    async def load_weights(self, version: Version, weights: Iterable[tuple[str, Tensor]] | None) -> Receipt:
        """Load weights between two steps, all or nothing; no pause is needed. Cached prompts are dropped;
        `kv_on_update` decides about begun sequences. None: an alias, see `RolloutEngine`; nothing is dropped.

        Raises ValueError when the version goes back, when names or shapes do not fit, or, on shared storage, when a
        sent tensor is not the module's own.
        """
        return await self._loop.call(partial(self._take_weights, version, weights))

    def take_activity(self) -> list[Activity]:
        """Its activity since the last call; from any thread."""
        return self._activity.take()

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule, run, sample. Called by the thread that computes."""
        t0 = time.time()
        if not self._is_whole:
            raise RuntimeError("the rollout engine took a part of its last weights only, and does not use them")
        if self._model.training:
            self._model.eval()
        lane = next(lane for lane in self._lanes if lane.can_step)
        drawn = (
            lane.step(self._num_loads)
            if isinstance(lane, CudaRequestLane)
            else step_here(lane, self._decoder, self._tiles, self._num_loads)
        )
        if drawn is not None and drawn.sequences:  # all may have ended meanwhile
            self._take(lane, drawn, t0)

    def _take(self, lane: RequestLane | CudaRequestLane, drawn: Drawn, t0: float) -> None:
        finished = self._append(drawn)
        self._activity.decoded(t0, time.time(), self.version.step, lane.name, len(drawn.sequences))
        self._finish(lane, finished)

    def _settle(self) -> None:
        """Read the tokens of all launched steps, before a change of weights or memory."""
        try:
            for lane in self._lanes:
                while isinstance(lane, CudaRequestLane) and (drawn := lane.read()) is not None:
                    self._take(lane, drawn, time.time())
        except Exception as error:  # a step's failure, detected late: every waiting request gets it
            self._fail(error)

    def _has_work(self) -> bool:
        return any(lane.has_work for lane in self._lanes)

    def _append(self, drawn: Drawn) -> list[Sequence]:
        """Give each sequence its token; returns those that are finished."""
        finished = []
        for sequence, token, rollout, sampling in zip(*drawn, strict=True):
            sequence.append(token, rollout, sampling, self.version.step)
            sequence.finish_reason = finish_reason(sequence.token_ids, sequence.params, self._tokenizer)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        self.num_generated_tokens += len(drawn.sequences)
        return finished

    def _finish(self, lane: RequestLane | CudaRequestLane, finished: list[Sequence]) -> None:
        """Free their slots, and return the requests with no other sequence left, in order of submission."""
        self._leave(lane, finished)
        for number in sorted({sequence.request for sequence in finished}):
            sequences = self._pending[number].sequences
            if all(sequence.finish_reason is not None for sequence in sequences):
                pending = self._pending.pop(number)
                settle(pending.loop, pending.future, GenerateResult(tuple(seq.generation() for seq in sequences)))

    def _leave(self, lane: RequestLane | CudaRequestLane, gone: list[Sequence]) -> None:
        lane.leave(gone)
        if not self._has_work():
            self._activity.stopped()

    def _submit(self, number: int, pending: _Pending) -> None:
        if self._chain is not None:
            try:
                self._chain.check(pending.sequences[0])
            except UserError as error:
                return settle(pending.loop, pending.future, error)
        self._pending[number] = pending
        pending.lane.scheduler.add(pending.sequences)

    def _abort(self, number: int) -> None:
        """Does nothing if the request was done, or failed, before its caller's cancel arrived."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._leave(pending.lane, pending.sequences)

    def _fail(self, error: Exception) -> None:
        """Fail all waiting requests with `error`, and reset: later requests run normally."""
        pending, self._pending = list(self._pending.values()), {}
        for lane in self._lanes:
            self._leave(lane, [*lane.scheduler.waiting, *lane.scheduler.running])
        if self._chain is not None:
            self._chain.release()  # NaN may be in it
        for waiting in pending:
            settle(waiting.loop, waiting.future, error)

    def _take_weights(self, version: Version, weights: Iterable[tuple[str, Tensor]] | None) -> Receipt:
        check_version(self.version, version)
        self._settle()
        if weights is None:
            self.version = version
            return Receipt(version, shared=self._shares_weights, alias=True)
        hashes: dict[str, str] = {}
        if self._shares_weights:
            check_shared(self._model, weights)
        else:
            try:
                hashes = copy_weights(self._model, weights)
            except ValueError:
                raise  # nothing was changed
            except Exception:
                self._is_whole = False
                raise
        self._is_whole = True
        self.version = version
        self._num_loads += 1
        self._look_at_weights()
        self._follow_update()
        return Receipt(version, hashes, self._shares_weights)

    def _look_at_weights(self) -> None:
        """Copies of the weights, and their addresses, are no longer valid."""
        self._decoder.follow_weights()
        if self._chain is not None:
            self._chain.graphs.follow_weights()

    def _follow_update(self) -> None:
        """Drop keys and values of the old weights, or keep them, by `kv_on_update`."""
        for lane in self._lanes:
            lane.prompts.clear()
            if self._kv_on_update == "recompute":
                lane.forget_kv()
            elif self._kv_on_update == "abort":
                begun = lane.scheduler.begun()
                for sequence in begun:
                    sequence.finish_reason = "abort"
                self._finish(lane, begun)

    def _release(self) -> None:
        for lane in self._lanes:
            lane.forget_kv()
        if self._chain is not None:
            self._chain.release()
