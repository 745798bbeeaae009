"""A bench for a running engine: asks it for responses whose form is checked, and compares their
log-probs with a plain forward of transformers."""

import asyncio
import copy
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.data.sample import Segment
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams, Stream
from distflow.rollout.engine_weights import stripe_hashes
from distflow.scheduling.group_states import Version

_MOST_TOKENS: Final = 24


class Fails(Exception):
    """The engine violates a property; the message has the figures."""


@dataclass(eq=False)
class Bench:
    """An entered engine and the model that it serves."""

    engine: RolloutEngine
    model: Any
    tokenizer: PreTrainedTokenizerBase
    longest: int
    """Tokens of a prompt with its response."""
    limit: float
    """On |Δ log-prob|."""
    dtype: torch.dtype
    """Of the sent weights."""
    num_prompts: int
    """For the greedy check."""
    served: dict[int, Any] = field(default_factory=dict)
    """Models by the step of their version."""

    def __post_init__(self) -> None:
        config = self.model.config.get_text_config()
        special = set(self.tokenizer.all_special_ids)
        num_tokens = min(config.vocab_size, len(self.tokenizer))
        self._ids = [token for token in range(num_tokens) if token not in special]
        self.max_positions: int = config.max_position_embeddings
        self.num_tokens = min(_MOST_TOKENS, self.longest // 2)

    @property
    def counted(self) -> int:
        """The tokens that the engine has generated; 0 if it does not count them."""
        return getattr(self.engine, "num_generated_tokens", 0)

    def prompt(self, length: int, number: int = 0) -> tuple[int, ...]:
        return tuple(random.Random(f"{length} {number}").choices(self._ids, k=length))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    async def ask(
        self,
        prompt: tuple[int, ...],
        samples: tuple[int, ...] = (0,),
        row: int = 0,
        seed: int = 1,
        **params: Any,
    ) -> tuple[Segment, ...]:
        """Responses, whose form is checked: finite log-probs, known versions, an end where one is
        due."""
        wanted = SamplingParams(**{"max_tokens": self.num_tokens, **params})
        request = GenerateRequest(prompt, samples, wanted, Stream(seed, "check", 0, row))
        responses = await self.engine.generate(request)
        found = tuple(each.sample for each in responses)
        if found != samples:
            raise Fails(f"samples {samples} were asked for, {found} came")

        for each in responses:
            self._check_numbers(each)
            self._check_end(each, wanted)

        return responses

    def _check_numbers(self, response: Segment) -> None:
        for log_prob in (*response.rollout_log_probs, *response.sampling_log_probs):
            if not math.isfinite(log_prob) or log_prob >= 1e-4:
                raise Fails("a log-prob is not finite, or above 0")
        versions = list(response.versions)
        if not self.served.keys() >= set(versions) or versions != sorted(versions):
            raise Fails(f"tokens are of the versions {versions}, and {[*self.served]} were served")

    def _check_end(self, response: Segment, wanted: SamplingParams) -> None:
        if response.finish_reason == "abort":
            return

        ids = response.token_ids
        due = "length", wanted.max_tokens
        for end in range(1, len(ids) + 1):
            text = self.text(ids[:end])
            is_stop = ids[end - 1] in wanted.stop_token_ids
            if is_stop or any(each in text for each in wanted.stop):
                due = "stop", end
                break

        if (response.finish_reason, len(ids)) != due:
            ended = f"ended by '{response.finish_reason}' after {len(ids)} tokens"
            raise Fails(f"a response {ended}, but should have at '{due[0]}' after {due[1]}")

    async def ask_long(self, patience: int = 8) -> list["asyncio.Task[tuple[Segment, ...]]"]:
        """Requests for as many tokens as fit. patience: milliseconds to wait for the first
        token."""
        before = self.counted
        most = self.longest - 2

        tasks = list[asyncio.Task[tuple[Segment, ...]]]()
        for row in range(4):
            asked = self.ask(self.prompt(2, row), (0, 1), row, max_tokens=most)
            tasks.append(asyncio.create_task(asked))

        for _ in range(patience):
            if self.counted == before:
                await asyncio.sleep(0.001)

        return tasks

    @torch.no_grad()
    def logits(self, prompt: tuple[int, ...], response: Segment, keeps_kv: bool = True) -> Tensor:
        """`(tokens, vocabulary)`: the logits of each token under the weights of its version.
        keeps_kv: use keys and values that earlier versions computed, else recompute them."""
        ids = [*prompt, *response.token_ids]
        end = len(prompt) - 1  # of the tokens that were fed
        cache = None
        rows = list[Tensor]()
        for version, run in groupby(response.versions):
            count = len([*run])
            model = self.served[version]
            start = end if cache is not None else 0
            end += count
            fed = torch.tensor([ids[start:end]], device=model.device)
            out = model(input_ids=fed, use_cache=True, past_key_values=cache)
            rows.append(out.logits[0, -count:].double().cpu())
            if keeps_kv:
                cache = out.past_key_values

        return torch.cat(rows)

    def gap(
        self, prompt: tuple[int, ...], response: Segment, logits: Tensor, **params: Any
    ) -> float:
        """The largest |Δ| of the response's log-probs, of both kinds."""
        wanted = SamplingParams(1, **params)
        rollout = list[Tensor]()
        sampling = list[Tensor]()
        for index, token in enumerate(response.token_ids):
            seen = (*prompt, *response.token_ids[:index])
            rollout.append((logits[index] / wanted.temperature).log_softmax(-1)[token])
            sampling.append(distribution(logits[index], seen, wanted)[token].log())

        found = torch.tensor([*response.rollout_log_probs, *response.sampling_log_probs]).double()
        return float((found - torch.stack(rollout + sampling)).abs().max())

    def compare(self, prompt: tuple[int, ...], responses: Iterable[Segment], **params: Any) -> str:
        """Text with the largest gap of the responses. Raises Fails if it exceeds the limit."""
        gaps = list[float]()
        for each in responses:
            if each.token_ids:  # some may be aborted before their first token
                gaps.append(self.gap(prompt, each, self.logits(prompt, each), **params))
        return self.within(gaps)

    def within(self, gaps: Iterable[float]) -> str:
        """Text with the largest gap. Raises Fails if it exceeds the limit."""
        largest = 0.0
        for gap in gaps:
            if not gap <= self.limit:  # also if it is NaN
                raise Fails(f"log-probs differ by {gap:.2g}, the limit is {self.limit:g}")
            largest = max(largest, gap)
        return f"largest |Δ| {largest:.1e}"

    def changed(self) -> Any:
        """A model with other weights."""
        other = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(len(self.served))

        with torch.no_grad():
            for weight in other.parameters():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(0.1 * noise * weight.abs().mean()).copy_(weight.to(self.dtype))

        return other

    def next_version(self) -> Version:
        return Version(self.engine.version.restart, self.engine.version.step + 1)

    async def load(self, model: nn.Module) -> str:
        """Make the engine serve the model. Raises Fails if the receipt or the engine has hashes of
        other weights."""
        version = self.next_version()
        weights = [(name, each.detach().to(self.dtype)) for name, each in model.named_parameters()]
        self.served[version.step] = model
        receipt = await self.engine.load_weights(version, weights)
        truth = stripe_hashes(weights)

        for hashes in (receipt.hashes, await self.engine.hashes()):
            wrong = [name for name in truth if hashes.get(name) != truth[name]]
            if wrong:
                counts = f"{len(wrong)} of {len(truth)} hashes"
                raise Fails(f"{counts} are not of the weights sent, e.g. of {wrong[0]}")

        if not receipt.version == self.engine.version == version:
            raise Fails(
                f"{version} was sent, {receipt.version} received, {self.engine.version} is served"
            )

        return f"{len(truth)} hashes agree"


def distribution(logits: Tensor, seen: Iterable[int], wanted: SamplingParams) -> Tensor:
    """The distribution of the next token. seen: prompt and response so far."""
    ids = torch.tensor(sorted(set(seen)))
    penalty = wanted.repetition_penalty
    punished = torch.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
    probs = (logits.scatter(0, ids, punished) / wanted.temperature).softmax(-1)
    ordered, order = probs.sort(descending=True, stable=True)
    if wanted.top_k > 0:
        ordered[wanted.top_k :] = 0
    ordered /= ordered.sum()
    is_cut = ordered.cumsum(0) - ordered >= wanted.top_p
    ordered[is_cut | (ordered < wanted.min_p * ordered[0])] = 0

    return torch.zeros_like(probs).scatter(0, order, ordered / ordered.sum())
