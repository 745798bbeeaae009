"""Tests a running engine against the protocol of `rollout/engine.py`. The references are a plain
forward of transformers, and truncations computed here in float64."""

import asyncio
import copy
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.data.sample import Segment
from distflow.errors import UserError, count_of
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams, Stream
from distflow.rollout.engine_weights import stripe_hashes
from distflow.scheduling.group_states import Version

NUM_DRAWS: Final = 1000
LEAST_CHANCE: Final = 1e-6
"""The least p-value accepted: one correct engine in a million fails."""
_MOST_TOKENS: Final = 24
_QUIET_S: Final = 0.2
_DEADLINE_S: Final = 300.0
_HOT: Final[dict[str, Any]] = {"temperature": 1.5}


class Fails(Exception):
    """The engine violates a property; the message has the figures."""


@dataclass(frozen=True)
class Finding:
    """One check's result. outcome: "held", "failed" or "not supported". text: figures, or the
    reason."""

    name: str
    outcome: str
    text: str


@dataclass(eq=False)
class Bench:
    """An entered engine and the model that it serves. longest: tokens of a prompt with its
    response. limit: on |Δ log-prob|. dtype: of the sent weights. num_prompts: for the greedy check.
    served: models by the step of their version."""

    engine: RolloutEngine
    model: Any
    tokenizer: PreTrainedTokenizerBase
    longest: int
    limit: float
    dtype: torch.dtype
    num_prompts: int
    served: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config.get_text_config()
        special = set(self.tokenizer.all_special_ids)
        self._ids = [
            token
            for token in range(min(config.vocab_size, len(self.tokenizer)))
            if token not in special
        ]
        self.max_positions: int = config.max_position_embeddings
        self.num_tokens = min(_MOST_TOKENS, self.longest // 2)

    @property
    def counted(self) -> int:
        """The tokens that the engine has generated; 0 if it does not count them."""
        return getattr(self.engine, "num_generated_tokens", 0)

    async def settle(self) -> int:
        """Pause the engine. Returns `counted` when the responses that had ended before have
        arrived."""
        before = -1
        await self.engine.pause()
        while before != self.counted:
            before = self.counted
            await asyncio.sleep(_QUIET_S)
            await self.engine.pause()
        return before

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
        if [each.sample for each in responses] != [*samples]:
            raise Fails(
                f"samples {samples} were asked for, {[each.sample for each in responses]} came"
            )
        for each in responses:
            ids = each.token_ids
            log_probs = (each.rollout_log_probs, each.sampling_log_probs)
            if not all(
                math.isfinite(number) and number < 1e-4 for one in log_probs for number in one
            ):
                raise Fails("a log-prob is not finite, or above 0")
            versions = list(each.versions)
            if not set(versions) <= set(self.served) or versions != sorted(versions):
                raise Fails(
                    f"tokens are of the versions {versions}, and {[*self.served]} were served"
                )
            ends = (end for end in range(1, len(ids) + 1) if self._stops(ids[:end], wanted))
            due = next(ends, 0)
            reason, length = ("stop", due) if due else ("length", wanted.max_tokens)
            if each.finish_reason != "abort" and (each.finish_reason, len(ids)) != (reason, length):
                ended = f"ended by '{each.finish_reason}' after {len(ids)} tokens"
                raise Fails(f"a response {ended}, but should have at '{reason}' after {length}")
        return responses

    def _stops(self, ids: Sequence[int], wanted: SamplingParams) -> bool:
        return ids[-1] in wanted.stop_token_ids or any(
            text in self.text(ids) for text in wanted.stop
        )

    @torch.no_grad()
    def logits(self, prompt: tuple[int, ...], response: Segment, keeps_kv: bool = True) -> Tensor:
        """`(tokens, vocabulary)`: the logits of each token under the weights of its version.
        keeps_kv: use keys and values that earlier versions computed, else recompute them."""
        ids = [*prompt, *response.token_ids]
        start = len(prompt)
        cache = None
        rows = []
        for version, run in groupby(response.versions):
            count = len([*run])
            model = self.served[version]
            fed = torch.tensor(
                [ids[start - 1 if cache else 0 : start + count - 1]], device=model.device
            )
            out = model(
                input_ids=fed, use_cache=True, **({"past_key_values": cache} if cache else {})
            )
            rows.append(out.logits[0, -count:].double().cpu())
            cache = out.past_key_values if keeps_kv else None
            start = start + count
        return torch.cat(rows)

    def gap(
        self, prompt: tuple[int, ...], response: Segment, logits: Tensor, **params: Any
    ) -> float:
        """The largest |Δ| of the response's log-probs, of both kinds."""
        wanted = SamplingParams(1, **params)
        ids = torch.tensor(response.token_ids)[:, None]
        seen = ([*prompt, *response.token_ids[:index]] for index in range(len(logits)))
        drawn = torch.stack(
            [distribution(row, ids, wanted) for row, ids in zip(logits, seen, strict=True)]
        )
        truth = torch.cat(
            (
                logits.div(wanted.temperature).log_softmax(-1).gather(-1, ids),
                drawn.gather(-1, ids).log(),
            )
        )
        found = torch.tensor([*response.rollout_log_probs, *response.sampling_log_probs]).double()
        return float((found - truth[:, 0]).abs().max())

    def compare(self, prompt: tuple[int, ...], responses: Iterable[Segment], **params: Any) -> str:
        # some may be aborted before their first token
        begun = [each for each in responses if each.token_ids]
        return self.within(
            self.gap(prompt, each, self.logits(prompt, each), **params) for each in begun
        )

    def within(self, gaps: Iterable[float]) -> str:
        """Text with the largest gap. Raises Fails if it exceeds the limit."""
        largest = max(gaps, default=0.0)
        if not largest <= self.limit:
            raise Fails(f"log-probs differ by {largest:.2g}, the limit is {self.limit:g}")
        return f"largest |Δ| {largest:.1e}"

    async def ask_long(self, patience: int = 8) -> list["asyncio.Task[tuple[Segment, ...]]"]:
        """Requests for as many tokens as fit. patience: milliseconds to wait for the first
        token."""
        before = self.counted
        most = self.longest - 2
        asked = (self.ask(self.prompt(2, row), (0, 1), row, max_tokens=most) for row in range(4))
        tasks = [asyncio.create_task(each) for each in asked]
        for _ in range(patience):
            if self.counted == before:
                await asyncio.sleep(0.001)
        return tasks

    def changed(self) -> Any:
        """A model with other weights."""
        other = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(len(self.served))
        with torch.no_grad():
            for weight in other.parameters():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(0.1 * noise * weight.abs().mean()).copy_(weight.to(self.dtype))
        return other

    def as_sent(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """The model's weights as a trainer sends them."""
        return [(name, weight.detach().to(self.dtype)) for name, weight in model.named_parameters()]

    def next_version(self) -> Version:
        return Version(self.engine.version.restart, self.engine.version.step + 1)

    async def load(self, model: Any) -> str:
        """Make the engine serve the model. Raises Fails if the receipt or the engine has hashes of
        other weights."""
        version = self.next_version()
        weights = self.as_sent(model)
        self.served[version.step] = model
        receipt = await self.engine.load_weights(version, weights)
        truth = stripe_hashes(weights)
        for hashes in (receipt.hashes, await self.engine.hashes()):
            if wrong := [name for name in truth if hashes.get(name) != truth[name]]:
                raise Fails(
                    f"{len(wrong)} of {len(truth)} hashes are not of the weights sent, e.g. of "
                    f"{wrong[0]}"
                )
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
    ordered[wanted.top_k if wanted.top_k > 0 else len(probs) :] = 0
    ordered /= ordered.sum()
    ordered[
        (ordered.cumsum(0) - ordered >= wanted.top_p) | (ordered < wanted.min_p * ordered[0])
    ] = 0
    return torch.zeros_like(probs).scatter(0, order, ordered / ordered.sum())


def chance(counts: Tensor, probs: Tensor) -> float:
    """The p-value of a chi-square test of the frequencies against the probabilities; rare tokens
    are pooled."""
    expected = probs * counts.sum()
    likely = expected >= 5
    observed, expected = (
        torch.cat((each[likely], each[~likely].sum()[None])) for each in (counts, expected)
    )
    observed = observed[expected >= 5]
    expected = expected[expected >= 5]
    square = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0).double()
    return float(torch.special.gammaincc(freedom / 2, square / 2)) if len(expected) > 1 else 1.0


async def log_probs(bench: Bench) -> str:
    """Log-probs are right after prompts of all lengths, up to the longest possible."""
    lengths = sorted(
        {1, 2, 3, bench.longest // 4 or 1, bench.longest // 2, bench.longest - bench.num_tokens}
    )
    gaps = []
    for heat in (1.0, 0.7, 1.5):
        asked = [bench.ask(bench.prompt(length), (0, 1), temperature=heat) for length in lengths]
        for length, found in zip(lengths, await asyncio.gather(*asked), strict=True):
            prompt = bench.prompt(length)
            gaps += [
                bench.gap(prompt, each, bench.logits(prompt, each), temperature=heat)
                for each in found
            ]
    return f"{bench.within(gaps)}, prompts of {', '.join(map(str, lengths))} tokens"


async def greedy(bench: Bench) -> str:
    """A greedy response equals that of `hf`, up to the first near tie."""
    prompts = [bench.prompt(2 + row % 7, row) for row in range(bench.num_prompts)]
    ties = 0
    asked = (
        bench.ask(prompt, greedy=True, max_tokens=min(8, bench.num_tokens)) for prompt in prompts
    )
    for prompt, (response,) in zip(prompts, await asyncio.gather(*asked), strict=True):
        logits = bench.logits(prompt, response)
        bench.within([bench.gap(prompt, response, logits)])
        behind = (
            logits.amax(-1) - logits.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        )
        if float(behind.max()) > 2 * bench.limit:
            raise Fails(f"a token is {float(behind.max()):.2g} nats less likely than the likeliest")
        ties += int((behind > 0).sum())
    return f"{count_of(len(prompts), 'prompt')}, {ties} near ties"


async def draws(bench: Bench, **params: Any) -> str:
    """Draws have the frequencies and the log-probs of the distribution that the parameters
    define."""
    prompt = bench.prompt(3)
    samples = tuple(range(50))
    asked = (
        bench.ask(prompt, samples, row, max_tokens=1, **params)
        for row in range(NUM_DRAWS // len(samples))
    )
    drawn = [each for group in await asyncio.gather(*asked) for each in group]
    logits = bench.logits(prompt, drawn[0])
    by_token = {each.token_ids[0]: each for each in drawn}.values()
    bench.within(bench.gap(prompt, each, logits, **params) for each in by_token)
    probs = distribution(logits[0], prompt, SamplingParams(1, **params))
    counts = torch.bincount(
        torch.tensor([each.token_ids[0] for each in drawn]), minlength=len(probs)
    ).double()
    if (found := chance(counts, probs)) < LEAST_CHANCE:
        raise Fails(
            f"the frequencies of {NUM_DRAWS} draws are not those of the distribution (p = "
            f"{found:.1e})"
        )
    longer = await bench.ask(prompt, (0, 1, 2, 3), row=NUM_DRAWS, **params)
    return f"{NUM_DRAWS} draws, p = {found:.2g}; {bench.compare(prompt, longer, **params)}"


def _middle_token(bench: Bench, ids: list[int]) -> dict[str, Any]:
    return {"stop_token_ids": (ids[len(ids) // 2],)}


def _middle_text(bench: Bench, ids: list[int]) -> dict[str, Any]:
    text = bench.text(ids)
    return {"stop": ("nowhere at all", text[len(text) // 2 :][:3])}


async def stops(bench: Bench, choose: Callable[[Bench, list[int]], dict[str, Any]]) -> str:
    """A response ends with the token that completes its stop. choose: picks it from a response
    without one."""
    for row in range(64):
        prompt = bench.prompt(5, row)
        (free,) = await bench.ask(prompt, greedy=True)
        if stop := choose(bench, list(free.token_ids)):
            found = await bench.ask(prompt, greedy=True, **stop)
            if found[0].finish_reason != "stop":
                raise Fails(f"a response continued where another had ended with {stop}")
            return f"after {len(found[0].token_ids)} tokens; {bench.compare(prompt, found)}"
    raise Fails("none of 64 greedy responses contains a text to stop at")


async def seeds(bench: Bench) -> str:
    """The request determines the draws: a sample is the same alone and in its group, and differs
    from all others."""
    prompt = bench.prompt(4)
    group = await bench.ask(prompt, (4, 0, 9), **_HOT)
    same = [await bench.ask(prompt, (sample,), **_HOT) for sample in (4, 0, 9)]
    others = [
        await bench.ask(prompt, (4,), row=1, **_HOT),
        await bench.ask(prompt, (4,), seed=2, **_HOT),
    ]
    found = [tuple(each.token_ids) for each in group]
    if len({*found, *(tuple(other[0].token_ids) for other in others)}) < 5:
        raise Fails("two samples, rows or seeds give the same tokens")
    if not getattr(bench.engine, "repeats_draws", True):
        raise UserError("samples differ, but repeating a request gives different tokens")
    if [tuple(each[0].token_ids) for each in same] != found:
        raise Fails("repeating a request gives different tokens")
    return "the same for a request again, others for another sample, row or seed"


async def limits(bench: Bench) -> str:
    """A response has at most the requested number of tokens; impossible requests are rejected
    without side effects."""
    prompt = bench.prompt(3)
    counts = (1, 2, bench.longest - 3)
    wrong: list[tuple[tuple[int, ...], dict[str, Any]]]
    wrong = [
        ((), {}),
        ((10**9,), {}),
        (prompt, {"max_tokens": bench.max_positions}),
        (prompt, {"top_p": 0.0}),
    ]
    for ids, params in wrong:
        (refused,) = await asyncio.gather(bench.ask(ids, **params), return_exceptions=True)
        if not isinstance(refused, UserError):
            raise Fails(f"no UserError for {len(ids)} tokens of prompt, {params}: {refused!r}")
    found = [each for count in counts for each in await bench.ask(prompt, max_tokens=count)]
    return (
        f"{len(wrong)} requests refused; cut off after {counts} tokens, "
        f"{bench.compare(prompt, found)}"
    )


async def pauses(bench: Bench) -> str:
    """Nothing is generated during a pause, and everything continues after it."""
    began = time.monotonic()
    await bench.ask(bench.prompt(2), max_tokens=1)
    long_enough = _QUIET_S + 4 * (time.monotonic() - began)
    tasks = await bench.ask_long()
    before = await bench.settle()
    late = asyncio.create_task(bench.ask(bench.prompt(2), max_tokens=1))
    await asyncio.sleep(long_enough)
    await bench.engine.pause()
    if bench.counted != before or late.done():
        raise Fails(f"{bench.counted - before} tokens were generated during a pause")
    await bench.engine.resume()
    results = await asyncio.gather(*tasks, late)
    return max(bench.compare(bench.prompt(2, row % 4), found) for row, found in enumerate(results))


async def new_weights(bench: Bench) -> str:
    """The engine has the weights that were sent, uses them, and reports their version. Older
    versions are rejected."""
    prompt = bench.prompt(5)
    other = bench.changed()
    hashes = await bench.load(other)
    found = bench.compare(prompt, await bench.ask(prompt, (0, 1)))
    version = bench.next_version()
    older = bench.engine.version
    bench.served[version.step] = other
    await bench.engine.load_weights(version, None)
    (renamed,) = await bench.ask(prompt)
    if {*renamed.versions} != {version.step}:
        raise Fails(
            f"{older.step} was renamed to {version.step}, but tokens are of {renamed.versions}"
        )
    (refused,) = await asyncio.gather(
        bench.engine.load_weights(older, None), return_exceptions=True
    )
    if not isinstance(refused, ValueError):
        raise Fails(f"the older version {older.step} was taken")
    return f"{hashes}; {found}"


async def in_flight(bench: Bench) -> str:
    """After a weight update within a response, tokens come from their version's weights, with old
    or new keys and values."""
    for patience in (8, 16, 4, 32, 2, 64, 1, 256, 1024):
        tasks = await bench.ask_long(patience)
        await bench.load(bench.changed())
        met = set[str]()
        gaps = list[float]()
        for row, found in enumerate(await asyncio.gather(*tasks)):
            prompt = bench.prompt(2, row)
            for each in found:
                if each.finish_reason == "abort":
                    met.add("abort")
                if not each.token_ids:
                    continue
                kept = bench.gap(prompt, each, bench.logits(prompt, each, keeps_kv=True))
                new = bench.gap(prompt, each, bench.logits(prompt, each, keeps_kv=False))
                gaps.append(min(kept, new))
                if len({*each.versions}) > 1:
                    met.add("keep" if kept < new else "recompute")
        figures = bench.within(gaps)
        if met:
            return f"{' and '.join(sorted(met))}; {figures}"
    raise UserError("new weights wait until responses have ended")


async def release(bench: Bench) -> str:
    """Freed memory is restored with the next weights."""
    await bench.engine.pause(release=True)
    hashes = await bench.load(bench.model)
    await bench.engine.resume()
    return f"{hashes}; {bench.compare(bench.prompt(5), await bench.ask(bench.prompt(5)))}"


async def first_weights(bench: Bench) -> str:
    try:
        return await bench.load(bench.model)
    except UserError:  # a server for evaluation, which must have the model's weights already
        bench.served[bench.engine.version.step] = bench.model
        raise


FIRST: Final = "first weights"
PROPERTIES: dict[str, Callable[[Bench], Awaitable[str]]] = {
    FIRST: first_weights,
    "log-probs": log_probs,
    "greedy tokens": greedy,
    "draws": draws,
    "top_k": partial(draws, top_k=5),
    "top_p": partial(draws, top_p=0.8),
    "min_p": partial(draws, min_p=0.2),
    "repetition_penalty": partial(draws, repetition_penalty=1.5),
    "stop token ids": partial(stops, choose=_middle_token),
    "stop strings": partial(stops, choose=_middle_text),
    "seeds": seeds,
    "limits": limits,
    "pause": pauses,
    "new weights": new_weights,
    "weights in flight": in_flight,
    "released memory": release,
}
MAY_REFUSE: Final = (
    *(FIRST, "new weights", "weights in flight", "released memory"),
    *("top_k", "top_p", "min_p", "repetition_penalty", "seeds"),
)
"""Properties that an engine may reject with UserError; a run that needs one gets that message at
its start."""


async def check_engine(bench: Bench, names: Iterable[str] = PROPERTIES) -> AsyncIterator[Finding]:
    """Yields each finding as soon as it is known. The last property leaves the engine with its
    first weights."""
    for name in names:
        work = asyncio.wait_for(PROPERTIES[name](bench), _DEADLINE_S)
        (found,) = await asyncio.gather(work, return_exceptions=True)
        if isinstance(found, BaseException) and not isinstance(found, Exception):
            raise found  # the process is being ended
        outcome = "held"
        text = str(found)
        if isinstance(found, UserError) and name in MAY_REFUSE:
            outcome = "not supported"
        elif isinstance(found, Exception):
            outcome = "failed"
            text = text if isinstance(found, Fails) else f"{type(found).__name__}: {text}"
        yield Finding(name, outcome, text)
        if (name, outcome) == (FIRST, "failed"):
            return  # no other check is meaningful then
