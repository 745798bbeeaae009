"""The embedded rollout engine: continuous batching over key-value slots, in a thread of this process."""

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.flow.ticket import Version
from distflow.models.decoder import DecoderView, PromptKV
from distflow.rollout.checks import check_request
from distflow.rollout.embedded.kv import KVSlots, PromptCache
from distflow.rollout.embedded.loop import StepLoop, settle
from distflow.rollout.embedded.sampler import Draws, sample
from distflow.rollout.embedded.scheduler import Prefill, Scheduler, Work
from distflow.rollout.embedded.sequence import Sequence, sequences_of
from distflow.rollout.engine import GenerateRequest, GenerateResult, Receipt
from distflow.rollout.receipts import stripe_hashes
from distflow.rollout.stopping import finish_reason
from distflow.rollout.weights import check_shared, check_version, copy_weights


@dataclass(frozen=True, eq=False)
class _Pending:
    """A call of `generate` that waits for its sequences."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[GenerateResult]"
    request: GenerateRequest


class EmbeddedEngine:
    """A `RolloutEngine` over the module that the trainer holds, or over a copy of it.

    Each draw is fixed by the request's stream, the sample index and the number of tokens drawn before it. Where the
    arithmetic of a row depends on its batch (rounding), bit-equality needs the same batches: when no request is left
    all slots and caches are dropped, so the same requests submitted in the same order while paused, and then resumed,
    give the same bits, whatever ran before.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        version: Version,
        max_num_seqs: int = 256,
        shares_weights: bool = False,
        recompute_kv: bool = False,
        max_prefill_tokens: int = 8192,
        prompt_cache_tokens: int = 16384,
    ) -> None:
        """Raises UserError for a model that `DecoderView` cannot run.

        tokenizer: for stop strings. max_num_seqs: sequences decoded together. shares_weights: `model` is the
        trainer's, so `load_weights` copies nothing. recompute_kv: after new weights, running sequences get the
        keys and values of those weights (else they keep the old ones). max_prefill_tokens: of one step.
        prompt_cache_tokens: prefilled prompt tokens kept while work is left.
        """
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.version = version
        self.num_generated_tokens = 0
        self._model = model
        self._tokenizer = tokenizer
        self._decoder = DecoderView(model)
        self._shares_weights = shares_weights
        self._recompute_kv = recompute_kv
        # The step loop's own, down to `_unfinished`: asyncio's thread only posts what is to be done with them. The
        # numbers alone it draws itself, and nobody else does.
        self._scheduler = Scheduler(max_num_seqs, max_prefill_tokens)
        self._slots = KVSlots()
        self._prompts = PromptCache(prompt_cache_tokens)
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._unfinished: dict[int, list[Sequence]] = {}
        self._loop = StepLoop("embedded-rollout", self.step, lambda: self._scheduler.has_work, self._fail)

    async def __aenter__(self) -> "EmbeddedEngine":
        self._loop.start()
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
        loop = asyncio.get_running_loop()
        number, pending = next(self._numbers), _Pending(loop, loop.create_future(), request)
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
            if release:
                self._forget_kv()

        await self._loop.call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._loop.paused = False

        await self._loop.call(resume)

    async def hashes(self) -> dict[str, str]:
        """See `RolloutEngine`."""
        return stripe_hashes(self._model.named_parameters(remove_duplicate=False))

    async def load_weights(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> Receipt:
        """Take weights between two steps, all or nothing; a pause is not needed. Cached prompts are dropped.

        Raises ValueError when the version goes back, when names or shapes do not fit, or, on shared storage, when a
        sent tensor is not the module's own.
        """
        return await self._loop.call(partial(self._take_weights, version, weights))

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule, run, sample. Called by the engine's thread."""
        if self._model.training:
            self._model.eval()
        work = self._scheduler.schedule()
        hidden = self._prefill(work) if work.prefills else self._decode(work)
        self._finish(self._append(work, sample(self._decoder.logits(hidden), work.sequences)))

    def _prefill(self, work: Work) -> Tensor:
        """Returns `(rows, hidden)` of the last prompt tokens, in the order of the slots."""
        slot, hidden = work.first_slot, []
        for prefill in work.prefills:
            for forward, rows in self._rows_of(prefill):
                self._slots.fill(forward, rows, slot)
                hidden.append(forward.hidden[torch.tensor(rows, device=forward.hidden.device)])
                slot += len(rows)
        return torch.cat(hidden)

    def _rows_of(self, prefill: Prefill) -> list[tuple[PromptKV, list[int]]]:
        """Forwards with the rows to copy from each, a row for each sequence, in order."""
        places = self._prompts.rows(self.version, prefill.contexts, self._decoder.prefill)
        places = [place for place, starts in zip(places, prefill.starts, strict=True) for _ in starts]
        runs = itertools.groupby(places, key=lambda place: id(place[0]))
        return [(run[0][0], [row for _, row in run]) for run in (list(group) for _, group in runs)]

    def _decode(self, work: Work) -> Tensor:
        device = self._decoder.device
        positions = [sequence.position for sequence in work.sequences]
        tokens = torch.tensor([sequence.token_ids[-1] for sequence in work.sequences], device=device)
        keys, values = self._slots.window(len(positions), max(positions) + 1)
        return self._decoder.decode(tokens, torch.tensor(positions, device=device), keys, values)

    def _append(self, work: Work, draws: Draws) -> list[Sequence]:
        """Give each sequence its token; returns those that are finished."""
        columns = (column.tolist() for column in draws)
        finished = []
        for sequence, token, rollout, sampling in zip(work.sequences, *columns, strict=True):
            sequence.append(token, rollout, sampling, self.version.step)
            sequence.finish_reason = finish_reason(sequence.token_ids, sequence.params, self._tokenizer)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        self.num_generated_tokens += len(work.sequences)
        return finished

    def _finish(self, finished: list[Sequence]) -> None:
        """Free their slots, and answer the requests that have no other sequence left."""
        self._leave(finished)
        for number in dict.fromkeys(sequence.request for sequence in finished):
            sequences = self._unfinished[number]
            if all(sequence.finish_reason is not None for sequence in sequences):
                pending = self._pending.pop(number)
                del self._unfinished[number]
                settle(pending.loop, pending.future, GenerateResult(tuple(seq.generation() for seq in sequences)))

    def _leave(self, gone: list[Sequence]) -> None:
        self._slots.move(self._scheduler.remove(gone))
        if not self._scheduler.has_work:
            self._slots.reset()
            self._prompts.clear()

    def _submit(self, number: int, pending: _Pending) -> None:
        sequences = sequences_of(number, pending.request)
        self._pending[number], self._unfinished[number] = pending, sequences
        self._scheduler.add(sequences)

    def _abort(self, number: int) -> None:
        """Nothing to do where the request was answered, or failed, before its caller's cancel arrived."""
        if self._pending.pop(number, None) is not None:
            self._leave(self._unfinished.pop(number))

    def _fail(self, error: Exception) -> None:
        """Answer all waiting requests with `error`, and start afresh: the next requests are served again."""
        pending, self._pending, self._unfinished = list(self._pending.values()), {}, {}
        self._leave([*self._scheduler.waiting, *self._scheduler.running])
        for waiting in pending:
            settle(waiting.loop, waiting.future, error)

    def _take_weights(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> Receipt:
        check_version(self.version, version)
        hashes: dict[str, str] = {}
        if self._shares_weights:
            check_shared(self._model, weights)
        else:
            hashes = copy_weights(self._model, weights)
        self.version = version
        self._prompts.clear()
        if self._recompute_kv:
            self._forget_kv()
        return Receipt(version, hashes, self._shares_weights)

    def _forget_kv(self) -> None:
        """Running sequences go back to the head of the queue, with the tokens that they have."""
        self._scheduler.preempt()
        self._prompts.clear()
        self._slots.reset()
